"""FP8 (e4m3) weights: per channel with dynamic inputs, or per tensor with calibrated inputs.

Layout: vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py.
"""

from dataclasses import dataclass

from vexport.schemes.base import SchemeArgs, Share
from vexport.types import LinearPlan, TensorSpec


@dataclass(frozen=True, slots=True)
class Fp8Family:
    """FP8 weights and inputs.

    Per-tensor scales are shared by fused layers, because vLLM requantizes to the largest of them
    (process_fp8_weight_tensor_strategy in quantization/utils/fp8_utils.py).
    """

    format: str = "float-quantized"
    least_sm: int = 89
    cpu: str = "native (static inputs: emulated)"
    shared: tuple[str, ...] = ("weight_scale", "input_scale")

    def layout(self, args: SchemeArgs, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """weight (out, in), weight_scale (out, 1) or per tensor (1,), input_scale (1,) if static."""
        rows, columns, name = linear.out_features, linear.in_features, linear.name
        scale = (1,) if args.weights.strategy == "tensor" else (rows, 1)
        weight = (
            TensorSpec(name=f"{name}.weight", dtype="F8_E4M3", shape=(rows, columns)),
            TensorSpec(name=f"{name}.weight_scale", dtype="F32", shape=scale),
        )
        if not args.calibrated:
            return weight
        return (*weight, TensorSpec(name=f"{name}.input_scale", dtype="F32", shape=(1,)))

    def misfit(self, args: SchemeArgs, share: Share) -> str | None:
        """Any shape fits: scales are per channel or per tensor."""
        return None


FAMILY = Fp8Family()
