"""The weights of layers of other quantization methods by their producers' own formulas.

They are the witness of the translation to compressed-tensors, and share no code with it.
"""

from collections.abc import Callable, Mapping

import torch

from vexport.checks.vllm.quant_methods.auto_round import AsGptq, AsMxfp4, AsMxfp8
from vexport.checks.vllm.quant_methods.awq import Awq
from vexport.checks.vllm.quant_methods.base import MethodGroup
from vexport.checks.vllm.quant_methods.fp8 import NativeFp8, NativeFp8Block
from vexport.checks.vllm.quant_methods.gptq import Gptq, GptqV2
from vexport.checks.vllm.quant_methods.modelopt import (
    ModelOptFp8,
    ModelOptMxfp8,
    ModelOptNvfp4,
    WeightOnlyNvfp4,
)
from vexport.checks.vllm.quant_methods.quark import (
    QuarkFp8,
    QuarkFp8Block,
    QuarkInt4,
    QuarkInt8,
    QuarkMxfp4,
    QuarkNvfp4,
)
from vexport.formats.arguments import QuantArgs
from vexport.numerics.constants import INT32_BITS, MX_GROUP, NVFP4_GROUP

# quark/torch/export: codes that follow each other in a word.
QUARK_ORDER = tuple(range(8))
Stored = Mapping[str, torch.Tensor]
# awq/utils/packing_utils.py of AutoAWQ: where in a word the codes of the outputs are.
AWQ_REVERSE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127


def own_weight(group: MethodGroup, stored: Stored) -> torch.Tensor:
    """The weight (out, in) of a layer's stored tensors, float32 or in the dtype of its scales."""
    if isinstance(group.stored_as, QuarkInt4):
        return _quark_int4(group, stored)
    return FORMULAS[type(group.stored_as)](group.weights, stored)


def _integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of each word of a row, lowest bits first: (rows, words, codes); of widths that do not fill
    words, those of each 32 codes, which have whole words (pack of AutoGPTQ for 3 bits)."""
    if INT32_BITS % bits:
        each = (
            torch.bitwise_right_shift(words.unsqueeze(-1).long() & 0xFFFFFFFF, torch.arange(INT32_BITS)) & 1
        )
        powers = 1 << torch.arange(bits)
        runs = each.reshape(words.shape[0], -1, INT32_BITS, bits)
        return torch.sum(runs * powers, dim=-1)
    shifts = torch.arange(0, INT32_BITS, bits)
    return torch.bitwise_right_shift(words.unsqueeze(-1).long() & 0xFFFFFFFF, shifts) & ((1 << bits) - 1)


def _gptq(args: QuantArgs, stored: Stored, zero_offset: int = 1) -> torch.Tensor:
    """scales * (code - zero point) (QuantLinear.forward of AutoGPTQ; its first format stores zero - 1)."""
    bits = args.num_bits
    codes = _integers(stored["qweight"].T, bits).flatten(1).T
    zeros = torch.full(stored["scales"].shape, 1 << (bits - 1))
    if not args.symmetric:
        zeros = _integers(stored["qzeros"], bits).flatten(1) + zero_offset
    size = codes.shape[0] // zeros.shape[0]
    groups = torch.arange(codes.shape[0]) // size
    return (stored["scales"][groups] * (codes - zeros[groups])).T


def _awq(args: QuantArgs, stored: Stored) -> torch.Tensor:
    """(code - zero point) * scale (dequantize_gemm of AutoAWQ)."""
    codes, zeros = (
        _integers(stored[name], args.num_bits)[:, :, AWQ_REVERSE_ORDER].flatten(1)
        for name in ("qweight", "qzeros")
    )
    groups = torch.arange(codes.shape[0]) // (codes.shape[0] // zeros.shape[0])
    return ((codes - zeros[groups]) * stored["scales"][groups]).T


def _scaled(args: QuantArgs, stored: Stored) -> torch.Tensor:
    """Codes of e4m3 by a scale for the tensor, each row, or each block."""
    weight = stored["weight"].float()
    scale = stored.get("weight_scale", stored.get("weight_scale_inv"))
    assert scale is not None
    scale = scale.float()
    if args.block is None:
        return weight * scale.reshape(-1, 1)
    rows, columns = args.block
    scale = scale[:, 0, :, 0] if scale.ndim == 4 else scale
    down, across = torch.arange(weight.shape[0]) // rows, torch.arange(weight.shape[1]) // columns
    return weight * scale[down][:, across]


def _nvfp4(args: QuantArgs, stored: Stored) -> torch.Tensor:
    """Codes by the scale of their 16, by the second scale (NVFP4QTensor.dequantize of ModelOpt)."""
    scale = stored["weight_scale"].float() * stored["weight_scale_2"].float()
    return _fp4(stored["weight"]) * scale.repeat_interleave(NVFP4_GROUP, dim=-1)


def _fp4(bytes_: torch.Tensor) -> torch.Tensor:
    """The numbers of codes of e2m1, of which the lower half of a byte has the first."""
    half = torch.tensor(FP4_VALUES)
    return torch.cat([half, -half])[torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(-2).long()]


def _mxfp4(args: QuantArgs, stored: Stored) -> torch.Tensor:
    """Codes by the power of two of their 32 (to_dtype of AutoRound's mxfp4 linear)."""
    scale = torch.exp2(stored["weight_scale"].float() - E8M0_BIAS)
    return _fp4(stored["weight_packed"]) * scale.repeat_interleave(MX_GROUP, dim=-1)


def _mxfp8(args: QuantArgs, stored: Stored) -> torch.Tensor:
    """Codes by the power of two of their 32."""
    scale = torch.exp2(stored["weight_scale"].float() - E8M0_BIAS)
    return stored["weight"].float() * scale.repeat_interleave(MX_GROUP, dim=-1)


def _quark_int4(group: MethodGroup, stored: Stored) -> torch.Tensor:
    """(code - zero point) * scale; codes of symmetric weights are numbers of 4 bits with a sign."""
    assert isinstance(group.stored_as, QuarkInt4)
    order = AWQ_REVERSE_ORDER if group.stored_as.reordered else QUARK_ORDER
    codes = _integers(stored["weight"], 4)[:, :, order].flatten(1)
    scales = stored["weight_scale"].repeat_interleave(
        codes.shape[0] // stored["weight_scale"].shape[0], dim=0
    )
    if group.weights.symmetric:
        return ((codes ^ 8) - 8).mul(scales).T
    zeros = _integers(stored["weight_zero_point"], 4)[:, :, order].flatten(1)
    return ((codes - zeros.repeat_interleave(codes.shape[0] // zeros.shape[0], dim=0)) * scales).T


FORMULAS: Mapping[type, Callable[[QuantArgs, Stored], torch.Tensor]] = {
    AsGptq: _gptq,
    AsMxfp4: _mxfp4,
    AsMxfp8: _mxfp8,
    Awq: _awq,
    Gptq: _gptq,
    GptqV2: lambda args, stored: _gptq(args, stored, 0),
    NativeFp8: _scaled,
    NativeFp8Block: _scaled,
    QuarkFp8: _scaled,
    QuarkFp8Block: _scaled,
    QuarkInt8: _scaled,
    QuarkMxfp4: lambda args, stored: _mxfp4(args, {**stored, "weight_packed": stored["weight"]}),
    QuarkNvfp4: _nvfp4,
    ModelOptFp8: _scaled,
    ModelOptNvfp4: _nvfp4,
    WeightOnlyNvfp4: _nvfp4,
    ModelOptMxfp8: _mxfp8,
}
