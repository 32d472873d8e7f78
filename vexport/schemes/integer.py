"""Integer weights: INT8 per channel with dynamic INT8 inputs (W8A8), packed groups (WNA16 and W4A8).

Layouts: compressed_tensors_w8a8_int8.py, compressed_tensors_wNa16.py, compressed_tensors_wNa8.py and
compressed_tensors_w4a8_fp8.py in vllm/model_executor/layers/quantization/compressed_tensors/schemes.
"""

from dataclasses import dataclass

from vexport.numerics.constants import INT32_BITS
from vexport.schemes.base import SchemeArgs, Share, whole_groups
from vexport.types import LinearPlan, TensorSpec

# CutlassW4A8LinearKernel in vllm/model_executor/kernels/linear/mixed_precision/cutlass.py, and
# compressed_tensors_moe_w4a8_fp8.py for routed experts.
W4AFP8_TILE = 128
W4AFP8_EXPERT_TILE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A8Family:
    """INT8 weights per channel, INT8 inputs per token."""

    format: str = "int-quantized"
    least_sm: int = 75
    sm_note: str = "not from 100 on"
    cpu: str = "native"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WNA16Family:
    """Weights of 2 to 8 bits packed into int32 along in_features; group scales in the model's dtype.

    W4A8 is stored so as well: as int-quantized, which compressed-tensors would make of it, vLLM has no
    kernel for it on a GPU. Values cross the borders of words, as vLLM's shapes ask (compressed-tensors
    does so since 0.18; it left the odd bits of a word empty before).
    """

    format: str = "pack-quantized"
    least_sm: int = 75
    sm_note: str = ""
    cpu: str = "native"
    runs_experts: bool = True

    def layout(self, args: SchemeArgs, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """weight_packed (out, ceil(in*bits/32)), weight_scale (out, in/group), weight_shape (2,).

        Asymmetric: weight_zero_point (ceil(out*bits/32), in/group), packed along out_features.
        """
        rows, columns, name = linear.out_features, linear.in_features, linear.name
        bits, groups = args.weights.num_bits, columns // group_size(args)
        specs = (
            TensorSpec(name=f"{name}.weight_packed", dtype="I32", shape=(rows, words(columns, bits))),
            TensorSpec(name=f"{name}.weight_scale", dtype=source_dtype, shape=(rows, groups)),
            TensorSpec(name=f"{name}.weight_shape", dtype="I64", shape=(2,)),
        )
        if args.weights.symmetric:
            return specs
        zero = TensorSpec(name=f"{name}.weight_zero_point", dtype="I32", shape=(words(rows, bits), groups))
        return (*specs, zero)

    def misfit(self, args: SchemeArgs, share: Share) -> str | None:
        """in_features must be whole groups; zero points of a part and what a kernel takes whole words."""
        if share.experts and not self.runs_experts:
            return "routed experts, which vLLM runs in this scheme on no GPU"
        grouped = whole_groups(share, group_size(args))
        return grouped or _untiled(args, share) or _cut_zero_points(args, share)


def _untiled(args: SchemeArgs, share: Share) -> str | None:
    """The only kernel for FP8 inputs takes whole tiles."""
    inputs = args.input_activations
    if inputs is None or inputs.type != "float":
        return None
    rows = share.out_features if share.experts else (sum(share.out_features),)
    tile = W4AFP8_EXPERT_TILE if share.experts else W4AFP8_TILE
    cut = [
        f"{side} {size} is not a multiple of {tile}"
        for side, sizes in (("out_features", rows), ("in_features", (share.in_features,)))
        for size in sizes
        if size % tile
    ]
    return cut[0] if cut else None


def _cut_zero_points(args: SchemeArgs, share: Share) -> str | None:
    """Zero points of fused or split layers begin at a word (_adjust_shard_indexes_for_packing in vLLM)."""
    loaded_whole = len(share.out_features) == 1 and share.split != "out" and not share.head
    if args.weights.symmetric or loaded_whole:
        return None
    cut = [size for size in share.out_features if size * args.weights.num_bits % INT32_BITS]
    if not cut:
        return None
    return f"out_features {cut[0]}: zero points of {args.weights.num_bits} bits do not fill whole words"


def words(count: int, bits: int) -> int:
    """int32 words that `count` values of `bits` bits take."""
    return -(-count * bits // INT32_BITS)


def group_size(args: SchemeArgs) -> int:
    """The weight's group size; a WNA16 preset always has one."""
    size = args.weights.group_size
    assert size is not None
    return size


W8A8_FAMILY = W8A8Family()
WNA16_FAMILY = WNA16Family()
W4A8_FAMILY = WNA16Family(sm_note="there weights only", runs_experts=False)
HUMMING_FAMILY = WNA16Family(sm_note="with humming-kernels", cpu="emulated")
W8A16_FAMILY = WNA16Family(cpu="emulated")
W4AFP8_FAMILY = WNA16Family(least_sm=90, sm_note="and no other", cpu="emulated")
