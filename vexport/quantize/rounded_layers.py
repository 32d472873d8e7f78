"""Finished layers on disk: what is rounded once is not rounded again."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from vexport.files import atomic_path, from_json, to_json, write_text
from vexport.formats.packing.base import Array
from vexport.types.rounding import LayerRounding

Stored = Mapping[str, Array]


class StoredTensors(Stored):
    """Tensors of several files by name, each read when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Array:
        with safe_open(self._files[name], framework="np") as opened:
            value: Array = opened.get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class RoundedLayers:
    """The bytes that replace the weights of each rounded decoder layer, in files of a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name

    def get(self, number: int) -> Stored | None:
        """The bytes of a finished layer by tensor name; None where it is not finished."""
        file, told = self._files(number)
        if not told.is_file():
            return None
        with safe_open(file, framework="np") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

    def how(self) -> tuple[LayerRounding, ...]:
        """How the finished layers were rounded, in order."""
        files = sorted(self._folder.glob(f"{self._name}.layer-*.json"))
        return tuple(from_json(LayerRounding, file) for file in files)

    def put(self, number: int, stored: Stored, how: LayerRounding) -> None:
        """Keep a finished layer."""
        file, told = self._files(number)
        with atomic_path(file) as temporary:
            save_file({name: np.ascontiguousarray(value) for name, value in stored.items()}, temporary)
        write_text(told, to_json(how))

    def tensors(self) -> "StoredTensors":
        """The bytes of all finished layers."""
        files = sorted(self._folder.glob(f"{self._name}.layer-*.safetensors"))
        where = dict[str, Path]()
        for file in files:
            with safe_open(file, framework="np") as opened:
                where |= dict.fromkeys(opened.keys(), file)
        return StoredTensors(where)

    def _files(self, number: int) -> tuple[Path, Path]:
        name = f"{self._name}.layer-{number:04d}"
        return self._folder / f"{name}.safetensors", self._folder / f"{name}.json"
