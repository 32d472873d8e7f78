"""Matrix products of 16-bit layers where a CPU computes them faster in float32."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vexport.calibration.attention import Attend, replaced_attention
from vexport.calibration.capture import Forward, replaced_forwards

WIDENED = (torch.bfloat16, torch.float16)


def widens(device: str) -> bool:
    """Whether float32 products are the faster ones: on Intel's CPUs without AMX.

    On one of Sapphire Rapids whose AMX is hidden by its hypervisor torch 2.13 multiplies bf16 at 84 GFLOPS
    and float32 at 154 (one thread, 512 tokens, 576 x 1536).
    """
    if device != "cpu" or not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return False
    known = torch.cpu.get_capabilities()
    is_intel = "Intel" in str(known.get("cpu_name"))
    has_units = known.get("amx_bf16") or (known.get("avx512_bf16") and not is_intel)
    return known["architecture"] == "x86_64" and not has_units


@contextmanager
def fast_products(model: torch.nn.Module, device: str) -> Iterator[None]:
    """Within the block linear layers and attention of 16 bits multiply in float32 where that is faster.

    Linear layers add up in float32 either way and round the sum once to their dtype: only the order of the
    sum differs. Attention no longer rounds its probabilities.
    """
    if not widens(device):
        yield
        return
    linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
    attend = _wide_attention(ALL_ATTENTION_FUNCTIONS["sdpa"])
    with replaced_forwards(linears, partial(_wide_product, linears)), replaced_attention({"sdpa": attend}):
        yield


def _wide_product(linears: Sequence[torch.nn.Linear], number: int, own: Forward) -> Forward:
    module = linears[number]

    def forward(value: torch.Tensor) -> object:
        if value.dtype not in WIDENED or module.weight.dtype != value.dtype:
            return own(value)
        bias = None if module.bias is None else module.bias.to(torch.float32)
        found = torch.nn.functional.linear(value.to(torch.float32), module.weight.to(torch.float32), bias)
        return found.to(value.dtype)

    return forward


def _wide_attention(own: Attend) -> Attend:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = query.dtype
        if dtype not in WIDENED or not dtype == key.dtype == value.dtype:
            return own(module, query, key, value, attention_mask, **kwargs)
        if attention_mask is not None and attention_mask.dtype == dtype:
            attention_mask = attention_mask.to(torch.float32)
        states = (tensor.to(torch.float32) for tensor in (query, key, value))
        found, weights = own(module, *states, attention_mask, **kwargs)
        return found.to(dtype), weights

    return attend
