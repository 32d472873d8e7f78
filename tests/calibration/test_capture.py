"""Captured calls of layers, states on disk, and products with sums in float32."""

from pathlib import Path
from tempfile import gettempdir

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.calibration.models import batches_of, configs, samples
from vexport.calibration import capture
from vexport.calibration.capture import (
    Interner,
    Kept,
    LayerCall,
    capture_layer_calls,
    float32_head_gradient,
    float32_products,
    watch_attention,
)
from vexport.calibration.model import HiddenStates


def capture_calls(family: str, lengths: list[int]) -> list[list[LayerCall]]:
    model = AutoModelForCausalLM.from_config(configs()[family], dtype=torch.bfloat16).eval()
    batches = [(ids, dict[str, torch.Tensor]()) for ids in batches_of(samples(lengths))]
    with torch.no_grad():
        return capture_layer_calls(
            model, "model.layers", model.model.layers, batches, HiddenStates()
        ).calls


@pytest.mark.parametrize(
    ("family", "lengths", "most"), [("llama", [12] * 40 + [20] * 40, 8), ("gemma3", [20] * 40, 8)]
)
def test_equal_arguments_are_kept_once(family: str, lengths: list[int], most: int) -> None:
    calls = capture_calls(family, lengths)
    assert {len(layer) for layer in calls} == {len(lengths)}
    tensors = {
        id(end)
        for layer in calls
        for call in layer
        for value in call.kwargs.values()
        for part in (value if isinstance(value, tuple) else (value,))
        if isinstance(end := replacement(part), torch.Tensor)
    }
    assert 1 <= len(tensors) <= most


def replacement(value: object) -> object:
    return replacement(value.value) if isinstance(value, Kept) else value


def test_only_equal_tensors_are_replaced() -> None:
    """The tensors include equal tensors of several shapes, in any order, and different tensors."""
    values = [torch.full((size,), float(value)) for size in (2, 3) for value in (1, 2, 1, 2, 3)]
    interner = Interner()
    kept = [interner.intern(value) for value in values]
    assert len(interner.settle()) == 6
    later = interner.intern((values[0].clone(), None))
    assert not interner.settle()
    assert isinstance(later, tuple)
    assert replacement(later[0]) is replacement(kept[0]) is replacement(kept[2])
    for value, each in zip(values, kept, strict=True):
        found = replacement(each)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, value)


def test_large_states_are_on_disk() -> None:
    values = [torch.randn(1, length, 8, dtype=torch.bfloat16) for length in (3, 5, 4, 600)]
    hidden = HiddenStates(memory_bytes=150)
    for value in values:
        hidden.append(value)
    mapped = Path("/proc/self/maps").read_text().splitlines()
    assert sum(f" {gettempdir()}/" in line and line.endswith("(deleted)") for line in mapped) == 2
    for number, value in enumerate(values):
        assert torch.equal(hidden[number], value)
        hidden[number] = value + 1
    for number, value in enumerate(values):
        assert torch.equal(hidden[number], value + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are equal up to the precision of the layer's dtype.

    If torch's products in this dtype are fast, they are used.
    """
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 32, bias=False)).to(dtype)
    value = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        plain = model(value)
        for is_widened in (True, False):
            monkeypatch.setattr(capture, "prefers_float32", lambda device, found=is_widened: found)
            with float32_products(model, "cpu"):
                found = model(value)
            assert found.dtype == dtype
            torch.testing.assert_close(found, plain, rtol=2 * torch.finfo(dtype).eps, atol=0.01)
    assert "forward" not in model[0].__dict__


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_head_gradient_is_rounded_once(
    dtype: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is split into parts. The result equals torch's to the last bit."""
    monkeypatch.setattr(capture, "prefers_float32", lambda device: True)
    monkeypatch.setattr(capture, "HEAD_ROWS", 40)
    generator = torch.Generator().manual_seed(1)
    head = nn.Linear(24, 100, bias=has_bias).to(dtype).requires_grad_(False)
    value = torch.randn(1, 7, 24, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(1, 7, 100, generator=generator).to(dtype)
    with float32_head_gradient(head, "cpu"):
        output = head(value)
    (gradient,) = torch.autograd.grad(output, value, upstream)
    assert torch.equal(output, head(value))
    assert gradient.dtype == dtype
    expected = upstream.double() @ head.weight.double()
    torch.testing.assert_close(gradient, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


class Attention(nn.Module):
    """Attributes that transformers' attention functions read.

    There are two query heads per key head.
    """

    num_key_value_groups = 2
    is_causal = True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_rounds_once(
    dtype: torch.dtype, has_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watching attention within the block does not change it.

    After the block, the attention function is transformers' function again.
    """
    monkeypatch.setattr(capture, "prefers_float32", lambda device: True)
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(1, heads, 6, 16, generator=generator).to(dtype) for heads in (4, 2, 2)
    )
    mask = torch.randn(1, 1, 6, 6, generator=generator).to(dtype) if has_mask else None
    own, module = ALL_ATTENTION_FUNCTIONS["sdpa"], Attention()
    wide = None if mask is None else mask.float()
    expected = own(module, query.float(), key.float(), value.float(), wide)[0].to(dtype)
    with float32_products(module, "cpu"):
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        with watch_attention(module, "", str, {}):
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not attend
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
        found, probabilities = attend(module, query, key, value, mask)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert "eager" not in ALL_ATTENTION_FUNCTIONS
    assert probabilities is None
    assert found.dtype == dtype
    assert torch.equal(found, expected)
