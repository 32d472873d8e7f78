"""A checkpoint with some changes: as the checks see it before a byte is written, and its files."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.checkpoint.chat_template import copy_named_templates
from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.header import read_header
from vexport.checkpoint.index import INDEX_NAME, SourceIndex, unchanged
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.writer import header_bytes
from vexport.checks.vllm.view import CheckpointView
from vexport.files import read_json_object, write_text
from vexport.outputs.digests import digest_of, record_digests, recorded_digests
from vexport.repair.changes import Changes, Edit
from vexport.types import OnProgress, TensorInfo, TensorSpec

if TYPE_CHECKING:
    import torch


class Overlay(Reader):
    """A reader that answers for edited tensors itself; it holds the tensors of one edit at a time."""

    def __init__(self, base: Reader, edits: Mapping[str, Edit]) -> None:
        super().__init__()
        self.base = base
        self._edits = edits
        self._last: tuple[Edit, Mapping[str, torch.Tensor]] | None = None

    def raw(self, tensor: TensorInfo) -> memoryview:
        """The bytes of a tensor as it will be written."""
        edit = self._edits.get(tensor.name)
        if edit is None:
            return self.base.raw(tensor)
        from vexport.checkpoint.tensors import raw_bytes

        return raw_bytes(self._made(edit)[tensor.name])

    def is_in_place(self, tensor: TensorInfo) -> bool:
        """Whether a tensor is as it was, in a local file."""
        return tensor.name not in self._edits and self.base.is_in_place(tensor)

    def release(self, tensors: Iterable[TensorInfo]) -> None:
        """Pages of the checkpoint's files that are no longer needed; edited tensors have none."""
        self.base.release(tensor for tensor in tensors if tensor.name not in self._edits)

    def is_edited(self, name: str) -> bool:
        """Whether a tensor's bytes are not those of the checkpoint's files."""
        return name in self._edits or isinstance(self.base, Overlay) and self.base.is_edited(name)

    def _made(self, edit: Edit) -> "Mapping[str, torch.Tensor]":
        if self._last is None or self._last[0] is not edit:
            self._last = None
            self._last = (edit, edit.make())
        return self._last[1]


def apply(view: CheckpointView, changes: Changes) -> CheckpointView:
    """The checkpoint with the changes."""
    index = view.index
    edits = {spec.name: edit for edit in changes.edits for spec in edit.tensors}
    tensors = dict(_tensors(index, edits))
    config = index.config if changes.config is None else changes.config
    reader = Overlay(view.reader, edits) if edits else view.reader
    return CheckpointView(replace(index, config=config, tensors=tensors), reader)


def _tensors(index: SourceIndex, edits: Mapping[str, Edit]) -> Iterator[tuple[str, TensorInfo]]:
    """Tensors in the order of their files, new ones after the one that they are near."""
    fresh: dict[str, list[str]] = {}
    for name, edit in edits.items():
        if name not in index.tensors:
            fresh.setdefault(edit.near, []).append(name)
    for name, tensor in index.tensors.items():
        yield name, _edited(edits[name], name, tensor.file) if name in edits else tensor
        for new in fresh.get(name, ()):
            yield new, _edited(edits[new], new, tensor.file)


def _edited(edit: Edit, name: str, file: Path) -> TensorInfo:
    spec = next(spec for spec in edit.tensors if spec.name == name)
    size = num_bytes(spec.dtype, spec.shape)
    return TensorInfo(name=name, dtype=spec.dtype, shape=spec.shape, file=file, start=0, end=size)


def write_repaired(view: CheckpointView, folder: Path, *, on_progress: OnProgress) -> None:
    """Write weights, index and side files into the empty `folder`, config.json last.

    `on_progress` counts the bytes of the weights. Memory holds one edit or one part of a file.
    """
    with unchanged(view.index):
        _write_files(view, folder, on_progress)


def _write_files(view: CheckpointView, folder: Path, on_progress: OnProgress) -> None:
    index = view.index
    files: dict[Path, list[TensorInfo]] = {}
    for tensor in index.tensors.values():
        files.setdefault(tensor.file, []).append(tensor)
    recorded, digests, done = recorded_digests(index.root), dict[str, str](), 0
    for file, tensors in files.items():
        untouched = _is_untouched(view, file, tensors)
        if untouched:
            shutil.copyfile(file, folder / file.name)  # never a link: it may be changed
        else:
            _write(view, tensors, folder / file.name)
        known = recorded.get(file.name) if untouched else None
        digests[file.name] = known or digest_of(folder / file.name)
        done += sum(tensor.num_bytes for tensor in tensors)
        on_progress("write", done, index.num_bytes)
    if (index.root / INDEX_NAME).is_file():
        write_text(folder / INDEX_NAME, _index_text(index))
    for path in index.side_files:
        shutil.copyfile(path, folder / path.name)
    record_digests(folder, digests)
    copy_named_templates(index.root, folder)
    _write_config(index, folder)


def _index_text(index: SourceIndex) -> str:
    """The index of what is written; other metadata of the old one stays."""
    metadata = read_json_object(index.root / INDEX_NAME).get("metadata")
    kept = metadata if isinstance(metadata, dict) else {}
    weight_map = {name: tensor.file.name for name, tensor in sorted(index.tensors.items())}
    content = {"metadata": {**kept, "total_size": index.num_bytes}, "weight_map": weight_map}
    return json.dumps(content, indent=2) + "\n"


def _is_untouched(view: CheckpointView, file: Path, tensors: list[TensorInfo]) -> bool:
    reader = view.reader
    edited = isinstance(reader, Overlay) and any(reader.is_edited(tensor.name) for tensor in tensors)
    return not edited and read_header(file).keys() == {tensor.name for tensor in tensors}


def _write(view: CheckpointView, tensors: list[TensorInfo], target: Path) -> None:
    specs = [TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape) for tensor in tensors]
    with target.open("wb") as file:
        file.write(header_bytes(specs))
        for tensor in tensors:
            data = view.reader.raw(tensor)
            assert len(data) == tensor.num_bytes, f"{tensor.name}: {len(data)} bytes, not {tensor.num_bytes}"
            file.write(data)
            view.reader.release([tensor])


def _write_config(index: SourceIndex, folder: Path) -> None:
    old = index.root / "config.json"
    if index.config == read_json_object(old):
        shutil.copyfile(old, folder / old.name)
    else:
        write_text(folder / old.name, json.dumps(index.config, indent=2) + "\n")
