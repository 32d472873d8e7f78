"""Plans: groups as vLLM fuses, rules in order, refusals before anything is written."""

import json
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import save_llama
from vexport.checkpoint.index import read_index
from vexport.plan import build_plan, matches
from vexport.scenario import Rule
from vexport.types import Plan


def plan_of(model: Path, *rules: tuple[str, str]) -> Plan:
    return build_plan(read_index(model), [Rule(match=match, scheme=scheme) for match, scheme in rules])


def test_groups_are_those_of_vllm(llama: Path) -> None:
    plan = plan_of(llama, ("Linear", "NVFP4"))
    assert len(plan.groups) == 12
    members = {
        group.name: [member.name.rpartition(".")[2] for member in group.members] for group in plan.groups
    }
    assert members["model.layers.1.self_attn.qkv_proj"] == ["q_proj", "k_proj", "v_proj"]
    assert members["model.layers.1.mlp.gate_up_proj"] == ["gate_proj", "up_proj"]
    assert members["model.layers.1.mlp.down_proj"] == ["down_proj"]


def test_kept_by_default_unless_named(llama: Path) -> None:
    assert plan_of(llama, ("Linear", "FP8")).kept_linears == ("lm_head",)
    assert plan_of(llama, ("lm_head", "FP8"), ("Linear", "FP8")).kept_linears == ()


def test_the_first_rule_that_matches_wins(llama: Path) -> None:
    plan = plan_of(llama, ("re:.*layers.0.*", "keep"), ("mlp.down_proj", "W8A8"), ("Linear", "W4A16"))
    schemes = {group.name: group.scheme for group in plan.groups}
    assert not any(".0." in name for name in schemes)
    assert schemes["model.layers.1.mlp.down_proj"] == "W8A8"
    assert schemes["model.layers.1.mlp.gate_up_proj"] == "W4A16"


def test_different_schemes_within_a_fused_group_are_refused(llama: Path) -> None:
    plan = plan_of(llama, ("q_proj", "FP8_DYNAMIC"), ("Linear", "W8A8"))
    assert len(plan.refusals) == 3
    assert plan.refusals[0].where == "model.layers.0.self_attn.qkv_proj"
    assert "q_proj, k_proj, v_proj" in plan.refusals[0].fix


def test_a_misfit_names_layer_size_and_rule(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "model", intermediate_size=328)
    plan = plan_of(model, ("Linear", "NVFP4A16"))
    assert [refusal.where for refusal in plan.refusals] == [
        f"model.layers.{i}.mlp.down_proj" for i in range(3)
    ]
    assert plan.refusals[0].got == "in_features 328 is not a multiple of 16"
    assert plan_of(model, ("down_proj", "keep"), ("Linear", "NVFP4A16")).refusals == ()


def test_a_refused_plan_writes_nothing(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "model", intermediate_size=328)
    ran = vexport("quantize", model, tmp_path / "out", "--scheme", "W4A16", "--quiet")
    assert ran.code == 2
    assert len(ran.errors) == 1
    assert "in_features 328" in ran.errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    planned = vexport("plan", model, "--scheme", "W4A16")
    assert planned.code == 2
    assert "refused" in planned.stdout


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("Linear", "model.layers.0.mlp.up_proj", True),
        ("up_proj", "model.layers.0.mlp.up_proj", True),
        ("p_proj", "model.layers.0.mlp.up_proj", False),
        ("mlp.up_proj", "model.layers.0.mlp.up_proj", True),
        ("re:.*mlp.*", "model.layers.0.mlp.up_proj", True),
        ("re:mlp.*", "model.layers.0.mlp.up_proj", False),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    ran = vexport("plan", model, "--scheme", "FP8")
    assert ran.code == 2
    assert "NoSuchForCausalLM" in ran.errors[0]


def test_a_quantized_source_is_refused(llama: Path, tmp_path: Path) -> None:
    assert vexport("quantize", llama, tmp_path / "out", "--scheme", "W8A8", "--quiet").code == 0
    ran = vexport("plan", tmp_path / "out", "--scheme", "W8A8")
    assert ran.code == 2
    assert "a quantized checkpoint" in ran.errors[0]
