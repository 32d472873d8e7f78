"""FP8 (e4m3) weights: per channel or block with dynamic inputs, or per tensor with calibrated inputs.

Layout: vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py.
"""

from dataclasses import dataclass

from vexport.schemes.base import QuantArgs, SchemeArgs, Share
from vexport.types import LinearPlan, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Family:
    """FP8 weights and inputs.

    Per-tensor scales are shared by fused layers, because vLLM requantizes to the largest of them
    (process_fp8_weight_tensor_strategy in quantization/utils/fp8_utils.py).
    """

    format: str = "float-quantized"
    least_sm: int = 89
    sm_note: str = "below: weights only"
    cpu: str = "native"

    def layout(self, args: SchemeArgs, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """weight (out, in), weight_scale as `scale_shape` says, input_scale (1,) if static."""
        name = linear.name
        scale = scale_shape(args.weights, linear.out_features, linear.in_features)
        weight = (
            TensorSpec(
                name=f"{name}.weight", dtype="F8_E4M3", shape=(linear.out_features, linear.in_features)
            ),
            TensorSpec(name=f"{name}.weight_scale", dtype="F32", shape=scale),
        )
        if not args.calibrated:
            return weight
        return (*weight, TensorSpec(name=f"{name}.input_scale", dtype="F32", shape=(1,)))

    def misfit(self, args: SchemeArgs, share: Share) -> str | None:
        """Any shape fits per channel and per tensor; blocks must not be cut by fusing or by ranks.

        Source: validate_fp8_block_shape and validate_fp8_block_shape_moe in
        vllm/model_executor/layers/quantization/utils/fp8_utils.py; VocabParallelEmbedding.weight_loader
        takes a row of scales for each row of an output head.
        """
        if args.weights.strategy != "block":
            return None
        if share.head:
            return "an output head, whose scales vLLM does not load in blocks"
        high, wide = block(args.weights)
        if share.split == "in" and share.in_features % wide:
            return f"in_features {share.in_features} is not a multiple of the block's {wide}"
        every_part = share.split == "out" or share.experts
        parts = share.out_features if every_part else share.out_features[:-1]
        ragged = [size for size in parts if size % high]
        return f"out_features {ragged[0]} is not a multiple of the block's {high}" if ragged else None


def block(args: QuantArgs) -> tuple[int, int]:
    """(rows, columns) of a block; a scheme of strategy block always has them."""
    assert args.block_structure is not None
    return args.block_structure


def scale_shape(args: QuantArgs, rows: int, columns: int) -> tuple[int, ...]:
    """(1,) per tensor, (out, 1) per channel, (ceil(out/high), ceil(in/wide)) per block."""
    if args.strategy == "tensor":
        return (1,)
    if args.strategy != "block":
        return (rows, 1)
    high, wide = block(args)
    return (-(-rows // high), -(-columns // wide))


FAMILY = Fp8Family()
# Below SM 90, where DeepGEMM and CUTLASS do not run, Marlin comes before Triton and keeps inputs at 16 bits
# (_POSSIBLE_FP8_BLOCK_KERNELS in vllm/model_executor/kernels/linear/__init__.py).
BLOCK_FAMILY = Fp8Family(least_sm=90)
STATIC_FAMILY = Fp8Family(cpu="emulated")
