"""Group sizes and schemes of arguments: on the command line, in rules and in candidates."""

import json
import re
from pathlib import Path

import pytest

from tests.architectures.families import save_family
from tests.command import vexport
from tests.models import save_llama
from tests.texts import assert_contains
from vexport.formats.schemes import all_schemes, canonical_name, named_scheme, parse_canonical_name
from vexport.quantize.auto import plan_scenario
from vexport.scenario import read_scenario

SMALLER = ("--on-unsupported-shape", "smaller-group")
RULE = "name: a\nsource: {source}\nrules: [{{match: Linear, {keys}}}]\n"


def schemes_of(folder: Path, source: Path, keys: str, more: str = "") -> tuple[str, ...]:
    path = folder / "scenario.yaml"
    path.write_text(RULE.format(source=source, keys=keys) + more)
    _, plan = plan_scenario(read_scenario(path))
    assert plan.refusals == (), plan.refusals
    return plan.schemes


def test_presets_are_found_by_arguments() -> None:
    for scheme in all_schemes():
        args = parse_canonical_name(canonical_name(scheme.args))
        assert args == scheme.args
        assert args is not None
        assert named_scheme(args).name == {"INT8": "W8A8"}.get(scheme.name, scheme.name)


def test_refusal_names_fitting_group_sizes(narrow: Path) -> None:
    refused = vexport("plan", narrow, "--scheme", "W4A16")
    assert refused.code == 2
    assert_contains(refused.stdout, "in_features 192", "group size 128", "--group-size 64 or 32")
    for size in ("64", "32", "channel"):
        ran = vexport("plan", narrow, "--scheme", "W4A16", "--group-size", size)
        assert ran.code == 0, ran.stderr
        assert f"--group-size {size}" in ran.stdout
    odd = vexport("plan", narrow, "--scheme", "W4A16", "--group-size", "16")
    assert odd.code == 0, odd.stderr
    assert "loads from SM 75 (Turing) on)" in odd.stdout


def test_group_size_fits_each_rank(tmp_path: Path) -> None:
    """192 columns of down_proj are 96 on each of two ranks, which is 3 x 32."""
    source = save_llama(tmp_path / "model", intermediate_size=192)
    ran = vexport("plan", source, "--scheme", "W4A16", "--tp", "1,2")
    assert_contains(ran.stdout, "--group-size 32")
    taken = vexport("plan", source, "--scheme", "W4A16", "--tp", "1,2", *SMALLER)
    assert taken.code == 0
    assert_contains(taken.stdout, "groups of 32", "W4A16_G32")


def test_table_names_fitting_group_sizes(narrow: Path) -> None:
    table = vexport("plan", narrow, "--all").stdout
    assert "--group-size 64 or 32 fits" in " ".join(table.split())
    assert re.search(r"^W4A16_G64 .* yes *$", table, re.MULTILINE)
    ran = vexport("plan", narrow, "--group-size", "64", "--format", "json")
    names = [row["scheme"] for row in json.loads(ran.stdout)["schemes"] if row["fits"]]
    assert {"W4A16_G64", "W8A16_G64", "W4A16_ASYM_G64"} <= set(names)
    assert not any(name.startswith(("NVFP4", "FP8")) for name in names)


def test_layers_use_largest_fitting_group(narrow: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = vexport("quantize", narrow, out, "--scheme", "W4A16", *SMALLER, "--quiet")
    assert ran.code == 0, ran.stderr
    assert_contains(ran.stderr, "groups of 64", "W4A16_G64")
    groups = json.loads((out / "config.json").read_text())["quantization_config"][
        "config_groups"
    ].values()
    assert sorted(group["weights"]["group_size"] for group in groups) == [64, 128]
    checked = vexport("check", out, "--source", narrow, "--format", "json")
    assert checked.code == 0, checked.stdout
    recipe = vexport("plan", out / "vexport.json")
    assert recipe.code == 0, recipe.stderr


def test_routed_experts_share_group_size(tmp_path: Path) -> None:
    source = save_family("qwen3-moe", tmp_path / "model", moe_intermediate_size=64)
    ran = vexport("plan", source, "--scheme", "W4A16", *SMALLER, "--format", "json")
    assert ran.code == 0, ran.stderr
    groups = json.loads(ran.stdout)["groups"]
    experts = {group["scheme"] for group in groups if ".experts." in group["members"][0]["name"]}
    assert experts == {"W4A16_G64"}
    assert vexport("plan", source, "--scheme", "NVFP4A16", *SMALLER).code == 0


def test_shape_without_fitting_size_is_refused(tmp_path: Path) -> None:
    odd = save_llama(tmp_path / "model", intermediate_size=328)
    for scheme in ("W4A16", "NVFP4A16"):
        ran = vexport("plan", odd, "--scheme", scheme, *SMALLER)
        assert ran.code == 2
        assert "in_features 328" in ran.stdout


@pytest.mark.parametrize(
    ("keys", "scheme"),
    [
        ("scheme: W4A16, group_size: 64", "W4A16_G64"),
        ("scheme: w4a16, group_size: channel", "W4A16_CHANNEL"),
        ("scheme: W4A16, group_size: -1", "W4A16_CHANNEL"),
        (
            "weights: {num_bits: 4, strategy: group, group_size: 64, symmetric: false}",
            "W4A16_ASYM_G64",
        ),
        ("weights: {num_bits: 3, group_size: 32, symmetric: false}", "INT3_GROUP32_ASYM.A16"),
        ("weights: {num_bits: 8, type: float, strategy: channel}", "FP8_CHANNEL.A16"),
        (
            "weights: {num_bits: 8, type: float, strategy: channel}, "
            "input_activations: {num_bits: 8, type: float, strategy: token, dynamic: true}",
            "FP8_DYNAMIC",
        ),
        (
            "weights: {num_bits: 8, type: float, strategy: block, block_structure: [64, 64]}, "
            "input_activations: {num_bits: 8, type: float, strategy: group, group_size: 64, "
            "dynamic: true}",
            "FP8_BLOCK64X64.FP8_GROUP64_DYNAMIC",
        ),
    ],
)
def test_rule_with_group_size_or_arguments(
    narrow: Path, tmp_path: Path, keys: str, scheme: str
) -> None:
    for rule in (keys, f"scheme: {scheme}"):
        assert schemes_of(tmp_path, narrow, rule) == (scheme,)


def test_observer_in_weights_and_size_in_candidates(narrow: Path, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        RULE.format(
            source=narrow, keys="weights: {num_bits: 4, group_size: 32, observer: memoryless_mse}"
        )
    )
    (rule,) = read_scenario(path).rules
    assert (rule.scheme, rule.observer) == ("W4A16_G32", "memoryless_mse")
    auto = (
        "calibration: {data: x.jsonl}\n"
        "auto: {bits: 7, candidates: [{scheme: W4A16, group_size: 32}, W8A16, FP8_DYNAMIC]}\n"
    )
    path.write_text(RULE.format(source=narrow, keys="scheme: auto") + auto)
    scenario = read_scenario(path)
    assert scenario.auto is not None
    assert scenario.auto.candidates == ("W4A16_G32", "W8A16", "FP8_DYNAMIC")


def test_schemes_of_arguments_pass_check(narrow: Path, tmp_path: Path) -> None:
    for number, name in enumerate(
        (
            *(
                "INT3_GROUP32_ASYM.A16",
                "FP8_CHANNEL.A16",
                "FP8_TENSOR.FP8_TOKEN_DYNAMIC",
                "W5A16_CHANNEL",
            ),
            *("W4A16_G64", "W4A16_ASYM_G32", "W3A16_G64"),
        )
    ):
        out = tmp_path / str(number)
        ran = vexport("quantize", narrow, out, "--scheme", name.lower(), "--quiet")
        assert ran.code == 0, ran.stderr
        checked = vexport("check", out, "--source", narrow, "--format", "json")
        assert checked.code == 0, (name, checked.stdout)
