"""A scheme is refused if one of its tensors cannot follow vLLM's reordering of rows."""

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.architectures.families import save_family
from tests.architectures.test_families import plan_of
from tests.command import vexport
from tests.models import save_llama
from tests.mutations.edits import config
from tests.texts import assert_contains
from vexport.formats.schemes import all_schemes
from vexport.plan.build import PlanSettings

# Schemes whose stored tensors all have a row for each row of the weight.
BY_ROW = {"FP8_DYNAMIC", "W8A8", "INT8", "MXFP4", "MXFP4A16", "MXFP4XFP8", "MXFP8", "MXFP8A16"}
ALL = {scheme.name for scheme in all_schemes()}
# Schemes stored as `weight_packed`, which GPT-2's loader does not transpose.
PACKED = {name for name in ALL if name.startswith(("W", "NVFP4", "MXFP4"))} - {"W8A8"}
# By family: accepted schemes, and the layer that other schemes are refused for.
ACCEPTED: dict[str, tuple[Collection[str], str]] = {
    "bloom": (BY_ROW, "transformer.h.0.self_attention.query_key_value"),
    "gpt2": (PACKED, "transformer.h.0.attn.c_attn"),
    "falcon": (ALL - {"FP8_BLOCK"}, "transformer.h.0.self_attention.query_key_value"),
}


@pytest.mark.parametrize("family", ACCEPTED)
def test_schemes_that_follow_reordering(family: str, tmp_path: Path) -> None:
    """vLLM's bloom.py and falcon.py reshape tensors by heads.

    gpt2.py transposes tensors named weight.
    """
    source = save_family(family, tmp_path / "model")
    taken, where = ACCEPTED[family]
    refusals = {name: plan_of(source, name).refusals for name in ALL}
    assert {name for name, found in refusals.items() if not found} == set(taken)
    assert {found[0].where for found in refusals.values() if found} == {where}


def test_refusal_names_tensor_layer_and_remedy(tmp_path: Path) -> None:
    source = save_family("bloom", tmp_path / "model")
    ran = vexport("quantize", source, tmp_path / "out", "--scheme", "W4A16", "--quiet")
    assert ran.code == 2
    assert_contains(ran.errors[0], "weight_shape [2]", "query_key_value", "768 rows")
    assert_contains(ran.errors[0], "--ignore query_key_value")
    kept = ("--scheme", "W4A16", "--on-unsupported-shape", "keep", "--quiet")
    assert vexport("quantize", source, tmp_path / "out", *kept).code == 0
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "ignore"
    ]
    assert "transformer.h.1.self_attention.query_key_value" in ignore


def test_blocks_of_whole_heads_are_accepted(tmp_path: Path) -> None:
    """A head has 128 rows, which is a whole block."""
    source = save_family("falcon", tmp_path / "model", hidden_size=512)
    assert plan_of(source, "FP8_BLOCK").refusals == ()


def test_reordered_plain_weights_are_kept(tmp_path: Path) -> None:
    """K2-Horizon reorders rows of q and k only if the name of their tensor is `weight`."""
    source = save_llama(tmp_path / "model")
    config((), architectures=["K2HorizonForCausalLM"])(source)
    for scheme in ALL:
        refusals = plan_of(source, scheme).refusals
        assert {finding.where for finding in refusals} == {
            f"model.layers.{i}.self_attn.qkv_proj" for i in range(3)
        }
        assert_contains(refusals[0].got, "reorders", "unquantized layer")
    kept = plan_of(source, "W4A16", PlanSettings(on_unsupported_shape="keep"))
    assert {group.name.rpartition(".")[2] for group in kept.groups} == {
        "o_proj",
        "gate_up_proj",
        "down_proj",
    }
