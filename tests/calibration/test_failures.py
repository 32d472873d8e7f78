"""Errors of calibration: values that are not finite, layers without tokens, unusual models."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from tests.calibration.models import calibrated, configs, plan_for, samples, save
from tests.mutations.edits import config, drop, multiply_by, put, spoiled
from tests.texts import assert_raises
from vexport.calibration import calibrate
from vexport.calibration.capture import capture_layer_calls
from vexport.calibration.model import HiddenStates
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.index import read_index
from vexport.errors import CheckpointFailed, InputError
from vexport.records import Json, LinearPlan

BUILDABLE_MODEL = "a model that transformers can build"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(configs()["llama"], tmp_path_factory.mktemp("llama") / "model")


@pytest.mark.parametrize("layer", ["1.self_attn.v_proj", "2.mlp.down_proj", "0.mlp.up_proj"])
def test_layer_with_infinite_output_is_named(llama: Path, tmp_path: Path, layer: str) -> None:
    folder = spoiled(
        llama, tmp_path / "model", put(f"model.layers.{layer}.weight", multiply_by(1e38))
    )
    with assert_raises(CheckpointFailed, f"model.layers.{layer}:", "row 1", "output", "not finite"):
        calibrated(plan_for(folder), samples())


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize(
    "weight",
    [
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.2.post_attention_layernorm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_weight_that_is_not_finite_is_named(
    llama: Path, tmp_path: Path, weight: str, value: float
) -> None:
    folder = spoiled(llama, tmp_path / "model", put(weight, lambda old: old.fill_(value)))
    with assert_raises(InputError, f"{weight}:", "NaN or infinite", "restore the source"):
        calibrated(plan_for(folder), samples())


def test_missing_module_and_weight_are_named(llama: Path, tmp_path: Path) -> None:
    index, plan = plan_for(llama)
    stranger = "model.layers.0.mlp.experts.3.up_proj"
    linear = LinearPlan(name=stranger, weight=f"{stranger}.weight", out_features=4, in_features=4)
    group = replace(plan.groups[0], name=stranger, members=(linear,))
    plan = replace(plan, groups=(*plan.groups, group))
    with assert_raises(InputError, f"{stranger}:", "no linear module"):
        calibrate(LayerWalk(index), plan, samples())
    missing = "model.layers.1.input_layernorm.weight"
    folder = spoiled(llama, tmp_path / "model", drop(missing))
    with assert_raises(InputError, f"{missing}: no tensor"):
        calibrated(plan_for(folder), samples())


def test_operations_between_layers_are_refused(llama: Path) -> None:
    model = LlamaForCausalLM(AutoConfig.from_pretrained(llama))
    layers = model.model.layers
    layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    with torch.no_grad(), assert_raises(InputError, "model.layers.1:", "input", "output"):
        capture_layer_calls(
            model, "model.layers", layers, [(torch.tensor([[1, 2]]), {})], HiddenStates()
        )
    assert "forward" not in vars(layers[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "unheard"},
            "--trust-remote-code",
        ),
        ({"model_type": "unheard"}, BUILDABLE_MODEL),
        ({"num_attention_heads": 0}, BUILDABLE_MODEL),
        ({"rope_parameters": {"rope_type": "none such", "rope_theta": 1.0}}, BUILDABLE_MODEL),
    ],
)
def test_unusable_config_is_one_line(
    changes: dict[str, Json],
    words: str,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_for(llama)[1]
    folder = spoiled(llama, tmp_path / "model", config((), **changes))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match=words) as caught:
        calibrate(LayerWalk(read_index(folder)), plan, samples())
    assert str(folder / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
