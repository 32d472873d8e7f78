"""Records of plans: tensors, linear layers, and the table of schemes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vexport.records.findings import Finding

# safetensors' names of the dtypes of unquantized weights.
FLOATING = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor of a safetensors file, described by the file's header.

    `dtype` is safetensors' name (BF16, F8_E4M3, ...). `start` and `end` are absolute byte offsets
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
    """Name, safetensors dtype and shape of a tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """Part of a stored tensor that is a layer's weight, for stacked or transposed weights.

    `expert` is the index along the first dimension of a stacked tensor (0 for other tensors). If
    `transposed` is True, the matrix is stored as (in, out). The rows `start` to `stop` are taken
    after transposing.
    """

    expert: int
    transposed: bool
    start: int
    stop: int


# Storage of the KV cache: an fp8 scale for all keys and one for all values of a layer, or one
# scale for each KV head. With `fp8_attention`, all queries of a layer have a scale, too.
KvCache = Literal["fp8", "fp8_per_head", "fp8_attention"]
# Action for layers with shapes that vLLM cannot run.
OnUnsupportedShape = Literal["refuse", "keep", "smaller-group"]
# Number of columns that share a scale. "channel" means that a whole row shares a scale.
GroupSize = int | Literal["channel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPlan:
    """A linear layer to quantize: its name in the output, and the stored tensor with its weight.

    The weight has the shape (out_features, in_features). It is the whole tensor, or `part` of it.
    """

    name: str
    weight: str
    out_features: int
    in_features: int
    part: WeightPart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """An attention layer that gets scales for the KV cache, by its name in the checkpoint.

    `heads` is the number of KV heads with separate scales. None means that all heads share a scale.
    `has_query_scale` is True if the queries have a scale, too.
    """

    name: str
    heads: int | None
    has_query_scale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeOnGpu:
    """How vLLM runs a scheme on a GPU.

    `input_bits` is the number of bits of the inputs that the kernel multiplies, or None if vLLM
    cannot run the scheme there. `native` is True if these are the stored bits.
    """

    input_bits: int | None
    native: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeOutlook:
    """Result of applying a scheme to all linear layers of a model.

    - `reason` is the reason why the scheme does not fit, empty if it fits.
    - `layers` is the number of linear layers that fit the scheme, and `output_bytes` is the size if
      the other layers are kept.
    - `group_sizes` are smaller group sizes that fit all layers, largest first. It is empty if the
      scheme's group size fits.
    - `least_sm` is the lowest compute capability on which vLLM loads the scheme.
    - `full_sm` is the lowest compute capability on which inputs are multiplied with as many bits as
      stored. It is None if no capability does.
    - `on_gpu` is how a GPU runs the scheme, if the plan is for a GPU, and `faults` are the known
      faults of vLLM in its layers on this GPU.
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
    faults: tuple[Finding, ...] = ()

    @property
    def runs_on_gpu(self) -> bool:
        """Return True if vLLM runs the scheme on the GPU of the plan."""
        return self.on_gpu is not None and self.on_gpu.input_bits is not None

    @property
    def is_native(self) -> bool:
        """Return True if the GPU of the plan runs the scheme with the stored precision."""
        return self.on_gpu is not None and self.on_gpu.native


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Scheme to start with for weights of `bits` bits, and the reason."""

    bits: int
    scheme: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOutlook:
    """GPU for which a table of schemes was made.

    `name` is empty and `usable_bytes` is None if only the compute capability `sm` is known.
    `usable_bytes` is the memory that vLLM uses by default, of one GPU.
    """

    name: str
    sm: int
    usable_bytes: int | None
    recommended: tuple[Recommendation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeTable:
    """Every scheme for a model (`vexport plan SOURCE --format json`)."""

    schema: Literal["vexport.plan-schemes/1"] = "vexport.plan-schemes/1"
    source: str
    architecture: str
    parameters: int
    source_bytes: int
    layers: int
    schemes: tuple[SchemeOutlook, ...]
    gpu: GpuOutlook | None = None
