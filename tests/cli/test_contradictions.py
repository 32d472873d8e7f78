"""Options and scenarios that contradict each other or the model are refused."""

import json
import re
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import save_llama
from tests.texts import assert_contains
from vexport.scenario import read_scenario

DATA_FREE = ("--scheme", "FP8_DYNAMIC", "--quiet")


def scenario(
    folder: Path, source: Path, more: str = "", rules: str = "[{match: Linear, scheme: W8A8}]"
) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(f"name: a\nsource: {source}\nrules: {rules}\n{more}")
    return path


def test_importance_uses_packaged_data(llama: Path, tmp_path: Path) -> None:
    """Without --calibration, importance uses packaged data, which need the model's tokenizer."""
    ran = vexport("quantize", llama, tmp_path / "out", *DATA_FREE, "--observer", "imatrix_mse")
    assert ran.code == 2
    assert "no calibration data was given" in ran.stderr
    assert "no usable tokenizer" in ran.errors[0]


def test_options_against_scenario_are_refused(llama: Path, tmp_path: Path) -> None:
    path = scenario(tmp_path, llama)
    ran = vexport("plan", path, "--scheme", "FP8_DYNAMIC", "--kv-cache", "fp8", "--tp", "2")
    assert ran.code == 2
    assert all(option in ran.errors[0] for option in ("--scheme", "--kv-cache", "--tp", "scenario"))
    ran = vexport("plan", llama, "--scheme", "W8A8", "--run-dir", tmp_path)
    assert ran.code == 2
    assert_contains(ran.errors[0], "--run-dir", "a SCENARIO", "usage/needs-option")


@pytest.mark.parametrize(
    "argument",
    ["tensor_parallel_size=2", "pipeline_parallel_size=2", 'quantization_config={"a": "b"}'],
)
def test_arguments_without_a_meaning_in_a_dry_load(argument: str, llama: Path) -> None:
    ran = vexport("load", llama, "--dry", "--engine-arg", argument)
    assert ran.code == 2
    assert_contains(ran.errors[0], argument.partition("=")[0], "--dry", "usage/excluded")


def test_default_that_contradicts_a_recipe(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    modifier = "{targets: Linear, scheme: FP8_DYNAMIC}"
    (tmp_path / "recipe.yaml").write_text(
        f"stage: {{modifiers: {{QuantizationModifier: {modifier}}}}}"
    )
    recipe = ("--recipe", "recipe.yaml")
    assert vexport("plan", llama, *recipe).code == 0
    (tmp_path / "vexport.toml").write_text('observer = "minmax"')
    for command in (("plan", llama), ("quantize", llama, "out")):
        ran = vexport(*command, *recipe)
        assert ran.code == 2
        assert_contains(ran.errors[0], "--observer", "--recipe", "usage/excluded")


@pytest.mark.parametrize("name", ["fp8-dynamic", "Fp8_Dynamic", "FP8DYNAMIC", "fp8 dynamic"])
def test_scheme_spellings(name: str, llama: Path, tmp_path: Path) -> None:
    planned = json.loads(vexport("plan", llama, "--scheme", name, "--format", "json").stdout)
    assert {group["scheme"] for group in planned["groups"]} == {"FP8_DYNAMIC"}
    auto = f"auto: {{candidates: [{name}, Keep], bits: 5}}\ncalibration: {{data: x}}\n"
    named = f"{{match: q_proj, scheme: {name}}}"
    rules = f"[{{match: lm_head, scheme: KEEP}}, {named}, {{match: Linear, scheme: Auto}}]"
    read = read_scenario(scenario(tmp_path, llama, auto, rules))
    assert [rule.scheme for rule in read.rules] == ["keep", "FP8_DYNAMIC", "auto"]
    assert read.auto is not None
    assert read.auto.candidates == ("FP8_DYNAMIC", "keep")


def test_plan_and_check_refuse_equal_heads(tmp_path: Path) -> None:
    """The model has nine attention heads and three key and value heads, like SmolLM2-135M."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    sizes = {"hidden_size": 576, "intermediate_size": 1152, "num_hidden_layers": 1}
    source = save_llama(tmp_path / "model", **heads, **sizes)
    planned = vexport("plan", source, "--scheme", "NVFP4A16", "--tp", "1,2")
    assert planned.code == 2
    assert "9 attention heads" in planned.stdout
    assert "1, 3 or 9 GPUs" in planned.stdout
    assert (
        vexport("quantize", source, tmp_path / "no", "--scheme", "NVFP4A16", "--tp", "2").code == 2
    )
    assert not (tmp_path / "no").exists()
    out = tmp_path / "out"
    assert (
        vexport("quantize", source, out, "--scheme", "NVFP4A16", "--tp", "1,3,9", "--quiet").code
        == 0
    )
    checked = vexport("check", out, "--tp", "2")
    assert checked.code == 1
    assert "9 attention heads" in checked.stdout
    assert "1, 3 or 9 GPUs" in checked.stdout
    assert vexport("check", out, "--tp", "3,9").code == 0


def test_kept_layers_must_fit_ranks(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "model", intermediate_size=321, num_hidden_layers=1)
    ran = vexport("plan", source, "--scheme", "FP8_DYNAMIC", "--ignore", "re:.*mlp.*", "--tp", "2")
    assert ran.code == 2
    assert_contains(ran.stdout, "321", "2 ranks", "another number of GPUs")
    ran = vexport(
        "plan", source, "--scheme", "FP8_DYNAMIC", "--tp", "2", "--on-unsupported-shape", "keep"
    )
    assert ran.code == 2
    assert_contains(ran.stdout, "321", "2 ranks")


def refused(planned: str) -> str:
    """Return the refusal of a plan, whose lines are wrapped."""
    found = re.search(r"^refused .*(?:\n .*)*", planned, re.MULTILINE)
    assert found is not None
    return found[0]


def test_unsupported_shape_names_remedies(tmp_path: Path) -> None:
    """48 columns are not a multiple of any group size that vLLM runs."""
    source = save_llama(tmp_path / "model", intermediate_size=48, num_hidden_layers=1)
    line = refused(vexport("plan", source, "--scheme", "W4A16").stdout)
    assert_contains(line, "another scheme", "`vexport plan MODEL`")
    assert_contains(line, "--on-unsupported-shape keep", "--ignore down_proj")
    assert "rule" not in line
    in_yaml = scenario(tmp_path, source, rules="[{match: Linear, scheme: W4A16}]")
    line = refused(vexport("plan", in_yaml).stdout)
    assert_contains(line, "on_unsupported_shape: keep", "rule with scheme: keep", "down_proj")
    assert "--" not in line


def test_shadowed_rule_is_named(llama: Path, tmp_path: Path) -> None:
    rules = "[{match: Linear, scheme: W8A8}, {match: down_proj, scheme: keep}]"
    ran = vexport("plan", scenario(tmp_path, llama, rules=rules))
    assert ran.code == 0, ran.stderr
    assert_contains(ran.stdout, "rule 2 (down_proj)", "3 layers", "earlier rule")
    in_order = "[{match: down_proj, scheme: keep}, {match: Linear, scheme: W8A8}]"
    assert "earlier rule" not in vexport("plan", scenario(tmp_path, llama, rules=in_order)).stdout


def test_missing_calibration_data_is_refused_early(llama: Path, tmp_path: Path) -> None:
    """Missing data is an error even if the scheme does not need it."""
    path = scenario(tmp_path, llama, "calibration: {data: nothing.jsonl}\n")
    data_free = (
        "quantize",
        llama,
        tmp_path / "run",
        *DATA_FREE,
        "--calibration",
        tmp_path / "nothing.jsonl",
    )
    for command in (("run", path, "--run-dir", tmp_path / "run", "--quiet"), data_free):
        ran = vexport(*command)
        assert ran.code == 2
        assert ran.errors[0].endswith("[calibration/no-data]")
        assert not (tmp_path / "run").exists()
