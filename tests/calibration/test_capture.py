"""Captured calls keep what is shared once; hidden states beyond a size are on disk."""

from pathlib import Path
from tempfile import gettempdir

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.calibration.make import batches_of, samples
from tests.calibration.models import configs
from vexport.calibration.capture import LayerCall, capture_layer_calls
from vexport.calibration.model import HiddenStates
from vexport.observers.flatten import channel_extremes


def captured(family: str, lengths: list[int]) -> list[list[LayerCall]]:
    model = AutoModelForCausalLM.from_config(configs()[family], dtype=torch.bfloat16).eval()
    batches = batches_of(samples(lengths))
    with torch.no_grad():
        return capture_layer_calls(model, "model.layers", model.model.layers, batches, HiddenStates()).calls


@pytest.mark.parametrize(
    ("family", "lengths", "most"), [("llama", [12] * 40 + [20] * 40, 8), ("gemma3", [20] * 40, 8)]
)
def test_equal_arguments_are_kept_once(family: str, lengths: list[int], most: int) -> None:
    calls = captured(family, lengths)
    assert {len(layer) for layer in calls} == {len(lengths)}
    tensors = {
        id(part)
        for layer in calls
        for call in layer
        for value in call.kwargs.values()
        for part in (value if isinstance(value, tuple) else (value,))
        if isinstance(part, torch.Tensor)
    }
    assert 1 <= len(tensors) <= most


def test_states_beyond_the_limit_are_on_disk_and_can_be_overwritten() -> None:
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


def test_extremes_by_channel_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        value = torch.randn(2, 9, 12, generator=generator)
        value[..., 0] = value[..., 0].abs() + 1
        value[..., 1] = -value[..., 1].abs() - 1
        value[..., 2] = 0.0
        value[..., 3] = -0.0
        value[0, 0, 4], value[0, 1, 4] = torch.inf, -torch.inf
        value = value.to(dtype)
        low, high = channel_extremes(value)
        assert torch.equal(low, value.flatten(0, 1).amin(0))
        assert torch.equal(high, value.flatten(0, 1).amax(0))
        for sign in (1.0, -1.0):
            value[1, 2, 5] = sign * torch.nan
            assert channel_extremes(value)[:, 5].isnan().any()
