"""FP8 (e4m3) weights: per channel or block with dynamic inputs, or per tensor with static inputs.

Layout:
vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py.
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
    AMX,
    WITH_INPUTS,
    Cpu,
    Format,
    GpuSupport,
    Parameter,
    Partition,
    exact,
    scale,
    single,
    zero_point,
)
from vexport.records import LinearPlan

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vexport.formats.base import Bytes, Codes
    from vexport.formats.packing.base import Array, Packing, PackingInputs

STRATEGIES = ("tensor", "channel", "block")
# Strategies of weights and inputs that vLLM supports for experts, in addition to blocks.
EXPERT_PAIRS = (("tensor", "tensor"), ("channel", "token"))


class Fp8(Format):
    """FP8 weights and inputs.

    Fused layers share per-tensor scales, because vLLM requantizes to the largest of their scales
    (process_fp8_weight_tensor_strategy in quantization/utils/fp8_utils.py).
    """

    name = "float-quantized"
    weight = "weight"

    def matches(self, args: Arguments, stored_as: str) -> bool:
        weights = args.weights
        static = not weights.dynamic and weights.symmetric
        return (
            stored_as in WITH_INPUTS
            and static
            and weights.is_float
            and weights.strategy in STRATEGIES
        )

    def refusal(self, args: Arguments) -> str | None:
        """Return why vLLM refuses a group, or None.

        vLLM refuses block weights without quantized inputs. It ignores some settings of static
        inputs, and leaves these inputs unquantized (see `_quantizes`). In this case it refuses
        block weights, and input scales that are not per tensor. For block weights, an assertion
        fails in process_weights_after_loading of CompressedTensorsW8A16Fp8.
        """
        inputs = args.input_activations
        if inputs is None:
            return (
                "FP8 blocks without input_activations" if args.weights.strategy == "block" else None
            )
        whole = inputs.strategy == "tensor" and args.weights.strategy != "block"
        if inputs.dynamic is not False or whole or _quantizes(inputs):
            return None
        return f"inputs that vLLM does not quantize: {described_inputs(args)}"

    def unquantized_inputs(self, args: Arguments) -> str | None:
        inputs = args.input_activations
        return None if inputs is None or _quantizes(inputs) else described_inputs(args)

    def unwritable_arguments(self, args: Arguments) -> str | None:
        inputs = args.input_activations
        if args.weights.num_bits != 8 or (inputs is not None and inputs.num_bits != 8):
            return "floats with a width other than 8 bits"
        if (left := self.unquantized_inputs(args)) is not None:
            return f"inputs that vLLM does not quantize: {left}"
        if inputs is not None and not inputs.symmetric:
            return "FP8 inputs with zero points"
        return None

    def vllm_scheme(self, args: Arguments) -> str:
        return f"CompressedTensorsW8A{UNQUANTIZED_BITS if _leaves_inputs(args) else 8}Fp8"

    def runs_experts(self, args: Arguments) -> bool:
        inputs = args.input_activations
        if inputs is None or _leaves_inputs(args):
            return False
        return (
            args.weights.strategy == "block"
            or (args.weights.strategy, inputs.strategy) in EXPERT_PAIRS
        )

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """Return weight (out, in), its scales, and input_scale (1,) if inputs are static."""
        static = args.input_activations is not None and not args.input_activations.dynamic
        return {
            self.weight: exact("F8_E4M3", shape, along=(0, 1)),
            "weight_scale": scale(args.weights, shape),
            **zero_point(args.weights, shape),
            **({"input_scale": single()} if static else {}),
        }

    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        """Return why fusing or tensor parallelism would split blocks, or None.

        Strategies without blocks fit any shape.

        Source: validate_fp8_block_shape and validate_fp8_block_shape_moe in
        vllm/model_executor/layers/quantization/utils/fp8_utils.py. For an output head,
        VocabParallelEmbedding.weight_loader expects a row of scales for each row of the weight.
        """
        if args.weights.block is None:
            return None
        if partition.head:
            return "vLLM cannot load block scales for an output head"
        block_rows, block_columns = args.weights.block
        if partition.split == "in" and partition.in_features % block_columns:
            return (
                f"in_features {partition.in_features} is not a multiple of the block size "
                f"{block_columns}"
            )
        every_part = partition.split == "out" or partition.experts
        parts = partition.out_features if every_part else partition.out_features[:-1]
        ragged = [size for size in parts if size % block_rows]
        return (
            f"out_features {ragged[0]} is not a multiple of the block size {block_rows}"
            if ragged
            else None
        )

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Return SM 75 and later, with 8-bit inputs from SM 89 on (SM 90 for blocks).

        Below SM 89, vLLM runs W8A16 instead of W8A8 (compressed_tensors.py). Below SM 90, DeepGEMM
        and CUTLASS do not run blocks. There Marlin has priority over Triton and keeps inputs at 16
        bits (_POSSIBLE_FP8_BLOCK_KERNELS in vllm/model_executor/kernels/linear/__init__.py).
        """
        full_from = 89 if args.weights.block is None else 90
        full = UNQUANTIZED_BITS if _leaves_inputs(args) else 8
        return GpuSupport(
            input_bits={75: UNQUANTIZED_BITS, full_from: full}, stored_bits=input_bits(args)
        )

    def cpu(self, args: Arguments) -> Cpu:
        """Return "native" only for blocks, which run with AMX.

        For other strategies, the CPU build ignores static scales or takes 0.2 s per layer. In vLLM
        0.33 it keeps the inputs of per-channel weights in bfloat16.
        vexport.engine.cpu_emulation.kernels replaces these kernels.
        """
        return "emulated" if args.weights.block is None else "native"

    def cpu_instructions(self, args: Arguments, *, experts: bool) -> str:
        """Return AMX (CPUFp8BlockScaledMMKernel in vLLM's kernels/linear/scaled_mm/cpu.py)."""
        return AMX

    def largest_codes(self, args: Arguments, codes: "Bytes") -> "tuple[Codes, int] | None":
        """Return each row's largest code, and the code of 448. Only for scales per channel."""
        return ((codes & 0x7F).max(axis=1), 0x7E) if args.weights.strategy == "channel" else None

    def static_inputs(self, args: Arguments, largest: "np.float32") -> "Mapping[str, Array]":
        from vexport.numerics.arithmetic import fp8_scale_of

        return {"input_scale": fp8_scale_of(largest)}

    def packing(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: "PackingInputs"
    ) -> "Packing":
        from vexport.formats.packing.fp8 import Fp8Packing

        return Fp8Packing(member, dtype, args, inputs)

    def dequantize(self, args: Arguments, stored: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
        """Dequantize a weight, even if it has incomplete blocks.

        compressed-tensors infers the block size from shapes, which fails for incomplete blocks.
        """
        from vexport.formats.dequantize import decompress, scaled

        if args.weights.block is None:
            return decompress(self.name, args, stored)
        return scaled(stored[self.weight], args, stored)


def _leaves_inputs(args: Arguments) -> bool:
    """Return True if inputs stay in 16 bits.

    Either the config does not quantize them, or vLLM ignores the config.
    """
    return args.input_activations is None or not _quantizes(args.input_activations)


def _quantizes(inputs: QuantArgs) -> bool:
    """Return True if vLLM quantizes inputs as configured (`_is_fp8_w8a8`).

    Otherwise vLLM runs W8A16.
    """
    return inputs.is_float and (
        inputs.dynamic is not False or (inputs.symmetric and inputs.strategy == "tensor")
    )
