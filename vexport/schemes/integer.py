"""Integer weights: INT8 per channel with dynamic INT8 inputs (W8A8), packed groups (WNA16).

Layouts: compressed_tensors_w8a8_int8.py and compressed_tensors_wNa16.py in vLLM's
quantization/compressed_tensors/schemes.
"""

from dataclasses import dataclass

from vexport.schemes.base import SchemeArgs, Share, whole_groups
from vexport.types import LinearPlan, TensorSpec

INT32_BITS = 32


@dataclass(frozen=True, slots=True)
class W8A8Family:
    """INT8 weights per channel, INT8 inputs per token."""

    format: str = "int-quantized"
    least_sm: int = 75
    cpu: str = "native"
    shared: tuple[str, ...] = ()

    def layout(self, args: SchemeArgs, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """weight (out, in), weight_scale (out, 1)."""
        rows, columns, name = linear.out_features, linear.in_features, linear.name
        return (
            TensorSpec(name=f"{name}.weight", dtype="I8", shape=(rows, columns)),
            TensorSpec(name=f"{name}.weight_scale", dtype="F32", shape=(rows, 1)),
        )

    def misfit(self, args: SchemeArgs, share: Share) -> str | None:
        """Any shape fits: scales are per channel."""
        return None


@dataclass(frozen=True, slots=True)
class WNA16Family:
    """Weights of few bits packed into int32 along in_features; group scales in the model's dtype."""

    format: str = "pack-quantized"
    least_sm: int = 75
    cpu: str = "native"
    shared: tuple[str, ...] = ()

    def layout(self, args: SchemeArgs, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """weight_packed (out, ceil(in*bits/32)), weight_scale (out, in/group), weight_shape (2,)."""
        rows, columns, name = linear.out_features, linear.in_features, linear.name
        packed = -(-columns * args.weights.num_bits // INT32_BITS)
        return (
            TensorSpec(name=f"{name}.weight_packed", dtype="I32", shape=(rows, packed)),
            TensorSpec(
                name=f"{name}.weight_scale", dtype=source_dtype, shape=(rows, columns // group_size(args))
            ),
            TensorSpec(name=f"{name}.weight_shape", dtype="I64", shape=(2,)),
        )

    def misfit(self, args: SchemeArgs, share: Share) -> str | None:
        """in_features must be a multiple of the group size."""
        return whole_groups(share, group_size(args))


def group_size(args: SchemeArgs) -> int:
    """The weight's group size; a WNA16 preset always has one."""
    size = args.weights.group_size
    assert size is not None
    return size


W8A8_FAMILY = W8A8Family()
WNA16_FAMILY = WNA16Family()
