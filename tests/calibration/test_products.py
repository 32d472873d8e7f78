"""Products in float32 where a CPU multiplies 16-bit numbers slowly."""

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vexport.calibration import capture
from vexport.calibration.capture import fast_products, watching_attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_sums_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as numbers of the layer's dtype can tell; where its own are fast they stay."""
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 32, bias=False)).to(dtype)
    value = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        plain = model(value)
        for is_widened in (True, False):
            monkeypatch.setattr(capture, "widens", lambda device, found=is_widened: found)
            with fast_products(model, "cpu"):
                found = model(value)
            assert found.dtype == dtype
            torch.testing.assert_close(found, plain, rtol=2 * torch.finfo(dtype).eps, atol=0.01)
    assert "forward" not in model[0].__dict__


def test_an_older_torch_that_does_not_know_its_cpu_multiplies_as_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not capture.widens("cpu")


class Attention(nn.Module):
    """What transformers' attention functions ask of a module: two query heads to a key head."""

    num_key_value_groups = 2
    is_causal = True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_rounds_once(dtype: torch.dtype, has_mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever watches attention within the block leaves it as it was; after it, it is transformers' own."""
    monkeypatch.setattr(capture, "widens", lambda device: True)
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, heads, 6, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
    mask = torch.randn(1, 1, 6, 6, generator=generator).to(dtype) if has_mask else None
    own, module = ALL_ATTENTION_FUNCTIONS["sdpa"], Attention()
    wide = None if mask is None else mask.float()
    expected = own(module, query.float(), key.float(), value.float(), wide)[0].to(dtype)
    with fast_products(module, "cpu"):
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        with watching_attention(module, "", str, {}):
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not attend
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
        found, probabilities = attend(module, query, key, value, mask)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert "eager" not in ALL_ATTENTION_FUNCTIONS
    assert probabilities is None
    assert found.dtype == dtype
    assert torch.equal(found, expected)
