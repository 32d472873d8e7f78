"""Ranges of keys and values, compared with transformers' KV cache after a run of the model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.calibration.models import (
    batches_of,
    calibrated,
    configs,
    expert_configs,
    inputs_of_whole_model,
    mean_squares,
    plan_for,
    range_of,
    samples,
    save,
)
from vexport.calibration import calibrate
from vexport.calibration.walk import LayerWalk
from vexport.errors import InputError
from vexport.files import from_json, to_json, write_text
from vexport.quantize.scale_search import decode_importance
from vexport.records import CalibrationRecord, HeadRanges

pytestmark = pytest.mark.usefixtures("matmul_in_model_dtype")

# Sliding layers cut the cache to their window, so that samples must be shorter.
LENGTHS = (5, 7, 3)
# Names of the attention layers in the checkpoint.
ATTENTION = {"gpt_neox": "attention", "gpt2": "attn"}
FAMILIES = {**configs(), **expert_configs()}
CACHED = [name for name in FAMILIES if name not in ("bloom", "deepseek_v3")]


def run_with_cache(folder: Path) -> list[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Return the keys and values of each layer, for each sample."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = []
    with torch.no_grad():
        for ids in batches_of(samples(LENGTHS)):
            cache = DynamicCache(config=model.config)
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            held = {
                n: layer
                for n, layer in enumerate(cache.layers)
                if getattr(layer, "keys", None) is not None
            }
            found.append({number: (layer.keys, layer.values) for number, layer in held.items()})
    return found


def head_ranges(states: list[torch.Tensor]) -> HeadRanges:
    every = torch.cat([state[0] for state in states], dim=1).flatten(1)
    return HeadRanges(low=tuple(every.amin(1).tolist()), high=tuple(every.amax(1).tolist()))


@pytest.mark.parametrize("name", CACHED)
def test_kv_ranges_equal_cache(name: str, tmp_path: Path) -> None:
    folder = save(FAMILIES[name], tmp_path / name)
    index, plan = plan_for(folder, kv_cache="fp8")
    found = calibrate(LayerWalk(index), plan, samples(LENGTHS)).kv_ranges
    runs = run_with_cache(folder)
    assert len(found) == len(runs[0])
    for number in runs[0]:
        (module,) = [layer for layer in found if f".{number}." in layer]
        assert any(tensor.startswith(f"{module}.") for tensor in index.tensors)
        assert module.endswith(ATTENTION.get(name, "self_attn"))
        assert found[module].tokens == sum(LENGTHS)
        assert found[module].key == head_ranges([run[number][0] for run in runs])
        assert found[module].value == head_ranges([run[number][1] for run in runs])


def test_attention_without_interface_is_refused(
    tmp_path: Path,
) -> None:
    folder = save(FAMILIES["bloom"], tmp_path / "model")
    with pytest.raises(InputError, match="KV cache: no attention layer"):
        calibrated(plan_for(folder, kv_cache="fp8"), samples([5]))
    before = dict(ALL_ATTENTION_FUNCTIONS)
    calibrated(plan_for(save(FAMILIES["llama"], tmp_path / "llama"), kv_cache="fp8"), samples([5]))
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


def test_importance_equals_mean_square(tmp_path: Path) -> None:
    llama = save(FAMILIES["llama"], tmp_path / "llama")
    index, plan = plan_for(llama, scheme="NVFP4A16", observer="imatrix_mse")
    found = calibrate(LayerWalk(index), plan, samples())
    assert found.ranges == {}
    names = [group.name for group in plan.groups]
    seen = inputs_of_whole_model(llama, names, batches_of(samples()))
    assert list(found.importance) == names
    for name, importance in found.importance.items():
        torch.testing.assert_close(
            decode_importance(importance), mean_squares(seen[name]), rtol=1e-6, atol=1e-8
        )
    write_text(tmp_path / "statistics.json", to_json(found))
    assert from_json(CalibrationRecord, tmp_path / "statistics.json") == found


@pytest.mark.parametrize("name", configs())
def test_input_ranges_equal_whole_model(name: str, tmp_path: Path) -> None:
    family = save(FAMILIES[name], tmp_path / name)
    index, plan = plan_for(family, head=True)
    assert len(plan.groups) >= 12
    chosen = samples()
    seen = inputs_of_whole_model(family, [group.name for group in plan.groups], batches_of(chosen))
    expected = {name: range_of(values) for name, values in seen.items()}
    assert calibrate(LayerWalk(index), plan, chosen).ranges == expected
