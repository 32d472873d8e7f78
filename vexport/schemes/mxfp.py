"""MXFP4 and MXFP8: groups of 32 with a power of two as scale, stored as an exponent (e8m0).

Layouts: compressed_tensors_w4a4_mxfp4.py and compressed_tensors_w8a8_mxfp8.py in
vllm/model_executor/layers/quantization/compressed_tensors/schemes.
"""

from dataclasses import dataclass

from vexport.numerics.constants import MX_GROUP
from vexport.schemes.base import SchemeArgs, Share, whole_groups
from vexport.types import LinearPlan, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Family:
    """e2m1 weights, two to the byte; vLLM may quantize inputs of MXFP4A16 too, where it has FP4 kernels."""

    format: str = "mxfp4-pack-quantized"
    least_sm: int = 80
    sm_note: str = "FP4 kernels: 100; below: weights only"
    cpu: str = "emulated"

    def layout(self, args: SchemeArgs, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """weight_packed (out, in/2), weight_scale (out, in/32), a biased exponent each."""
        rows, columns, name = linear.out_features, linear.in_features, linear.name
        return (
            TensorSpec(name=f"{name}.weight_packed", dtype="U8", shape=(rows, columns // 2)),
            TensorSpec(name=f"{name}.weight_scale", dtype="U8", shape=(rows, columns // MX_GROUP)),
        )

    def misfit(self, args: SchemeArgs, share: Share) -> str | None:
        """in_features must be a multiple of 32."""
        return whole_groups(share, MX_GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp8Family:
    """e4m3 weights; vLLM quantizes inputs of MXFP8A16 too, where it has MXFP8 kernels."""

    format: str = "mxfp8-quantized"
    least_sm: int = 75
    sm_note: str = "MXFP8 kernels: 100; below: weights only"
    cpu: str = "emulated"

    def layout(self, args: SchemeArgs, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """weight (out, in), weight_scale (out, in/32), a biased exponent each."""
        rows, columns, name = linear.out_features, linear.in_features, linear.name
        return (
            TensorSpec(name=f"{name}.weight", dtype="F8_E4M3", shape=(rows, columns)),
            TensorSpec(name=f"{name}.weight_scale", dtype="U8", shape=(rows, columns // MX_GROUP)),
        )

    def misfit(self, args: SchemeArgs, share: Share) -> str | None:
        """in_features must be a multiple of 32."""
        return whole_groups(share, MX_GROUP)


MXFP4_FAMILY = Mxfp4Family()
MXFP8_FAMILY = Mxfp8Family()
