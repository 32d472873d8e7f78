"""Tensors by name, place, dtype and shape, and the parts of them that are weights."""

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a safetensors file, known from its header alone.

    `dtype` is safetensors' name (BF16, F8_E4M3, ...); `start` and `end` are absolute byte offsets in `file`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that will be written: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """Which part of a stored tensor is a layer's weight: experts that are stored together, or (in, out).

    A tensor of three dimensions is indexed by `expert` along its first; it is transposed where `transposed`,
    and cut to the rows `start` to `stop`, taking every `step`-th (2 where gate and up alternate).
    """

    expert: int
    transposed: bool
    start: int
    stop: int
    step: int = 1
