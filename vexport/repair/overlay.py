"""A checkpoint as it would be with some changes: every check can look at it before a byte is written."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.view import CheckpointView
from vexport.repair.changes import Changes, Edit
from vexport.types import TensorInfo

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
    tensors = dict(_tensors(index, edits, changes.dropped))
    config = index.config if changes.config is None else changes.config
    reader = Overlay(view.reader, edits) if edits else view.reader
    return CheckpointView(replace(index, config=config, tensors=tensors), reader)


def _tensors(
    index: SourceIndex, edits: Mapping[str, Edit], dropped: frozenset[str]
) -> Iterator[tuple[str, TensorInfo]]:
    """Tensors in the order of their files, new ones after the one that they are near."""
    fresh: dict[str, list[str]] = {}
    for name, edit in edits.items():
        if name not in index.tensors:
            fresh.setdefault(edit.near, []).append(name)
    for name, tensor in index.tensors.items():
        if name not in dropped:
            yield name, _edited(edits[name], name, tensor.file) if name in edits else tensor
        for new in fresh.get(name, ()):
            yield new, _edited(edits[new], new, tensor.file)


def _edited(edit: Edit, name: str, file: Path) -> TensorInfo:
    spec = next(spec for spec in edit.tensors if spec.name == name)
    size = num_bytes(spec.dtype, spec.shape)
    return TensorInfo(name=name, dtype=spec.dtype, shape=spec.shape, file=file, start=0, end=size)
