"""Compute causal attention with the bf16 units of a CPU.

torch's attention for CPUs computes scores above the diagonal, too, and needs about twice as long
(one thread of an AMD Zen 5 CPU, 512 tokens, 9 heads of 64: 7.3 ms against 3.0 ms, and 21 ms against
14 ms with gradients).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vexport.calibration.capture import AttentionFunction, replaced_attention
from vexport.numerics.cpu import bf16_units
from vexport.numerics.products import exact_products

# Number of scores in memory at a time. They fit into a core's cache.
CHUNK_SCORES = 1 << 18
# Minimum number of tokens whose scores are computed at a time.
LEAST_TOKENS = 64


@contextmanager
def causal_attention(device: str) -> Iterator[None]:
    """Compute causal attention of bf16 values in chunks inside the block, if that is faster.

    Scores, sums and probabilities have the same precision as in torch's attention. Only the order
    of operations differs. A Boolean mask may hide earlier tokens, as in a sliding window. Attention
    to later tokens, and attention with other masks, is not changed.
    """
    if device != "cpu" or bf16_units() not in ("amx", "avx512"):
        yield
        return
    attend = partial(_attention, ALL_ATTENTION_FUNCTIONS["sdpa"])
    with replaced_attention({"sdpa": attend}):
        yield


def _attention(
    attend: AttentionFunction,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    has_bf16 = {query.dtype, key.dtype, value.dtype} == {torch.bfloat16}
    has_more = any((kwargs.get("position_bias") is not None, kwargs.get("dropout")))
    # Batch, heads of keys, and tokens. Queries have more heads.
    has_shape = query.shape[::2] == key.shape[::2] and key.shape[:3] == value.shape[:3]
    if not has_bf16 or has_more or not has_shape or not query.numel():
        return attend(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is None:
        is_causal = kwargs.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
    else:
        is_causal = _is_causal(attention_mask, query)
    if not is_causal:
        return attend(module, query, key, value, attention_mask, **kwargs)
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return causal_product(query, key, value, scale, attention_mask), None


def _is_causal(mask: torch.Tensor, query: torch.Tensor) -> bool:
    """Return True if a mask lets each token attend to itself and to no later token.

    The mask must be Boolean, (batch, 1, tokens, tokens), with a batch of 1 or of the queries.
    """
    batch, _, tokens, _ = query.shape
    if mask.dtype != torch.bool or mask.shape[1:] != (1, tokens, tokens):
        return False
    has_itself = mask.diagonal(dim1=-2, dim2=-1).all()
    return len(mask) in (1, batch) and bool(has_itself) and torch.equal(mask, mask.tril())


def causal_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal attention of bf16 states (batch, heads, tokens, size).

    Several heads of `query` may share a head of `key` and `value`. The result is (batch, tokens,
    heads, size of `value`). `scale` multiplies the scores. `mask` (1 or batch, 1, tokens, tokens)
    is True for pairs of tokens that attend to each other.
    """
    hidden = None if mask is None else ~mask
    output: torch.Tensor = _CausalProduct.apply(query, key, value, scale, hidden)  # type: ignore[no-untyped-call]
    return output


class _CausalProduct(torch.autograd.Function):
    """Computes `causal_product` and its gradients for some tokens at a time."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        batch, heads, tokens, _ = query.shape
        ctx.scale, ctx.hidden = scale, hidden  # type: ignore[attr-defined]  # of the function
        values = value.reshape(-1, tokens, value.shape[-1])
        output = value.new_empty(tokens, len(values), heads // key.shape[1], value.shape[-1])
        for chunk, _, shares in _chunks(query, key, scale, hidden):
            mixed = torch.bmm(shares.to(value.dtype), values[:, : chunk.stop])
            output[chunk] = _by_token(mixed, output[chunk])
        ctx.save_for_backward(query, key, value)
        return output.view(tokens, batch, heads, -1).transpose(0, 1).contiguous()

    @staticmethod
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        query, key, value = saved
        empty = query.new_empty(1, 1, 1)
        tokens, size = key.shape[2:]
        scale: float = ctx.scale  # type: ignore[attr-defined]  # set by `forward`
        hidden: torch.Tensor | None = ctx.hidden  # type: ignore[attr-defined]  # as `scale`
        keys, values = (states.reshape(-1, tokens, states.shape[-1]) for states in (key, value))
        shape = (len(keys), query.shape[1] // key.shape[1], tokens, -1)
        wanted = gradient.transpose(1, 2).reshape(shape)
        wide_values = values.to(torch.float32).transpose(1, 2).contiguous()
        query_gradient = query.new_empty(shape[:3] + (size,))
        key_gradient, value_gradient = (
            torch.zeros_like(states, dtype=torch.float32) for states in (keys, values)
        )
        for chunk, rows, shares in _chunks(query, key, scale, hidden):
            last = chunk.stop
            error = wanted[:, :, chunk].flatten(1, 2)
            transposed = shares.to(value.dtype).transpose(1, 2)
            value_gradient[:, :last].add_(torch.bmm(transposed, error))
            # Rounded to bf16, the difference from the mean would be noise where a share is near 1.
            with exact_products(torch.bfloat16):
                errors = torch.bmm(error.to(torch.float32), wide_values[..., :last])
            means = torch.linalg.vecdot(errors, shares).unsqueeze(-1)
            errors = errors.sub_(means).mul_(shares).to(key.dtype)
            query_gradient[:, :, chunk] = torch.baddbmm(
                empty, errors, keys[:, :last], beta=0, alpha=scale
            ).view_as(query_gradient[:, :, chunk])
            key_gradient[:, :last].add_(torch.bmm(errors.transpose(1, 2), rows), alpha=scale)
        return (
            query_gradient.view_as(query),
            key_gradient.to(key.dtype).view_as(key),
            value_gradient.to(value.dtype).view_as(value),
            None,
            None,
        )


def _chunks(
    query: torch.Tensor, key: torch.Tensor, scale: float, hidden: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield some tokens at a time, with their queries and their probabilities in float32.

    `hidden` (1 or batch, 1, tokens, tokens) is True for pairs that do not attend to each other.
    Probabilities are (heads of `key`, tokens of all heads that share it, tokens up to the last).
    """
    batch, heads, tokens, size = query.shape
    keys = key.reshape(-1, tokens, size).to(torch.float32).transpose(1, 2).contiguous()
    queries = query.reshape(len(keys), -1, tokens, size)
    step = max(LEAST_TOKENS, CHUNK_SCORES // (batch * heads * tokens))
    later = torch.ones(step, step, dtype=torch.bool).triu_(1)
    for first in range(0, tokens, step):
        chunk = slice(first, min(first + step, tokens))
        count = chunk.stop - first
        rows = queries[:, :, chunk].flatten(1, 2)
        wide = rows.to(torch.float32)
        empty = wide.new_empty(1, 1, 1)
        with exact_products(torch.bfloat16):
            scores = torch.baddbmm(empty, wide, keys[..., : chunk.stop], beta=0, alpha=scale)
        if hidden is None:
            scores.view(-1, count, chunk.stop)[..., first:].masked_fill_(
                later[:count, :count], -torch.inf
            )
        else:
            scores.view(batch, heads, count, chunk.stop).masked_fill_(
                hidden[..., chunk, : chunk.stop], -torch.inf
            )
        yield chunk, rows, torch.softmax(scores, -1)


def _by_token(mixed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    count, heads, shared, size = like.shape
    return mixed.view(heads, shared, count, size).permute(2, 0, 1, 3)
