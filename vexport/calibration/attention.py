"""The ranges of keys and values, seen where transformers hands them to the attention.

Keys are seen after rotary embedding and before they are repeated for the query heads. Multi-head latent
attention (DeepSeek) caches something else; vLLM reads no scales for it and plans refuse them.

Products of 16-bit layers and of attention are made in float32 where a CPU computes them faster so.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vexport.calibration.capture import Forward, replaced_forwards
from vexport.calibration.model import joined
from vexport.observers.flatten import channel_extremes
from vexport.records import HeadRanges, KeyValueRanges

# An attention function of transformers: its outputs, and its probabilities or None.
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def head_ranges(states: torch.Tensor) -> HeadRanges:
    """The range of each head of states (batch, heads, tokens, head size)."""
    heads, size = states.shape[1], states.shape[3]
    low, high = channel_extremes(states.transpose(1, 2).reshape(-1, heads * size)).view(2, heads, size)
    low, high = torch.stack((low.amin(-1), high.amax(-1))).tolist()  # a GPU is waited for once
    return HeadRanges(low=tuple(low), high=tuple(high))


@contextmanager
def watching_attention(
    module: torch.nn.Module,
    prefix: str,
    stored_name: Callable[[str], str],
    seen: dict[str, KeyValueRanges],
) -> Iterator[None]:
    """Within the block the attention layers below `module` add to `seen`, by name in the checkpoint."""
    names = {id(child): joined(prefix, name) for name, child in module.named_modules()}

    def observing(
        attend: Attend | None,
        attention: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = key.shape[0] * key.shape[2]
        found = KeyValueRanges(key=head_ranges(key), value=head_ranges(value), tokens=tokens)
        name = stored_name(names[id(attention)])
        seen[name] = seen[name] + found if name in seen else found
        function: Attend = attend or sys.modules[type(attention).__module__].eager_attention_forward
        return function(attention, query, key, value, *args, **kwargs)

    # "eager" is in no table: each file of transformers brings its own.
    own: Mapping[str, Attend | None] = {**ALL_ATTENTION_FUNCTIONS, "eager": None}
    with replaced_attention({name: partial(observing, attend) for name, attend in own.items()}):
        yield


@contextmanager
def replaced_attention(functions: Mapping[str, Attend]) -> Iterator[None]:
    """Within the block transformers calls these attention functions under these names."""
    before = dict(ALL_ATTENTION_FUNCTIONS)
    for name, attend in functions.items():
        ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        yield
    finally:
        for name in functions:
            del ALL_ATTENTION_FUNCTIONS[name]
            if name in before and ALL_ATTENTION_FUNCTIONS[name] is not before[name]:
                ALL_ATTENTION_FUNCTIONS[name] = before[name]


WIDENED = (torch.bfloat16, torch.float16)


def widens(device: str) -> bool:
    """True where float32 products are the faster ones: on Intel's CPUs without AMX.

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
    attend = partial(_wide_attention, ALL_ATTENTION_FUNCTIONS["sdpa"])
    with replaced_forwards(linears, partial(_wide_product, linears)), replaced_attention({"sdpa": attend}):
        yield


def _wide_product(
    linears: Sequence[torch.nn.Linear], number: int, own: Forward, value: torch.Tensor
) -> object:
    module = linears[number]
    if value.dtype not in WIDENED or module.weight.dtype != value.dtype:
        return own(value)
    bias = None if module.bias is None else module.bias.to(torch.float32)
    found = torch.nn.functional.linear(value.to(torch.float32), module.weight.to(torch.float32), bias)
    return found.to(value.dtype)


def _wide_attention(
    own: Attend,
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
