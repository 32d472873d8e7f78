"""Bases and tables of rotary positions, from config.json alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.models import errors, quantize, save_llama
from vexport.architectures import architecture_table, exclusion_reason, transformers_table
from vexport.architectures.rotary import table_bytes, wrong_numbers
from vexport.checks import check_checkpoint
from vexport.checks.shards import VALUES
from vexport.records import Json

HEADS: dict[str, Json] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 1 << 20,
}


@pytest.mark.parametrize(
    ("rope", "rows"),
    [
        ({}, 1 << 20),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1 << 19},
            1 << 21,
        ),
        ({"type": "linear", "factor": 8.0}, 1 << 23),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 1 << 20),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, (1 << 20) + 4096),
        ({"full_attention": {"rope_type": "dynamic", "factor": 2.0}}, 1 << 21),
        ({"rope_type": [0], "factor": "x"}, 1 << 20),
    ],
)
def test_rotary_table_rows(rope: Json, rows: int) -> None:
    assert table_bytes({**HEADS, "rope_parameters": rope}) == rows * 128 * 2


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 10**400, "x", [1e4, 0.0]])
@pytest.mark.parametrize("key", ["rope_theta", "rope_local_base_freq"])
def test_invalid_rotary_bases(key: str, value: Json) -> None:
    nested: Json = {"rope_parameters": {"full_attention": {key: value}}}
    assert [name for name, _ in wrong_numbers({key: value}, {})] == [key]
    assert [name for name, _ in wrong_numbers({"a": nested}, {})] == [
        f"a.rope_parameters.full_attention.{key}"
    ]


def test_sound_rotary_bases() -> None:
    sound: Json = {
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "vision_config": {"rope_theta": None},
    }
    assert not [*wrong_numbers({"text_config": sound}, {})]


@pytest.mark.parametrize(
    ("kind", "key", "value", "is_valid"),
    [
        ("muse_glimmer_text", "layer_rope_theta", [1e4, 0], True),
        ("granitemoe_swa", "layer_rope_theta", [0.0, 1e4], True),
        ("granitemoe_swa", "layer_rope_theta", [0, -1.0], False),
        ("granitemoe_swa", "layer_rope_theta", [False, 1e4], False),
        ("granitemoe_swa", "rope_theta", 0, False),
        ("efficientloftr", "partial_rotary_factor", 4.0, True),
        ("llama", "layer_rope_theta", [0, 1e4], False),
        ("llama", "partial_rotary_factor", 4.0, False),
    ],
)
def test_values_that_transformers_accepts(kind: str, key: str, value: Json, is_valid: bool) -> None:
    """The values belong to a model type, wherever its config is."""
    accepted = transformers_table().accepted
    text: Json = {"model_type": kind, key: value}
    assert is_valid is not any(wrong_numbers(text if isinstance(text, dict) else {}, accepted))
    assert is_valid is not any(wrong_numbers({"model_type": "x", "text_config": text}, accepted))


@pytest.mark.slow
def test_default_configs_of_transformers_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule about the values of a config refuses a default of any model type."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    accepted, wrong, tried = transformers_table().accepted, [], 0
    for kind in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:  # a type without a default config, or one that needs another package
            continue
        tried += 1
        values = json.loads(json.dumps(config.to_dict(), default=str))
        wrong += [(kind, name) for name, _ in wrong_numbers(values, accepted)]
    assert tried > 600
    assert wrong == []


def test_layer_without_positions_is_quantized(tmp_path: Path) -> None:
    """Quantize a mixture of experts with a base of 0 for its first layer."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 384}
    config = AutoConfig.for_model(
        "granitemoe_swa", **sizes, **heads, num_local_experts=4, layer_rope_theta=[0, 1e4]
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    out = quantize(tmp_path / "model", tmp_path / "out", "FP8_DYNAMIC")
    assert [each for each in errors(out) if each.check == "model"] == []


@pytest.mark.parametrize(("positions", "severities"), [(10_485_760, []), (10**9, ["warning"])])
def test_large_rotary_table_is_warning(
    tmp_path: Path, positions: int, severities: list[str]
) -> None:
    folder = save_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": positions})
    )
    found = check_checkpoint(str(folder)).findings
    places = [each.severity for each in found if each.where.endswith("max_position_embeddings")]
    assert places == severities


def test_registered_classes_are_known() -> None:
    """Each class in vLLM's registry is in the table, or a reason for its absence is recorded."""
    from vllm.model_executor.models import registry

    dicts = [value for name, value in vars(registry).items() if name.endswith("_MODELS")]
    names = {name for each in dicts if isinstance(each, dict) for name in each}
    known = architecture_table().architectures
    assert not {name for name in names if name not in known and exclusion_reason(name) is None}
    assert exclusion_reason("LlamaForSequenceClassification")
    assert not exclusion_reason("NobodysForCausalLM")


def test_unquantized_checkpoint_is_warning(tmp_path: Path) -> None:
    report = check_checkpoint(str(save_llama(tmp_path / "model")))
    warned = [
        each for each in report.findings if each.check == "config" and each.severity == "warning"
    ]
    assert report.ok
    assert len(warned) == 1
    assert [each.what for each in report.not_judged] == [VALUES]
