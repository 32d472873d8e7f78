"""Apply repairs to a checkpoint in memory, and write the repaired checkpoint."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.chat_template import copy_named_templates, named_template_files
from vexport.checkpoint.index import INDEX_NAME, read_header
from vexport.checkpoint.reader import Derived, DerivedReader, Reader
from vexport.checkpoint.writer import header_bytes, stored_parts
from vexport.checks.vllm.view import CheckpointView
from vexport.files import read_json_object, write_text
from vexport.outputs.digests import digest_of, record_digests, recorded_digests
from vexport.outputs.manifest import record
from vexport.records import Finding, Json, OnProgress, Repair, TensorInfo, TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Tensors that replace tensors of the same name, or are added next to the tensor `near`.

    `make` returns the new values, with the keys of `tensors`. It is called when a tensor is read,
    and must return the same values each time.
    """

    tensors: Mapping[str, TensorSpec]
    near: str
    make: "Callable[[], Mapping[str, torch.Tensor]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes of a family of repairs: the complete config if it changes, and tensors.

    `refusals` are errors that are not repaired, because several repairs are possible.
    """

    repairs: tuple[Repair, ...] = ()
    config: Mapping[str, Json] | None = None
    edits: tuple[Edit, ...] = ()
    refusals: tuple[Finding, ...] = ()

    def __add__(self, other: "Changes") -> "Changes":
        """Return the changes of both, with the config of the first."""
        return replace(
            self,
            repairs=self.repairs + other.repairs,
            edits=self.edits + other.edits,
            refusals=self.refusals + other.refusals,
        )


LOSSLESS = "nothing"


def object_at(config: dict[str, Json], *keys: str) -> dict[str, Json]:
    """Return the object below these keys of a config, to be changed in place."""
    for key in keys:
        value = config[key]
        assert isinstance(value, dict), key
        config = value
    return config


def apply(view: CheckpointView, changes: Changes) -> CheckpointView:
    """Return the checkpoint with the changes. Memory holds the tensors of one edit at a time."""
    computed, stored = lru_cache(maxsize=1)(lambda make: make()), view.index.tensors
    derived: dict[str, Derived] = {}
    for edit in changes.edits:
        for key, spec in edit.tensors.items():
            source = stored.get(spec.name, stored[edit.near])
            derived[spec.name] = _derived(key, spec, source, partial(computed, edit.make))
    tensors = {**stored, **{name: each.info(name) for name, each in derived.items()}}
    config = view.index.config if changes.config is None else changes.config
    reader = DerivedReader(view.reader, derived) if derived else view.reader
    return CheckpointView(replace(view.index, config=config, tensors=tensors), reader)


def _derived(
    key: str, spec: TensorSpec, source: TensorInfo, make: "Callable[[], Mapping[str, torch.Tensor]]"
) -> Derived:
    def rows(reader: Reader, part: slice) -> npt.NDArray[np.generic]:
        from vexport.checkpoint.tensors import raw_bytes

        data = np.frombuffer(raw_bytes(make()[key]), np.uint8)
        return data.reshape(spec.shape[0] if spec.shape else 1, -1)[part]

    return Derived(dtype=spec.dtype, shape=spec.shape, sources=(source,), rows=rows)


def write_repaired(view: CheckpointView, folder: Path, *, on_progress: OnProgress) -> None:
    """Write weights, index and side files into the empty `folder`, config.json last.

    `on_progress` receives the number of written bytes. The tensors of one edit, or a part of a
    file, are in memory at a time.
    """
    index = view.index
    files: dict[Path, list[TensorInfo]] = {}
    for tensor in index.tensors.values():
        files.setdefault(tensor.file, []).append(tensor)
    recorded = recorded_digests(index.root)
    digests: dict[str, str] = {}
    done = 0
    repaired = False
    for file, tensors in files.items():
        untouched = _is_untouched(view, file, tensors)
        record(folder / file.name)
        if untouched:
            shutil.copyfile(file, folder / file.name)  # never a link: the copy may be changed
        else:
            _write(view, tensors, folder / file.name)
        digest = digest_of(folder / file.name)
        repaired = repaired or recorded.get(file.name, digest) != digest or not untouched
        digests[file.name] = digest
        done += sum(tensor.num_bytes for tensor in tensors)
        on_progress("write", done, index.num_bytes)
    if (index.root / INDEX_NAME).is_file():
        metadata = read_json_object(index.root / INDEX_NAME).get("metadata")
        record(folder / INDEX_NAME)
        kept = metadata if isinstance(metadata, dict) else {}
        weight_map = {name: tensor.file.name for name, tensor in sorted(index.tensors.items())}
        content = {"metadata": {**kept, "total_size": index.num_bytes}, "weight_map": weight_map}
        write_text(folder / INDEX_NAME, json.dumps(content, indent=2) + "\n")
    for path in index.side_files:
        record(folder / path.name)
        shutil.copyfile(path, folder / path.name)
    for name in named_template_files(index.root):
        record(folder / name)
    record_digests(folder, digests, repaired=repaired)
    copy_named_templates(index.root, folder)
    config = index.root / "config.json"
    record(folder / config.name)
    if index.config == read_json_object(config):
        shutil.copyfile(config, folder / config.name)
    else:
        write_text(folder / config.name, json.dumps(index.config, indent=2) + "\n")


def _is_untouched(view: CheckpointView, file: Path, tensors: list[TensorInfo]) -> bool:
    in_place = all(view.reader.is_in_place(tensor) for tensor in tensors)
    return in_place and read_header(file).keys() == {tensor.name for tensor in tensors}


def _write(view: CheckpointView, tensors: list[TensorInfo], target: Path) -> None:
    specs = [
        TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape) for tensor in tensors
    ]
    with target.open("wb") as file:
        file.write(header_bytes(specs))
        for tensor in tensors:
            in_place = view.reader.is_in_place(tensor)
            for data in stored_parts(tensor) if in_place else (view.reader.raw(tensor),):
                file.write(data)
            view.reader.release([tensor])
