"""The unquantized checkpoint that another one was made from."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch

from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_tensor, read_weight
from vexport.checks.vllm.view import CheckpointView
from vexport.plan.linears import find_linears, names_of
from vexport.types import LinearPlan


class Source:
    """Weights by the name of their layer, also where the source stores experts together."""

    def __init__(self, root: Path, reader: Reader) -> None:
        self.index: SourceIndex = read_index(root)
        self._reader = reader

    @cached_property
    def linears(self) -> Mapping[str, LinearPlan]:
        """The linear layers by name."""
        architecture = CheckpointView(self.index, self._reader).architecture
        return {
            linear.name: linear for linear in find_linears(self.index, names_of(self.index, architecture))
        }

    def weight(self, layer: str) -> torch.Tensor | None:
        """A layer's weight (out, in) as it is stored; None where the source has no such layer."""
        linear = self.linears.get(layer)
        if linear is None:
            return None
        return read_weight(self._reader, self.index.tensors[linear.weight], linear.part)

    def tensor(self, name: str) -> torch.Tensor:
        """A stored tensor."""
        return read_tensor(self._reader, self.index.tensors[name])
