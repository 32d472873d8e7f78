"""Causal attention in chunks equals torch's attention up to the order of sums."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vexport.calibration import attention
from vexport.calibration.attention import causal_attention


class SharedHeads(torch.nn.Module):
    """Attention in which three heads of queries share a head of keys and values."""

    num_key_value_groups = 3


def states(heads: int, tokens: int, size: int) -> torch.Tensor:
    return 2 * torch.randn(2, tokens, heads, size).to(torch.bfloat16).transpose(1, 2)


def attend(*args: object, **kwargs: object) -> torch.Tensor:
    module = SharedHeads()
    output: torch.Tensor = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)[0]
    return output


@pytest.fixture(autouse=True)
def fast_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in chunks on every machine, with several chunks for a row."""
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "bf16_units", lambda: "avx512")
    monkeypatch.setattr(attention, "CHUNK_SCORES", 1 << 14)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize(("tokens", "value_size"), [(1, 16), (37, 16), (200, 24)])
def test_chunks_equal_exact_attention(tokens: int, value_size: int, scaling: float | None) -> None:
    query, key, value = states(6, tokens, 16), states(2, tokens, 16), states(2, tokens, value_size)
    exact = attend(*(part.double() for part in (query, key, value)), None, scaling=scaling)
    with torch.no_grad(), causal_attention("cpu"):
        found = attend(query, key, value, None, scaling=scaling)
    assert found.shape == exact.shape
    assert float((found - exact).norm() / exact.norm()) < 0.004


@pytest.mark.parametrize("batch", [1, 2])
def test_masks_hide_earlier_tokens(batch: int) -> None:
    """A sliding window, and a mask that differs between the rows of a batch."""
    query, key, value = (
        part.requires_grad_()
        for part in (states(6, 200, 16), states(2, 200, 16), states(2, 200, 24))
    )
    mask = torch.ones(batch, 1, 200, 200, dtype=torch.bool).tril().triu(-50)
    if batch > 1:
        mask[1, :, 90:, :60] = False
    wanted = torch.randn(2, 200, 6, 24).to(torch.bfloat16)
    exact = [part.detach().double().requires_grad_() for part in (query, key, value)]
    expected = attend(*exact, mask)
    with causal_attention("cpu"):
        found = attend(query, key, value, mask)
    assert found.grad_fn is not None
    assert "CausalProduct" in found.grad_fn.name()
    assert float(((found - expected).norm() / expected.norm()).detach()) < 0.004
    gradients = torch.autograd.grad(expected, exact, wanted.double())
    for gradient, exactly in zip(
        torch.autograd.grad(found, (query, key, value), wanted), gradients, strict=True
    ):
        assert float((gradient - exactly).norm() / exactly.norm()) < 0.007


def test_other_calls_are_passed_on() -> None:
    """Other masks, other dtypes and attention to later tokens are left to torch."""
    query, key, value = states(6, 40, 16), states(2, 40, 16), states(2, 40, 16)
    causal = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    added = torch.zeros(causal.shape, dtype=torch.bfloat16).masked_fill(~causal, -torch.inf)
    without_itself, with_later = causal.clone(), causal.clone()
    without_itself[1, 0, 7, 7], with_later[0, 0, 3, 4] = False, True
    calls = [
        ((query, key, value, causal.expand(2, 6, 40, 40)), {}),
        ((query, key, value, added), {}),
        ((query, key, value, without_itself), {}),
        ((query, key, value, with_later), {}),
        ((query, key, value, None), {"is_causal": False}),
        ((query.float(), key.float(), value.float(), None), {}),
        ((query[:, :, :7], key, value, None), {}),
    ]
    for args, kwargs in calls:
        with torch.no_grad(), causal_attention("cpu"):
            found = attend(*args, **kwargs)
        assert torch.equal(found, attend(*args, **kwargs))


@pytest.mark.parametrize("sink", [0, 10])
def test_gradients_equal_exact_gradients(sink: float) -> None:
    """Also if nearly all attention is on the first token, and the values have a mean."""
    parts = states(6, 200, 16), states(2, 200, 16), states(2, 200, 24)
    query, key, value = parts
    query[..., 0], key[:, :, 0, 0] = 8, sink
    value += 3
    exact = [part.double().requires_grad_() for part in parts]
    wanted = torch.randn(2, 200, 6, 24).to(torch.bfloat16)
    expected = torch.autograd.grad(attend(*exact, None), exact, wanted.double())
    narrow = [part.requires_grad_() for part in parts]
    with causal_attention("cpu"):
        output = attend(*narrow, None)
    found = torch.autograd.grad(output, narrow, wanted)
    for gradient, exactly in zip(found, expected, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert float((gradient - exactly).norm() / exactly.norm()) < 0.007
