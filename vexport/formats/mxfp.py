"""MXFP4 and MXFP8: groups of 32 with a power of two as scale, stored as an exponent (e8m0).

Layouts: compressed_tensors_w4a4_mxfp4.py and compressed_tensors_w8a8_mxfp8.py in
vllm/model_executor/layers/quantization/compressed_tensors/schemes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vexport.formats.arguments import UNQUANTIZED_BITS, Arguments, QuantArgs, input_bits
from vexport.formats.base import Format, GpuSupport, Parameter
from vexport.formats.parameters import coded_scale, exact, zero_point
from vexport.formats.partition import Partition, partial_group
from vexport.numerics.constants import MX_GROUP
from vexport.types import LinearPlan, TensorInfo

if TYPE_CHECKING:
    from vexport.formats.packing.base import Packing, PackingInputs

# Scales are not F8_E8M0: vLLM's parameter is uint8 and `copy_` would cast the value, not the bits.
EXPONENT = "U8"


class Mxfp4(Format):
    """e2m1 weights, two to the byte, with inputs in MXFP4, in FP8 by group or token, or as they are.

    vLLM quantizes the inputs of all of them to MXFP4 where it has FP4 kernels: for FP8 inputs it only has
    Humming's, a package that its wheel does not bring, and falls back (compressed_tensors_w4a8_mxfp4.py).
    """

    name = "mxfp4-pack-quantized"
    exponent_scales = True
    weight = "weight_packed"

    def matches(self, args: Arguments, stored_as: str) -> bool:
        return _is_mx(args.weights, 4)

    def vllm_scheme(self, args: Arguments) -> str:
        return f"CompressedTensorsW4A{8 if _is_dynamic_fp8(args) else 4}Mxfp4"

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """weight_packed (out, in/2), weight_scale (out, in/32), a biased exponent each."""
        codes = exact("U8", (shape[0], shape[1] // 2), along=(0, 1))
        return {
            self.weight: codes,
            "weight_scale": coded_scale(EXPONENT, args.weights, shape),
            **zero_point(args.weights, shape),
        }

    def shape(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
        codes = super().shape(args, stored)
        return codes and (codes[0], codes[1] * 2)

    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        """in_features must be a multiple of 32."""
        return partial_group(partition, MX_GROUP)

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Marlin, for weights only, below SM 100; FlashInfer, which quantizes all inputs, from there on."""
        return GpuSupport(input_bits={80: UNQUANTIZED_BITS, 100: 4}, stored_bits=input_bits(args))

    def packing(self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: "PackingInputs") -> "Packing":
        from vexport.formats.packing.mxfp import MxfpPacking

        return MxfpPacking(member, dtype, args, inputs)


class Mxfp8(Format):
    """e4m3 weights; vLLM quantizes inputs of MXFP8A16 too, where it has MXFP8 kernels."""

    name = "mxfp8-quantized"
    exponent_scales = True
    weight = "weight"

    def matches(self, args: Arguments, stored_as: str) -> bool:
        return _is_mx(args.weights, 8) and args.weights.scale_dtype == "torch.uint8"

    def vllm_scheme(self, args: Arguments) -> str:
        return "CompressedTensorsW8A8Mxfp8"

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """weight (out, in), weight_scale (out, in/32), a biased exponent each."""
        return {
            self.weight: exact("F8_E4M3", shape, along=(0, 1)),
            "weight_scale": coded_scale(EXPONENT, args.weights, shape),
            **zero_point(args.weights, shape),
        }

    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        """in_features must be a multiple of 32."""
        return partial_group(partition, MX_GROUP)

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Marlin, for weights only, below SM 100; kernels that quantize all inputs from there on."""
        return GpuSupport(input_bits={75: UNQUANTIZED_BITS, 100: 8}, stored_bits=input_bits(args))

    def packing(self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: "PackingInputs") -> "Packing":
        from vexport.formats.packing.mxfp import MxfpPacking

        return MxfpPacking(member, dtype, args, inputs)


def _is_dynamic_fp8(args: Arguments) -> bool:
    """Source: _is_mxfp4_w4a8_fp8 in vLLM's compressed_tensors.py."""
    inputs = args.input_activations
    if inputs is None or args.weights.dynamic or inputs.strategy not in ("token", "group"):
        return False
    return (inputs.type, inputs.num_bits, inputs.symmetric) == ("float", 8, True) and bool(inputs.dynamic)


def _is_mx(args: QuantArgs, bits: int) -> bool:
    kind = (args.strategy, args.type, args.num_bits, args.group_size, args.symmetric)
    return kind == ("group", "float", bits, MX_GROUP, True)
