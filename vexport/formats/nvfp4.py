"""NVFP4: e2m1 weights in groups of 16, with e4m3 scales relative to a float32 global scale.

There is a global scale per fused module. Layout:
vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py.
"""

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING

from vexport.formats.arguments import UNQUANTIZED_BITS, Arguments, QuantArgs, input_bits
from vexport.formats.base import (
    GLOBAL_SCALES,
    Format,
    GpuSupport,
    Parameter,
    Partition,
    coded_scale,
    exact,
    partial_group,
    single,
    zero_point,
)
from vexport.numerics import NVFP4_GROUP
from vexport.records import LinearPlan

if TYPE_CHECKING:
    import numpy as np

    from vexport.formats.base import Bytes, Codes
    from vexport.formats.packing.base import Array, Packing, PackingInputs


class Nvfp4(Format):
    """NVFP4 with (W4A4) or without (W4A16) quantized inputs.

    vLLM has the same class for both, with the argument `use_a16`.
    """

    name = "nvfp4-pack-quantized"
    weight = "weight_packed"
    codes_per_byte = 2

    def matches(self, args: Arguments, stored_as: str) -> bool:
        return _is_nvfp4(args.weights)

    def refusal(self, args: Arguments) -> str | None:
        other = args.input_activations is not None and not _is_nvfp4(args.input_activations)
        return "NVFP4 weights with inputs in another format" if other else None

    def vllm_scheme(self, args: Arguments) -> str:
        return "CompressedTensorsW4A4Fp4"

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """Return weight_packed (out, in/2), weight_scale (out, in/16) and global scales (1,).

        Global scales are 448*6/absmax.
        """
        rows, columns = shape
        inputs = (
            {} if args.input_activations is None else {"input_global_scale": single(GLOBAL_SCALES)}
        )
        return {
            self.weight: exact("U8", (rows, columns // 2), along=(0, 1)),
            "weight_scale": coded_scale("F8_E4M3", args.weights, shape),
            "weight_global_scale": single(GLOBAL_SCALES),
            **zero_point(args.weights, shape),
            **inputs,
        }

    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        """Require in_features to be a multiple of 16."""
        return partial_group(partition, NVFP4_GROUP)

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Return the GPUs that run Marlin (weights only) or FP4 kernels (from SM 100 on)."""
        stored = input_bits(args)
        return GpuSupport(input_bits={75: UNQUANTIZED_BITS, 100: stored}, stored_bits=stored)

    def largest_codes(self, args: Arguments, codes: "Bytes") -> "tuple[Codes, int] | None":
        """Return the largest code of each group, and the code 6.

        The largest value is 6 and has the code 7. If an observer searches for the smallest error,
        the largest value of a group may be rounded to 4, which has the code 6.
        """
        if codes.shape[1] % (NVFP4_GROUP // 2):
            return None
        pairs = codes.reshape(-1, NVFP4_GROUP // 2)
        # Column by column, because numpy needs ten times as long for maxima of a few neighbours.
        numbers = [*(pairs & 0x7).T, *(pairs >> 4 & 0x7).T]
        return reduce(lambda largest, other: largest.clip(min=other), numbers), 6

    def static_inputs(self, args: Arguments, largest: "np.float32") -> "Mapping[str, Array]":
        """Return the global scale. vLLM computes the group scales of inputs at run time."""
        from vexport.numerics.arithmetic import global_scale_of

        return {"input_global_scale": global_scale_of(largest)}

    def packing(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: "PackingInputs"
    ) -> "Packing":
        from vexport.formats.packing.nvfp4 import Nvfp4Packing

        return Nvfp4Packing(member, dtype, args, inputs)


def _is_nvfp4(args: QuantArgs) -> bool:
    kind = (args.strategy, args.type, args.num_bits, args.group_size, args.symmetric)
    return kind == ("tensor_group", "float", 4, NVFP4_GROUP, True)
