"""Plans: fused groups, the order of rules, and refusals before a file is written."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.architectures.families import save_family
from tests.command import vexport
from tests.models import Good, save_llama, save_qwen3, save_qwen3_moe
from tests.texts import assert_contains
from vexport.architectures.fusion import FusedLayer
from vexport.checkpoint.index import read_index
from vexport.errors import InputError
from vexport.files import from_json, to_json
from vexport.formats.plan import FusionGroup, Plan, Treatment
from vexport.formats.schemes import get_scheme
from vexport.plan.build import PlanSettings, build_plan
from vexport.plan.rules import matches
from vexport.records import LinearPlan
from vexport.scenario import Rule

DEFAULTS = PlanSettings()


def plan_of(model: Path, *rules: tuple[str, str], settings: PlanSettings = DEFAULTS) -> Plan:
    chosen = [Rule(match=match, scheme=scheme) for match, scheme in rules]
    return build_plan(read_index(model), chosen, settings)


def test_first_matching_rule_wins(llama: Path) -> None:
    plan = plan_of(
        llama, ("re:.*layers.0.*", "keep"), ("mlp.down_proj", "W8A8"), ("Linear", "W4A16")
    )
    schemes = {group.name: group.scheme.name for group in plan.groups}
    assert not any(".0." in name for name in schemes)
    assert schemes["model.layers.1.mlp.down_proj"] == "W8A8"
    assert schemes["model.layers.1.mlp.gate_up_proj"] == "W4A16"
    assert plan_of(llama, ("Linear", "FP8")).kept_linears == ("lm_head",)
    assert plan_of(llama, ("lm_head", "FP8"), ("Linear", "FP8")).kept_linears == ()
    plan = plan_of(llama, ("q_proj", "FP8_DYNAMIC"), ("Linear", "W8A8"))
    assert len(plan.refusals) == 3
    assert plan.refusals[0].where == "model.layers.0.self_attn.qkv_proj"
    assert "q_proj, k_proj, v_proj" in plan.refusals[0].fix


@pytest.mark.parametrize("match", ["lm_head", "language_model.lm_head", "re:.*lm_head$"])
def test_rule_for_a_tied_head(tmp_path: Path, match: str) -> None:
    model = save_qwen3(tmp_path / "tied")
    with pytest.raises(InputError) as raised:
        plan_of(model, (match, "W4A16"), ("Linear", "FP8"))
    assert raised.value.rule == "rules/tied-head"


@pytest.mark.parametrize(
    "match",
    [
        *("lm_head", "re:.*lm_head", "re:^lm_head$", "re:.*lm_head.*"),
        *("re:.*[.]gate$", r"re:.*mlp\.router"),
    ],
)
def test_kept_layers_may_be_missing(tmp_path: Path, match: str) -> None:
    model = save_qwen3(tmp_path / "tied")
    assert plan_of(model, (match, "keep"), ("Linear", "FP8")).refusals == ()


def test_unsupported_shape_names_layer_and_rule(
    tmp_path: Path,
) -> None:
    model = save_llama(tmp_path / "model", intermediate_size=328)
    plan = plan_of(model, ("Linear", "NVFP4A16"))
    assert [refusal.where for refusal in plan.refusals] == [
        f"model.layers.{i}.mlp.down_proj" for i in range(3)
    ]
    assert_contains(plan.refusals[0].got, "in_features 328", "group size 16")
    assert plan_of(model, ("down_proj", "keep"), ("Linear", "NVFP4A16")).refusals == ()
    # In a fused layer, all parts except the last must be whole blocks. An unfused layer may end
    # with an incomplete block.
    refusals = plan_of(model, ("Linear", "FP8_BLOCK")).refusals
    assert [refusal.where for refusal in refusals] == [
        f"model.layers.{i}.mlp.gate_up_proj" for i in range(3)
    ]
    assert_contains(refusals[0].got, "out_features 328", "block size 128")
    assert "--ignore gate_proj --ignore up_proj" in refusals[0].fix
    ran = vexport("quantize", model, tmp_path / "out", "--scheme", "W4A16", "--quiet")
    assert ran.code == 2
    assert len(ran.errors) == 1
    assert "in_features 328" in ran.errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


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
def test_patterns_match_names(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_quantized_source_is_refused(good: Good) -> None:
    ran = vexport("plan", good("W8A8"), "--scheme", "W8A8")
    assert ran.code == 2
    assert_contains(ran.errors[0], "already quantized", "compressed-tensors", "vexport check")


@pytest.mark.parametrize(("ranks", "refused"), [((1,), 0), ((1, 2), 6), ((4,), 6)])
def test_ranks_need_whole_blocks(ranks: tuple[int, ...], refused: int, tmp_path: Path) -> None:
    """384 columns of down_proj, and rows of gate and up, are 3 blocks.

    Two ranks cannot share them.
    """
    model = save_llama(tmp_path / "model", intermediate_size=384)
    rules = (("re:.*mlp.*", "FP8_BLOCK"),)
    plan = plan_of(model, *rules, settings=PlanSettings(ranks=ranks))
    assert len(plan.refusals) == refused
    assert all(f"on each of {ranks[-1]} ranks" in refusal.got for refusal in plan.refusals)


def test_few_kv_heads_repeat_on_many_ranks(tmp_path: Path) -> None:
    """With two heads on four ranks, vLLM gives each rank one whole head."""
    model = save_llama(
        tmp_path / "model", num_attention_heads=8, head_dim=128, num_key_value_heads=2
    )
    plan = plan_of(model, ("re:.*self_attn.*", "FP8_BLOCK"), settings=PlanSettings(ranks=(4,)))
    assert plan.refusals == ()


def test_unsupported_layers_can_be_kept(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "model", intermediate_size=328)
    keep = ("--on-unsupported-shape", "keep", "--quiet")
    ran = vexport("quantize", model, tmp_path / "out", "--scheme", "FP8_BLOCK", *keep)
    assert ran.code == 0, ran.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    kept = [f"model.layers.{i}.mlp.{part}_proj" for i in range(3) for part in ("gate", "up")]
    assert sorted(config["ignore"]) == sorted(["lm_head", *kept])
    assert vexport("check", tmp_path / "out").code == 0
    plan = plan_of(
        model, ("Linear", "FP8_BLOCK"), settings=PlanSettings(on_unsupported_shape="keep")
    )
    assert [note.where for note in plan.notes] == [
        f"model.layers.{i}.mlp.gate_up_proj" for i in range(3)
    ]
    assert "328" in plan.notes[0].got


def test_experts_of_layer_are_kept_together(tmp_path: Path) -> None:
    """If one expert's down projection is unsupported, all experts of the layer are kept.

    vLLM finds them by a pattern in the ignore list.
    """
    model = save_family("qwen3-moe", tmp_path / "model", moe_intermediate_size=136)
    plan = plan_of(
        model, ("Linear", "NVFP4A16"), settings=PlanSettings(on_unsupported_shape="keep")
    )
    assert not any("experts" in group.name for group in plan.groups)
    assert [entry for entry in plan.ignore if "experts" in entry] == [
        rf"re:.*\blayers\.{i}\.mlp\.experts\..*" for i in range(2)
    ]
    assert len(plan.refusals) == 0
    assert {note.where for note in plan.notes} == {
        f"model.layers.{i}.mlp.experts" for i in range(2)
    }


def test_routed_experts_share_scheme(tmp_path: Path) -> None:
    model = save_family("mixtral", tmp_path / "model")
    plan = plan_of(model, ("w2", "FP8_DYNAMIC"), ("Linear", "NVFP4A16"))
    assert [refusal.where for refusal in plan.refusals] == [
        f"model.layers.{i}.block_sparse_moe.experts" for i in range(2)
    ]
    assert_contains(plan.refusals[0].expected, "w1, w3, w2", "all routed experts")
    mixed = plan_of(model, ("re:.*experts.*", "FP8_DYNAMIC"), ("Linear", "NVFP4A16"))
    assert mixed.refusals == ()
    assert mixed.schemes == ("FP8_DYNAMIC", "NVFP4A16")


def test_unquantized_layers_of_vllm(
    tmp_path: Path,
) -> None:
    model = save_family("qwen3-next", tmp_path / "model")
    refused = plan_of(model, ("mlp.shared_expert_gate", "FP8_DYNAMIC"), ("Linear", "FP8_DYNAMIC"))
    assert len(refused.refusals) == 4
    assert "never quantizes" in refused.refusals[0].got
    plan = plan_of(model, ("re:.*", "FP8_DYNAMIC"))
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(plan.kept_linears)


def test_unsplit_fused_module_is_ignored_by_name(
    tmp_path: Path,
) -> None:
    """Qwen2MoeForCausalLM.packed_modules_mapping has gate_up_proj only for some configs."""
    model = save_family("qwen2-moe", tmp_path / "model")
    plan = plan_of(model, ("re:.*shared_expert.*", "keep"), ("Linear", "FP8_DYNAMIC"))
    assert "model.layers.0.mlp.shared_expert.gate_up_proj" in plan.ignore


def test_unknown_language_model_is_an_assumption(tmp_path: Path) -> None:
    model = save_family("mistral3", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["model_type"] = "unheard_of"
    (model / "config.json").write_text(json.dumps(config))
    plan = plan_of(model, ("Linear", "FP8_DYNAMIC"))
    assert [note.check for note in plan.notes] == ["architecture"]
    assert "the usual fused layers are assumed" in plan.notes[0].got
    assert "note" in vexport("plan", model, "--scheme", "FP8_DYNAMIC").stdout
    assert any(group.name.endswith("qkv_proj") and len(group.members) == 3 for group in plan.groups)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("llama", "W8A8"),
        ("llama", "MXFP4A16"),
        ("deepseek-v3", "FP8_BLOCK"),
        ("granite-moe", "NVFP4A16"),
    ],
)
def test_predicted_size_equals_output(family: str, scheme: str, tmp_path: Path) -> None:
    model = save_family(family, tmp_path / "model")
    plan = plan_of(model, ("Linear", scheme))
    assert vexport("quantize", model, tmp_path / "out", "--scheme", scheme, "--quiet").code == 0
    written = read_index(tmp_path / "out")
    assert written.num_bytes == plan.output_bytes


def test_reordered_rows_need_scales_by_row(tmp_path: Path) -> None:
    """vLLM reorders rows of Llama 4 for rotary positions.

    It refuses scales of blocks, and does not reorder zero points.
    """
    model = save_family("llama4", tmp_path / "model")
    for scheme, what in (
        ("FP8_BLOCK", "weight_scale [2, 2] of q_proj"),
        ("W4A16_ASYM", "weight_zero_point [32, 2] of q_proj"),
    ):
        refusals = plan_of(model, ("Linear", scheme)).refusals
        assert [refusal.where for refusal in refusals] == [
            f"model.layers.{i}.self_attn.qkv_proj" for i in range(2)
        ]
        assert what in refusals[0].got
    assert plan_of(model, ("Linear", "W4A16")).refusals == ()


def test_layers_fused_on_disk_are_planned_by_parts(tmp_path: Path) -> None:
    """Phi-3's keys and values have 128 rows: whole blocks for one rank, but not for two."""
    model = save_family("phi3", tmp_path / "model")
    assert plan_of(model, ("qkv_proj", "FP8_BLOCK")).refusals == ()
    refused = plan_of(model, ("qkv_proj", "FP8_BLOCK"), settings=PlanSettings(ranks=(2,))).refusals
    assert len(refused) == 2
    assert_contains(refused[0].got, "out_features 64", "block size 128", "2 ranks")
    ragged = save_family("phi3", tmp_path / "ragged", intermediate_size=328)
    assert len(plan_of(ragged, ("gate_up_proj", "FP8_BLOCK")).refusals) == 2


@pytest.mark.parametrize(
    ("files", "name", "got", "fix"),
    [
        (["model.Q4_K_M.gguf"], "", "a GGUF file (model.Q4_K_M.gguf)", "converted from"),
        (["model.gguf"], "model.gguf", "a GGUF file", "converted from"),
        (
            ["model_index.json", "transformer/config.json"],
            "",
            "a Diffusers pipeline",
            "a language model",
        ),
        (
            ["config.json", "pytorch_model.bin"],
            "",
            "pickled weights (pytorch_model.bin)",
            "save_pretrained",
        ),
        (
            ["checkpoint-10/config.json", "trainer_state.json"],
            "",
            "a training run",
            "checkpoint-10",
        ),
        (["snapshots/abc/config.json", "refs/main"], "", "the hub's cache", "snapshots/abc"),
        (["models--A--B/snapshots/abc/config.json"], "", "the hub's cache", "snapshots/abc"),
    ],
)
def test_other_kinds_of_folders_are_named(
    files: list[str], name: str, got: str, fix: str, tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    ran = vexport("plan", tmp_path / name, "--scheme", "FP8_DYNAMIC")
    assert ran.code == 2
    assert len(ran.errors) == 1
    assert got in ran.errors[0]
    assert fix in ran.errors[0]


def test_plan_json_has_scheme_names(llama: Path, tmp_path: Path) -> None:
    plan = plan_of(llama, ("down_proj", "W4A16_G64"), ("Linear", "INT4_GROUP64_ASYM.A16"))
    file = tmp_path / "plan.json"
    file.write_text(to_json(plan))
    written = json.loads(file.read_text())
    assert {group["scheme"] for group in written["groups"]} == {*plan.schemes}
    assert from_json(Plan, file) == plan
    assert from_json(Plan, file).groups[0].scheme is get_scheme(plan.groups[0].scheme.name)
    written["groups"][0]["scheme"] = "W4A17"
    file.write_text(json.dumps(written))
    with pytest.raises(InputError, match=r"groups.0.scheme.*W4A17"):
        from_json(Plan, file)


def test_groups_have_all_settings_of_treatment() -> None:
    linear = LinearPlan(name="a", weight="a.weight", out_features=64, in_features=256)
    settings: dict[str, Any] = {
        "scheme": get_scheme("FP8"),
        "observer": "mse",
        "rounding": "refit",
        "observer_kwargs": {"norm": 2.0},
        "input_observer": "minmax",
        "input_observer_kwargs": {"averaging_constant": 0.5},
        "strength": 0.25,
        "ridge": 0.1,
    }
    assert settings.keys() == {field.name for field in fields(Treatment)}
    layer = FusedLayer(name="a", members=("a",))
    group = FusionGroup.from_layer(layer, [linear], Treatment(**settings))
    assert {name: getattr(group, name) for name in settings} == settings
    assert (group.layer, group.members) == (layer, (linear,))


@pytest.mark.parametrize("scheme", ["FP8_CHANNEL.A16", "FP8_CHANNEL.FP8_TENSOR", "W4A8"])
def test_scheme_without_experts_is_refused(tmp_path: Path, scheme: str) -> None:
    model = save_qwen3_moe(tmp_path / "model")
    refused = {refusal.where for refusal in plan_of(model, ("Linear", scheme)).refusals}
    assert refused
    assert all(".experts." in where for where in refused)
    only_dense = plan_of(model, ("re:.*[.]experts[.].*", "keep"), ("Linear", scheme))
    assert only_dense.refusals == ()
