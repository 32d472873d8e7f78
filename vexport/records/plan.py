"""Tensors, linear layers, the request of a plan, and the table of schemes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a safetensors file, known from its header alone.

    `dtype` is safetensors' name (BF16, F8_E4M3, ...); `start` and `end` are absolute byte offsets
    in `file`.
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
    """The part of a stored tensor that is a layer's weight: of experts stored together, or (in,
    out).

    `expert` is along the first of three dimensions; the matrix is transposed, then cut to rows.
    """

    expert: int
    transposed: bool
    start: int
    stop: int


# How the KV cache is stored: one fp8 scale for keys and one for values of a layer, or one for each
# KV head.
KvCache = Literal["fp8", "fp8_per_head"]
# The treatment of layers whose shapes vLLM could not run.
OnUnsupportedShape = Literal["refuse", "keep", "smaller-group"]
# Columns that share a scale, or one scale for a whole row.
GroupSize = int | Literal["channel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPlan:
    """One linear layer to quantize: its name in the output, the stored tensor that holds its
    weight.

    The weight is (out_features, in_features): the whole tensor, or `part` of it.
    """

    name: str
    weight: str
    out_features: int
    in_features: int
    part: WeightPart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """An attention layer that gets scales for the KV cache: its module's name in the checkpoint.

    `heads` is how many KV heads have scales of their own, None where one serves them all.
    """

    name: str
    heads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeOnGpu:
    """How vLLM runs a scheme on a GPU.

    `input_bits` is the number of bits of the inputs that the kernel multiplies, or None if vLLM
    cannot run the scheme there. A scheme is `native` if these are the bits that it stores.
    """

    input_bits: int | None
    native: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeOutlook:
    """One scheme for all linear layers of a model.

    `reason` says why it does not fit, empty where it does; `layers` is how many linear layers fit
    it and `output_bytes` the size with the others kept. `group_sizes` are smaller ones with which
    all layers fit, largest first, where those of the scheme's own do not. `least_sm` is the least
    compute capability on which vLLM loads it, `full_sm` that on which it multiplies inputs of as
    many bits as are stored, None for none. `on_gpu` is set if the plan is for a GPU.
    """

    scheme: str
    fits: bool
    reason: str
    layers: int
    output_bytes: int
    bits: float
    needs_calibration: bool
    least_sm: int
    full_sm: int | None
    generation: str
    group_sizes: tuple[int, ...] = ()
    on_gpu: SchemeOnGpu | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The scheme to start with for weights of `bits` bits, and the reason in words."""

    bits: int
    scheme: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOutlook:
    """The GPU that a table of schemes is for.

    `name` is empty and `usable_bytes` is None if only the compute capability `sm` is known.
    `usable_bytes` is the memory that vLLM uses by default, of one GPU.
    """

    name: str
    sm: int
    usable_bytes: int | None
    recommended: tuple[Recommendation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeTable:
    """Every scheme for one model (`vexport plan SOURCE --format json`)."""

    schema: Literal["vexport.plan-schemes/1"] = "vexport.plan-schemes/1"
    source: str
    architecture: str
    parameters: int
    source_bytes: int
    layers: int
    schemes: tuple[SchemeOutlook, ...]
    gpu: GpuOutlook | None = None
