"""Schemes are refused if a tensor cannot follow the reordering of rows in vLLM's loaders."""

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.architectures.families import save_family
from tests.architectures.test_families import plan_of
from tests.command import vexport
from tests.models import save_llama
from tests.mutations.edits import config
from vexport.formats.schemes import all_schemes
from vexport.plan.build import PlanSettings

# Every stored tensor of these has a row for each row of the weight.
BY_ROW = {"FP8_DYNAMIC", "W8A8", "INT8", "MXFP4", "MXFP4A16", "MXFP4XFP8", "MXFP8", "MXFP8A16"}
ALL = {scheme.name for scheme in all_schemes()}
# Stored as `weight_packed`, which GPT-2's loader does not turn around.
PACKED = {name for name in ALL if name.startswith(("W", "NVFP4", "MXFP4"))} - {"W8A8"}
# Family -> (what it takes, where it refuses the rest).
TAKEN: dict[str, tuple[Collection[str], str]] = {
    "bloom": (BY_ROW, "transformer.h.0.self_attention.query_key_value"),
    "gpt2": (PACKED, "transformer.h.0.attn.c_attn"),
    "falcon": (ALL - {"FP8_BLOCK"}, "transformer.h.0.self_attention.query_key_value"),
}


@pytest.mark.parametrize("family", TAKEN)
def test_a_scheme_is_taken_where_all_its_tensors_follow(family: str, tmp_path: Path) -> None:
    """Source: vLLM's loaders.

    bloom.py and falcon.py reshape by heads, gpt2.py transposes tensors named weight.
    """
    source = save_family(family, tmp_path / "model")
    taken, where = TAKEN[family]
    refusals = {name: plan_of(source, name).refusals for name in ALL}
    assert {name for name, found in refusals.items() if not found} == set(taken)
    assert {found[0].where for found in refusals.values() if found} == {where}


def test_a_refusal_names_tensor_layer_and_remedy(tmp_path: Path) -> None:
    source = save_family("bloom", tmp_path / "model")
    ran = vexport("quantize", source, tmp_path / "out", "--scheme", "W4A16", "--quiet")
    assert ran.code == 2
    assert (
        "weight_shape [2] of query_key_value, of which vLLM takes each tensor for 768 rows"
        in ran.errors[0]
    )
    assert "--ignore query_key_value" in ran.errors[0]
    kept = ("--scheme", "W4A16", "--on-unsupported-shape", "keep", "--quiet")
    assert vexport("quantize", source, tmp_path / "out", *kept).code == 0
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "ignore"
    ]
    assert "transformer.h.1.self_attention.query_key_value" in ignore


def test_blocks_that_are_whole_heads_follow(tmp_path: Path) -> None:
    """Heads of 128 rows are whole blocks."""
    source = save_family("falcon", tmp_path / "model", hidden_size=512)
    assert plan_of(source, "FP8_BLOCK").refusals == ()


def test_rows_that_only_a_plain_weight_follows_stay_as_they_are(tmp_path: Path) -> None:
    """K2-Horizon turns the rows of q and k for the rotary order where their tensor is called
    `weight`.
    """
    source = save_llama(tmp_path / "model")
    config((), architectures=["K2HorizonForCausalLM"])(source)
    for scheme in ALL:
        refusals = plan_of(source, scheme).refusals
        assert {finding.where for finding in refusals} == {
            f"model.layers.{i}.self_attn.qkv_proj" for i in range(3)
        }
        assert "only where it is not quantized" in refusals[0].got
    kept = plan_of(source, "W4A16", PlanSettings(on_unsupported_shape="keep"))
    assert {group.name.rpartition(".")[2] for group in kept.groups} == {
        "o_proj",
        "gate_up_proj",
        "down_proj",
    }
