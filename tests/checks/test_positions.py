"""Bases and tables of rotary positions, from config.json alone."""

import json
from pathlib import Path

import pytest

from tests.models import save_llama
from vexport.architectures import architecture_table, exclusion_reason
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
    assert [each.key for each in wrong_numbers({key: value})] == [key]
    assert [each.key for each in wrong_numbers({"a": nested})] == [
        f"a.rope_parameters.full_attention.{key}"
    ]


def test_sound_rotary_bases() -> None:
    sound: Json = {
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "vision_config": {"rope_theta": None},
    }
    assert not [*wrong_numbers({"text_config": sound})]


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
