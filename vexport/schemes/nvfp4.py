"""NVFP4: e2m1 weights in groups of 16 with e4m3 scales, relative to one float32 divisor per fused module.

Layout: vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py.
"""

from dataclasses import dataclass

from vexport.numerics.constants import NVFP4_GROUP
from vexport.schemes.base import SchemeArgs, Share, whole_groups
from vexport.types import LinearPlan, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4Family:
    """NVFP4 with (W4A4) or without (W4A16) quantized inputs."""

    format: str = "nvfp4-pack-quantized"
    least_sm: int = 75
    sm_note: str = "FP4 kernels: 100; below: weights only"
    cpu: str = "emulated"

    def layout(self, args: SchemeArgs, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """weight_packed (out, in/2), weight_scale (out, in/16), global scales (1,): 448*6/absmax."""
        rows, columns, name = linear.out_features, linear.in_features, linear.name
        weight = (
            TensorSpec(name=f"{name}.weight_packed", dtype="U8", shape=(rows, columns // 2)),
            TensorSpec(name=f"{name}.weight_scale", dtype="F8_E4M3", shape=(rows, columns // NVFP4_GROUP)),
            TensorSpec(name=f"{name}.weight_global_scale", dtype="F32", shape=(1,)),
        )
        if args.input_activations is None:
            return weight
        return (*weight, TensorSpec(name=f"{name}.input_global_scale", dtype="F32", shape=(1,)))

    def misfit(self, args: SchemeArgs, share: Share) -> str | None:
        """in_features must be a multiple of 16."""
        return whole_groups(share, NVFP4_GROUP)


FAMILY = Nvfp4Family()
A16_FAMILY = Nvfp4Family(sm_note="")
