"""Unquantized source of a quantized checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch

from vexport.architectures.built import BuiltModel
from vexport.architectures.linears import find_linears
from vexport.architectures.stored import joined_name
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_tensor, read_weight
from vexport.checks.vllm.groups import StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.records import FLOATING, LinearPlan, TensorInfo


class ComparedSource:
    """Reads weights of the unquantized source by layer name. Experts may be stored stacked."""

    def __init__(self, index: SourceIndex, reader: Reader) -> None:
        self.index, self.reader = index, reader

    @cached_property
    def linears(self) -> Mapping[str, LinearPlan]:
        """Linear layers by name."""
        names = BuiltModel(self.index).names
        return {linear.name: linear for linear in find_linears(self.index, names)}

    def weight(self, layer: str) -> torch.Tensor | None:
        """Return a layer's weight (out, in) as stored, or None if the source has no such layer."""
        linear = self.linears.get(layer)
        if linear is None:
            return None
        return read_weight(self.reader, self.index.tensors[linear.weight], linear.part)


# A weight (out, in) of the source as parts with consecutive rows, which are views of its files.
Pieces = Sequence[torch.Tensor]


class SourceTensors(ComparedSource):
    """Finds the source's tensors for the tensors of a checkpoint, and records which were found.

    Names may differ if vLLM maps them to the same name. Layers may be fused on one side.
    """

    def __init__(self, view: CheckpointView, index: SourceIndex, reader: Reader) -> None:
        super().__init__(index, reader)
        self._view, self._vllm_name = view, view.model.architecture.vllm_name
        self._linears = {self._vllm_name(name): linear for name, linear in self.linears.items()}
        self._tensors = {
            self._vllm_tensor(name): tensor for name, tensor in self.index.tensors.items()
        }
        self._found: set[str] = set()
        self._read_since: dict[str, TensorInfo] = {}

    def pieces(self, layer: StoredLayer) -> Pieces:
        """Return a layer's weight in the source, or an empty tuple if it is missing."""
        linear = self._linear(layer.name)
        if linear is not None:
            return (self._read(linear),)
        return self._slice_fused(layer) or self._join_parts(layer) or self._stacked_experts(layer)

    def tensor(self, name: str) -> TensorInfo | None:
        """Return the source's tensor for an unquantized tensor of the checkpoint."""
        stored = joined_name(*name.rpartition(".")[::2])
        tensor = self.index.tensors.get(stored) or self._tensors.get(self._vllm_tensor(stored))
        if tensor is not None:
            self._found.add(tensor.name)
        return tensor

    def missing(self) -> Iterator[TensorInfo]:
        """Yield the source's tensors that were never requested."""
        yield from (
            tensor for name, tensor in self.index.tensors.items() if name not in self._found
        )

    def release(self) -> None:
        """Release the pages of the weights that were read since the last call."""
        self.reader.release(self._read_since.values())
        self._read_since.clear()

    def _vllm_tensor(self, name: str) -> str:
        module, dot, parameter = name.rpartition(".")
        return f"{self._vllm_name(module)}{dot}{parameter}"

    def _linear(self, name: str) -> LinearPlan | None:
        return self.linears.get(name) or self._linears.get(self._vllm_name(name))

    def _read(self, linear: LinearPlan) -> torch.Tensor:
        self._found.add(linear.weight)
        self._read_since[linear.weight] = self.index.tensors[linear.weight]
        weight = self.weight(linear.name)
        assert weight is not None
        return weight

    def _slice_fused(self, layer: StoredLayer) -> Pieces:
        """Return the rows of a layer that the source stores fused (q/k/v), in vLLM's order."""
        linear = self._linear(layer.fused.name) if len(layer.fused.members) > 1 else None
        rows = [self._rows(name) for name in layer.fused.members]
        if linear is None or sum(rows) != linear.out_features:
            return ()
        position = layer.fused.members.index(layer.name)
        start = sum(rows[:position])
        return (self._read(linear)[start : start + rows[position]],)

    def _rows(self, name: str) -> int:
        layer = self._view.layers.by_name[name]
        shape = layer.group.shape(layer.parameters) if layer.group else None
        if shape is None and (weight := layer.parameters.get("weight")) is not None:
            return weight.shape[0]
        return shape[0] if shape else 0

    def _join_parts(self, layer: StoredLayer) -> Pieces:
        prefix, dot, projection = layer.name.rpartition(".")
        parts = [
            self._linear(f"{prefix}{dot}{part}")
            for part in self._view.model.architecture.fused.get(projection, ())
        ]
        return tuple(self._read(part) for part in parts if part) if parts and all(parts) else ()

    def _stacked_experts(self, layer: StoredLayer) -> Pieces:
        """Return the experts (out, in) of a layer that both sides store stacked (gpt-oss)."""
        tensor = self.index.tensors.get(layer.name)
        if tensor is None or len(tensor.shape) != 3 or tensor.dtype not in FLOATING:
            return ()
        self._found.add(tensor.name)
        self._read_since[tensor.name] = tensor
        return tuple(read_tensor(self.reader, tensor).transpose(1, 2))
