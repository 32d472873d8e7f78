"""Configs that vLLM refuses in any checkpoint. They are no error, unless a value is wrong."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models import Good, quantize
from vexport.engine.dry.load import DryLoad, errors_or_uncertainty
from vexport.engine.dry.unquantized import is_sound, write_control
from vexport.files import read_json_object
from vexport.records import Json


@pytest.fixture(scope="module")
def fp8(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(tiny_llama, tmp_path_factory.mktemp("unquantized") / "fp8", "FP8_DYNAMIC")


def with_values(checkpoint: Path, folder: Path, **values: Json) -> Path:
    """Copy a checkpoint and change values in its config.json. None removes a key."""
    copytree(checkpoint, folder)
    config = {**read_json_object(folder / "config.json"), **values}
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize(
    ("values", "sound"),
    [
        ({}, True),
        ({"num_key_value_heads": 4}, False),
        ({"num_attention_heads": 8}, False),
        ({"hidden_act": "nonsense"}, False),
        ({"hidden_size": "many"}, False),
        ({"architectures": ["MambaForCausalLM"]}, False),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, False),
        ({"architectures": ["Grok1ForCausalLM"]}, True),
    ],
)
def test_sound_config(fp8: Path, tmp_path: Path, values: dict[str, Json], sound: bool) -> None:
    """transformers judges the values. A class that transformers does not have is left to vLLM."""
    checkpoint = with_values(fp8, tmp_path / "checkpoint", **values)
    control = tmp_path / "control"
    assert write_control("config alone", checkpoint, control)
    assert "quantization_config" not in read_json_object(control / "config.json")
    assert is_sound(checkpoint, control) is sound


def test_default_config_of_transformers(
    fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config class that vLLM registers for this type is not used."""

    class OfVllm(transformers.LlamaConfig):  # type: ignore[misc]
        def __init__(self) -> None:
            raise AssertionError("not the class of transformers")

    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "llama", OfVllm)
    assert write_control("default config", fp8, tmp_path / "control")
    assert read_json_object(tmp_path / "control" / "config.json")["hidden_size"] == 4096


@pytest.mark.vllm
def test_unbuildable_config_is_not_judged(good: Good, tmp_path: Path) -> None:
    """vLLM 0.32's MiMo V2 reads keys that transformers' config of this type does not have."""
    of_type: dict[str, Json] = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "v_head_dim": 64,
        "hybrid_layer_pattern": [0, 0, 0],
        "layer_types": ["full_attention"] * 3,
        "mlp_layer_types": ["dense"] * 3,
        "rope_parameters": None,
    }
    mimo = with_values(good("FP8_DYNAMIC"), tmp_path / "mimo", **of_type)
    wrong = with_values(good("FP8_DYNAMIC"), tmp_path / "wrong", hidden_act="nonsense")
    load = DryLoad(checkpoints=[mimo, wrong], require="any", controlled=True)
    of_class, of_value = (errors_or_uncertainty(report) for report in load.reports())
    assert isinstance(of_class, str)
    assert "every checkpoint" in of_class
    assert isinstance(of_value, list)
    assert any("nonsense" in finding.got for finding in of_value)
