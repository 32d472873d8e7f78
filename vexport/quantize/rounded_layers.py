"""Store finished decoder layers in files of a folder, so that a killed call resumes after them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from vexport.files import atomic_path, from_json, to_json, write_text
from vexport.formats.packing.base import Array
from vexport.outputs.manifest import record
from vexport.quantize.stream import Stored
from vexport.records.calibration import LayerRounding


class RoundedLayers(Stored):
    """Bytes of the weights of rounded layers, by tensor name, in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = dict[str, Path]()
        for report in folder.glob("layer-*.json"):
            file = report.with_suffix(".safetensors")
            with safe_open(file, framework="np") as opened:
                self._files |= dict.fromkeys(opened.keys(), file)

    def __getitem__(self, name: str) -> Array:
        with safe_open(self._files[name], framework="np") as opened:
            value: Array = opened.get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def report_of(self, number: int) -> LayerRounding | None:
        """Return the report of a rounded layer, or None if the layer is not finished."""
        report = self._folder / f"layer-{number:04d}.json"
        return from_json(LayerRounding, report) if report.is_file() else None

    def store_layer(self, number: int, stored: Stored, report: LayerRounding) -> None:
        """Store a finished layer for all ranks and for later calls."""
        report_file = self._folder / f"layer-{number:04d}.json"
        tensors_file = report_file.with_suffix(".safetensors")
        record(report_file)
        record(tensors_file)
        with atomic_path(tensors_file) as temporary:
            tensors = {name: np.ascontiguousarray(value) for name, value in stored.items()}
            save_file(tensors, temporary)
        write_text(report_file, to_json(report))
