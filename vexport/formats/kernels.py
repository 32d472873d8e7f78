"""Which kernel vLLM takes for a linear layer on a GPU: the first of a version's order that runs and fits.

The order, and the GPUs of each kernel, are read from the wheels (vexport/architectures/versions), as if
FlashInfer were there, and not DeepGEMM, Humming and b12x. Here is what each takes: `can_implement` in vLLM
0.32's vllm/model_executor/kernels/linear. Routed experts have other kernels.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vexport.architectures.versions import VersionFacts
from vexport.formats.arguments import Arguments
from vexport.formats.base import Format

# Kernels of linear layers that leave the input in the model's dtype, by words of their name.
WEIGHT_ONLY = re.compile("Marlin|Machete|Exllama|A16|Emulation")
# MACHETE_PREPACKED_BLOCK_SHAPE in quantization/utils/machete_utils.py, as (out, in).
MACHETE_TILE = (128, 64)
MACHETE_GROUPS, MARLIN_GROUPS, TRITON_GROUPS = (None, 64, 128), (None, 32, 64, 128), (None, 32, 64, 128, 256)
LEAST_MXFP8_SIDE = 128
# What multiplies quantized inputs alone.
FP4_INPUTS = (
    "FlashInferCuteDslNvFp4LinearKernel",
    "FlashInferCutlassNvFp4LinearKernel",
    "FlashInferB12xNvFp4LinearKernel",
    "CutlassNvFp4LinearKernel",
    "FlashInferTrtllmNvFp4LinearKernel",
    "FlashInferCudnnNvFp4LinearKernel",
    "TorchNvFp4LinearKernel",
)
# What needs a package that vLLM's wheel does not bring.
NEVER = (
    "AllSparkLinearKernel",
    "ConchLinearKernel",
    "HummingLinearKernel",
    "EmulationMxfp4LinearKernel",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplication:
    """What a kernel is asked for: a rank's (out, in) part of a fused layer, on a GPU, in a dtype."""

    args: Arguments
    shape: tuple[int, int]
    sm: int
    float16: bool = False

    @property
    def per_tensor(self) -> bool:
        """Whether weights and inputs have one scale each."""
        inputs = self.args.input_activations
        return self.args.weights.strategy == "tensor" and inputs is not None and inputs.strategy == "tensor"

    @property
    def float_inputs(self) -> bool:
        inputs = self.args.input_activations
        return inputs is not None and inputs.is_float

    def is_whole(self, tile: tuple[int, int]) -> bool:
        """Whether the part is made of whole tiles."""
        return not any(side % each for side, each in zip(self.shape, tile, strict=True))


def kernel_of(storage: Format, asked: Multiplication, facts: VersionFacts) -> str | None:
    """vLLM's class for what is asked; None where that is not known."""
    order = facts.kernels.get(storage.kernel_table(asked.args), {}).get("CUDA", ())
    running = (kernel for kernel in order if asked.sm in facts.supported.get(kernel, ()))
    return next((kernel for kernel in running if TAKES.get(kernel, _any)(asked)), None)


def is_weight_only(kernel: str) -> bool:
    """Whether a kernel leaves inputs in the model's dtype."""
    return WEIGHT_ONLY.search(kernel) is not None


def described_kernel(kernel: str) -> str:
    """`MarlinLinearKernel, weights only`; or that it is an emulation."""
    how = "emulated" if "Emulation" in kernel else "weights only" if is_weight_only(kernel) else ""
    return f"{kernel}, {how}" if how else kernel


def _any(asked: Multiplication) -> bool:
    return True


def _cutlass_w4a8(asked: Multiplication) -> bool:
    whole = asked.args.weights.group == 128 and asked.is_whole((128, 128))
    return asked.float_inputs and asked.sm == 90 and whole


def _machete(asked: Multiplication) -> bool:
    weights = asked.args.weights
    fits = weights.num_bits in (4, 8) and weights.group in MACHETE_GROUPS and asked.is_whole(MACHETE_TILE)
    return asked.sm == 90 and not asked.float_inputs and fits


def _marlin(asked: Multiplication) -> bool:
    weights = asked.args.weights
    return weights.num_bits in ((4, 8) if weights.symmetric else (4,)) and weights.group in MARLIN_GROUPS


def _exllama(asked: Multiplication) -> bool:
    weights = asked.args.weights
    fits = weights.symmetric and weights.num_bits in (4, 8) and asked.is_whole((32 // weights.num_bits, 1))
    grouped = weights.group is not None and asked.shape[1] % weights.group == 0
    return asked.float16 and not asked.float_inputs and fits and grouped


def _triton(asked: Multiplication) -> bool:
    weights = asked.args.weights
    fits = weights.group in (*TRITON_GROUPS, asked.shape[1]) and asked.shape[0] % 8 == 0
    return weights.num_bits == 4 and fits


def _mxfp8(asked: Multiplication) -> bool:
    return min(asked.shape) >= LEAST_MXFP8_SIDE and (asked.sm // 10 != 12 or asked.shape[0] % 32 == 0)


def _blocks(asked: Multiplication) -> bool:
    return asked.args.weights.block is not None and asked.args.weights.block[0] == 128


TAKES: Mapping[str, Callable[[Multiplication], bool]] = {
    "FlashInferFP8ScaledMMLinearKernel": lambda asked: asked.per_tensor,
    "PerTensorTorchFP8ScaledMMLinearKernel": lambda asked: asked.per_tensor,
    "ChannelWiseTorchFP8ScaledMMLinearKernel": lambda asked: not asked.per_tensor,
    "CutlassFp8BlockScaledMMKernel": _blocks,
    "BlockWiseTorchFP8ScaledMMLinearKernel": _blocks,
    **dict.fromkeys(FP4_INPUTS, lambda asked: asked.args.input_activations is not None),
    # init_nvfp4_linear_kernel prefers it for weights alone on these GPUs, and Marlin on all others.
    "FlashInferCuteDslNvFp4W4A16LinearKernel": lambda asked: (
        asked.sm in (100, 103) or asked.args.input_activations is not None
    ),
    "FlashInferCutedslMxfp8LinearKernel": _mxfp8,
    "FlashInferCutlassMxfp8LinearKernel": _mxfp8,
    "CutlassW4A8LinearKernel": _cutlass_w4a8,
    "MacheteLinearKernel": _machete,
    "MarlinLinearKernel": _marlin,
    "ExllamaLinearKernel": _exllama,
    "TritonW4A16LinearKernel": _triton,
    **dict.fromkeys(NEVER, lambda asked: False),
}
