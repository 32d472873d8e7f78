"""MXFP4 and MXFP8: groups of 32 with a power of two as scale, stored as an exponent (e8m0).

Layouts: compressed_tensors_w4a4_mxfp4.py and compressed_tensors_w8a8_mxfp8.py in
vllm/model_executor/layers/quantization/compressed_tensors/schemes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vexport.formats.arguments import (
    UNQUANTIZED_BITS,
    Arguments,
    QuantArgs,
    described_inputs,
    input_bits,
)
from vexport.formats.base import (
    Format,
    GpuSupport,
    Parameter,
    Partition,
    coded_scale,
    exact,
    partial_group,
    zero_point,
)
from vexport.numerics import MX_GROUP
from vexport.records import LinearPlan

if TYPE_CHECKING:
    from vexport.formats.packing.base import Packing, PackingInputs

# Scales are stored as U8, because vLLM's parameter is uint8. From F8_E8M0, `copy_` would convert
# the value instead of copying the bits.
EXPONENT = "U8"


class _Mx(Format):
    """Floats in groups of 32, with biased exponents as scales."""

    exponent_scales = True
    bits: int
    codes: str  # dtype of the stored bytes

    def matches(self, args: Arguments, stored_as: str) -> bool:
        return _is_mx(args.weights, self.bits)

    def unwritable_arguments(self, args: Arguments) -> str | None:
        """Describe inputs that vLLM would not quantize as configured, or return None.

        vLLM ignores the config's input arguments and uses fixed arguments. vexport only writes
        these fixed arguments.
        """
        inputs = args.input_activations
        if inputs is None or (self.bits == 4 and _is_dynamic_fp8(args)):
            return None
        if _is_mx(inputs, self.bits) and inputs.dynamic is True:
            return None
        return f"inputs that vLLM does not quantize: {described_inputs(args)}"

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """Return weight_packed (out, in/2) or weight (out, in), and weight_scale (out, in/32).

        The scales are biased exponents.
        """
        codes = (shape[0], shape[1] // self.codes_per_byte)
        return {
            self.weight: exact(self.codes, codes, along=(0, 1)),
            "weight_scale": coded_scale(EXPONENT, args.weights, shape),
            **zero_point(args.weights, shape),
        }

    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        """Require in_features to be a multiple of 32."""
        return partial_group(partition, MX_GROUP)

    def packing(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: "PackingInputs"
    ) -> "Packing":
        from vexport.formats.packing.mxfp import MxfpPacking

        return MxfpPacking(member, dtype, args, inputs)


class Mxfp4(_Mx):
    """e2m1 weights, two per byte. Inputs are MXFP4, FP8 (by group or token), or 16-bit floats.

    On GPUs with FP4 kernels, vLLM quantizes inputs to MXFP4 even if the config leaves them in 16
    bits. Layers with FP8 inputs run with humming-kernels, a package that vLLM's CUDA wheel requires
    (compressed_tensors_w4a8_mxfp4.py).
    """

    name = "mxfp4-pack-quantized"
    weight = "weight_packed"
    codes_per_byte = 2
    bits, codes = 4, "U8"

    def vllm_scheme(self, args: Arguments) -> str:
        return f"CompressedTensorsW4A{8 if _is_dynamic_fp8(args) else 4}Mxfp4"

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Return the GPUs of Humming (FP8 inputs), Marlin (weights only) and FlashInfer (SM 100).

        On SM 90 Humming has priority over Marlin and quantizes all inputs to FP8, even if the
        config quantizes only weights (priority.py and schema.py in vLLM's
        quantization/utils/humming; seen on an H100).
        """
        bits = {80: 8} if _is_dynamic_fp8(args) else {80: UNQUANTIZED_BITS, 90: 8, 100: 4}
        return GpuSupport(input_bits=bits, stored_bits=input_bits(args))


class Mxfp8(_Mx):
    """e4m3 weights. If vLLM has MXFP8 kernels, it also quantizes the inputs of MXFP8A16."""

    name = "mxfp8-quantized"
    weight = "weight"
    bits, codes = 8, "F8_E4M3"

    def matches(self, args: Arguments, stored_as: str) -> bool:
        return super().matches(args, stored_as) and args.weights.scale_dtype == "torch.uint8"

    def vllm_scheme(self, args: Arguments) -> str:
        return "CompressedTensorsW8A8Mxfp8"

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Return the GPUs that run Marlin (weights only) or quantize all inputs (SM 100 on)."""
        return GpuSupport(input_bits={75: UNQUANTIZED_BITS, 100: 8}, stored_bits=input_bits(args))


def _is_mx(args: QuantArgs, bits: int) -> bool:
    kind = (args.strategy, args.type, args.num_bits, args.group_size, args.symmetric)
    return kind == ("group", "float", bits, MX_GROUP, True)


def _is_dynamic_fp8(args: Arguments) -> bool:
    """Return True for dynamic FP8 inputs (_is_mxfp4_w4a8_fp8 in vLLM's compressed_tensors.py)."""
    inputs = args.input_activations
    if inputs is None or args.weights.dynamic or inputs.strategy not in ("token", "group"):
        return False
    return (inputs.type, inputs.num_bits, inputs.symmetric) == ("float", 8, True) and bool(
        inputs.dynamic
    )
