"""Output of `plan` and `quantize`, and the recipe in a checkpoint."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.architectures.families import save_family
from tests.architectures.test_families import plan_of
from tests.command import ROOT, vexport
from tests.texts import assert_contains
from vexport.checkpoint.index import read_index
from vexport.formats.schemes import scheme_names
from vexport.quantize.result import NVIDIA_DEVICE, is_emulated
from vexport.scenario import read_scenario
from vexport.scenario.shipped import PACKAGE, demo_files


def valid(name: str, text: str) -> dict[str, Any]:
    """Return the JSON of a command, validated with the committed schema."""
    schema = json.loads(files("vexport.reports").joinpath(f"{name}.schema.json").read_text())
    answer: dict[str, Any] = json.loads(text)
    jsonschema.validate(answer, schema)
    return answer


def test_plan_without_scheme_compares_all(narrow: Path) -> None:
    ran = vexport("plan", narrow, "--format", "json")
    assert ran.code == 0, ran.stderr
    table = valid("plan-schemes", ran.stdout)
    assert isinstance(table["schemes"], list)
    rows = {row["scheme"]: row for row in table["schemes"]}
    assert [name for name in rows if "_G" not in name] == list(scheme_names())
    assert rows["W4A16_G64"]["fits"]
    assert rows["NVFP4"]["fits"]
    assert rows["NVFP4"]["needs_calibration"]
    assert not rows["NVFP4A16"]["needs_calibration"]
    assert not rows["W4A16"]["fits"]
    assert_contains(rows["W4A16"]["reason"], "in_features 192", "group size 128")
    assert 0 < rows["W4A16"]["layers"] < table["layers"] == rows["NVFP4"]["layers"]
    for scheme, row in rows.items():
        single = vexport(
            "plan", narrow, "--scheme", scheme, "--on-unsupported-shape", "keep", "--format", "json"
        )
        assert json.loads(single.stdout)["output_bytes"] == row["output_bytes"], scheme
        assert (vexport("plan", narrow, "--scheme", scheme).code == 0) == row["fits"], scheme


def test_scheme_table_with_ignored_layers(narrow: Path) -> None:
    ran = vexport("plan", narrow, "--ignore", "down_proj", "--all")
    assert ran.code == 0
    lines = {line.split()[0]: line for line in ran.stdout.splitlines()[2:] if line}
    assert "SM 89 (Ada)" in lines["FP8_DYNAMIC"]
    assert lines["FP8_DYNAMIC"].endswith("yes")
    assert "no: " in lines["W4A16"]
    assert f"vexport plan {narrow} --scheme" in ran.stdout
    ignore = ("--ignore", "re:.*[qkv]_proj")
    ran = vexport("plan", narrow, "--scheme", "FP8", *ignore, "--format", "json")
    kept = valid("plan", ran.stdout)["kept_linears"]
    assert isinstance(kept, list)
    assert len(kept) == 7


def test_mistyped_layer_names_nearest(narrow: Path) -> None:
    ran = vexport("plan", narrow, "--scheme", "FP8", "--ignore", "down_prj")
    assert ran.code == 2
    assert_contains(ran.errors[0], "'down_prj'", "did you mean down_proj?", "rules/no-layer")


def test_plan_shows_kept_layers_and_next_command(narrow: Path) -> None:
    ran = vexport(
        "plan", narrow, "--scheme", "w4a16", "--on-unsupported-shape", "keep", "--tp", "1,2"
    )
    assert ran.code == 0, ran.stderr
    for words in ("W4A16", "in 16 bit", "lm_head", "down_proj", "SM 75 (Turing)"):
        assert words in ran.stdout
    assert ran.stdout.splitlines()[-1].split(maxsplit=1) == [
        "next",
        f"vexport quantize {narrow} model-W4A16 --scheme w4a16 --on-unsupported-shape keep "
        f"--tp 1,2",
    ]
    refused = vexport("plan", narrow, "--scheme", "W4A16")
    assert "vexport quantize" not in refused.stdout


def test_plan_of_scenario_names_run(narrow: Path, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    rules = f"name: a\nsource: {narrow}\nrules: [{{match: Linear, scheme: FP8}}]\n"
    path.write_text(rules + "calibration: {data: x.jsonl, samples: 7, seq_len: 9}\n")
    ran = vexport("plan", path)
    assert_contains(ran.stdout, f"calibration {tmp_path}/x.jsonl, at most 7 samples of 9 tokens")
    assert f"note: {tmp_path}/x.jsonl: no such file" in ran.stderr
    assert ran.stdout.splitlines()[-1].split(maxsplit=1) == ["next", f"vexport run {path}"]


def test_quantize_shows_and_warns_of_few_layers(narrow: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = vexport(
        "quantize", narrow, out, "--scheme", "W4A16", "--on-unsupported-shape", "keep", "--quiet"
    )
    assert ran.code == 0, ran.stderr
    assert_contains(ran.stdout, f"{out}: W4A16: 4 of 15 linear layers")
    assert f"vexport check {out}" in ran.stdout
    assert f"vllm serve {out}\n" in ran.stdout
    warnings = [line for line in ran.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert_contains(warnings[0], "in_features 192", "group size 128")
    assert_contains(warnings[1], "only 27%", "`vexport plan SOURCE`")
    out = tmp_path / "W8A8"
    ran = vexport("quantize", narrow, out, "--scheme", "W8A8", "--format", "json")
    answer = valid("quantize", ran.stdout)
    assert answer["checkpoint"] == str(out)
    assert answer["schemes"] == ["W8A8"]
    assert (answer["layers"], answer["of_layers"]) == (14, 15)
    assert answer["output_bytes"] == read_index(out).num_bytes
    assert answer["warnings"] == []


def test_recipe_reproduces_checkpoint(llama: Path, tmp_path: Path, calibration: Path) -> None:
    options = ("--calibration", calibration, "--samples", 3, "--seq-len", 16, "--quiet")
    choice: tuple[str, ...] = ("--scheme", "NVFP4", "--rounding", "nearest", "--ignore", "o_proj")
    choice += ("--kv-cache", "fp8", "--tp", "1,2")
    first, again = tmp_path / "first", tmp_path / "again"
    for out in (first, again):
        assert vexport("quantize", llama, out, *choice, *options).code == 0
    assert (first / "vexport.json").read_bytes() == (again / "vexport.json").read_bytes()
    recipe = json.loads((first / "vexport.json").read_text())
    assert recipe["calibration"]["rows"] == "1-3"
    assert len(recipe["calibration"]["token_ids_sha256"]) == 64
    planned = vexport("plan", first / "vexport.json", "--format", "json")
    assert planned.code == 0, planned.stderr
    direct = json.loads(vexport("plan", llama, *choice, "--format", "json").stdout)
    from_recipe = json.loads(planned.stdout)
    for key in ("groups", "ignore", "attention", "output_bytes"):
        assert from_recipe[key] == direct[key]
    scenario = recipe["scenario"]
    assert scenario["calibration"]["samples"] == 3
    assert (first / scenario["source"]).resolve() == llama.resolve()
    assert (first / scenario["calibration"]["data"]).resolve() == calibration.resolve()


SOURCE = PACKAGE.parent / "scenarios"


def test_demo_is_written_and_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = vexport("demo")
    assert ran.code == 0
    assert "next: vexport run vexport-demo/demo-nvfp4.yaml" in ran.stdout
    plan = vexport("plan", "vexport-demo/demo-nvfp4.yaml")
    assert plan.code == 0
    assert "NVFP4" in plan.stdout
    for path in demo_files(SOURCE):
        assert (Path("vexport-demo") / path).read_bytes() == (SOURCE / path).read_bytes()


def test_demo_scenarios_have_their_files(tmp_path: Path) -> None:
    """All files that a scenario names are below the folder of the demo."""
    assert vexport("demo", tmp_path / "demo").code == 0
    written = sorted((tmp_path / "demo").glob("*.yaml"))
    assert [path.name for path in written] == sorted(
        path.name for path in SOURCE.glob("demo-*.yaml")
    )
    for path in written:
        scenario = read_scenario(path)
        assert scenario.evaluate is not None
        named = [
            str(scenario.source),
            *scenario.evaluate.tasks,
            str(scenario.evaluate.baseline or scenario.source),
        ]
        named += [str(scenario.calibration.data)] if scenario.calibration else []
        for name in named:
            assert Path(name).is_relative_to(tmp_path / "demo")
            assert Path(name).exists()


def test_demo_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    for options in ((), ("--overwrite",)):
        ran = vexport("demo", target, *options)
        assert ran.code == 2
        assert [path.name for path in target.iterdir()] == ["mine.txt"]
    assert vexport("demo", tmp_path / "other").code == 0
    (tmp_path / "other" / "demo" / "mine.txt").write_text("mine")
    ran = vexport("demo", tmp_path / "other", "--overwrite")
    assert (ran.code, "mine.txt" in ran.stderr) == (2, True)
    (tmp_path / "other" / "demo" / "mine.txt").unlink()
    (tmp_path / "other" / "demo-nvfp4.yaml").write_text("changed")
    assert vexport("demo", tmp_path / "other").code == 2
    assert vexport("demo", tmp_path / "other", "--overwrite").code == 0
    assert (tmp_path / "other" / "demo-nvfp4.yaml").read_bytes() == (
        SOURCE / "demo-nvfp4.yaml"
    ).read_bytes()


def test_plan_recommends_schemes_for_gpu(narrow: Path) -> None:
    """Fitting schemes that the GPU runs in full come first.

    An unfitting scheme is replaced by one with another group size.
    """
    ran = vexport("plan", narrow, "--gpu", "l40s", "--format", "json")
    assert ran.code == 0, ran.stderr
    table = valid("plan-schemes", ran.stdout)
    gpu = table["gpu"]
    assert isinstance(gpu, dict)
    assert (gpu["name"], gpu["sm"]) == ("L40S", 89)
    assert {each["bits"]: each["scheme"] for each in gpu["recommended"]} == {
        8: "FP8_DYNAMIC",
        4: "W4A16_G64",
    }
    assert isinstance(table["schemes"], list)
    native = [row["fits"] and row["on_gpu"]["native"] for row in table["schemes"]]
    assert native == sorted(native, reverse=True)
    rows = {row["scheme"]: row["on_gpu"] for row in table["schemes"]}
    assert rows["NVFP4"] == {"input_bits": 16, "native": False}
    text = vexport("plan", narrow, "--gpu", "L40S").stdout
    shown = [line.split()[0] for line in text.splitlines() if line]
    assert "W4A16" not in shown
    assert "W4AFP8" not in shown
    assert "W4AFP8" in vexport("plan", narrow, "--gpu", "L40S", "--all").stdout


@pytest.mark.parametrize(
    ("sm", "eight", "four"), [("80", "W8A8", "W4A16"), ("100", "FP8_DYNAMIC", "NVFP4")]
)
def test_recommendation_follows_capability(sm: str, eight: str, four: str, llama: Path) -> None:
    ran = vexport("plan", llama, "--sm", sm, "--format", "json")
    gpu = json.loads(ran.stdout)["gpu"]
    assert [each["scheme"].partition("_G")[0] for each in gpu["recommended"]] == [eight, four]


def test_plan_for_one_gpu(llama: Path) -> None:
    ran = vexport("plan", llama, "--gpu", "H100,L4")
    assert ran.code == 2
    assert_contains(ran.errors[0], "usage/one-gpu", "2 compute capabilities")
    ran = vexport("plan", llama, "--scheme", "NVFP4", "--gpu", "H100")
    assert ran.code == 0
    assert "on SM 90 (Hopper): NVFP4 inputs in 16 bits" in ran.stdout


def test_plan_json_has_known_faults(llama: Path) -> None:
    call = ("plan", llama, "--scheme", "MXFP4A16", "--format", "json")
    (fault,) = valid("plan", vexport(*call, "--sm", "100").stdout)["faults"]
    assert fault["rule"] == "faults/fewer-bits"
    for elsewhere in (("--sm", "80"), ()):
        assert valid("plan", vexport(*call, *elsewhere).stdout)["faults"] == []


@pytest.mark.parametrize(
    ("scheme", "instructions"),
    [("NVFP4A16", None), ("W4A16", "avx512f"), ("FP8_BLOCK", "amx_tile")],
)
def test_next_command_names_needed_gpu(
    llama: Path, tmp_path: Path, scheme: str, instructions: str | None
) -> None:
    """vLLM's CPU build runs INT4 and block scales only on CPUs with some instructions."""
    ran = vexport("quantize", llama, tmp_path / "a", "--scheme", scheme, "--quiet")
    runs_on_cpu = instructions in Path("/proc/cpuinfo").read_text().split()
    runs = NVIDIA_DEVICE.exists() or runs_on_cpu
    needs = "" if runs else "  # on a machine with a GPU"
    assert f"vllm serve {tmp_path / 'a'}{needs}\n" in ran.stdout


@pytest.mark.parametrize(
    ("scheme", "flags", "emulated"),
    [
        ("W4A16", {"avx2"}, True),
        ("W4A16", {"avx2", "avx512f"}, False),
        ("W4A8", {"avx2"}, True),
        ("W8A16", {"avx512f", "amx_tile"}, True),
        ("W8A8", {"avx2"}, False),
        ("FP8_BLOCK", {"avx512f"}, True),
        ("FP8_BLOCK", {"avx512f", "amx_tile"}, False),
    ],
)
def test_emulation_depends_on_instructions(
    llama: Path, scheme: str, flags: set[str], emulated: bool
) -> None:
    plan = plan_of(llama, scheme)
    assert all(is_emulated(group, flags) == emulated for group in plan.groups)


@pytest.mark.parametrize("scheme", ["W8A8", "W4A16_G64", "FP8_BLOCK"])
def test_experts_need_amx_on_a_cpu(tmp_path: Path, scheme: str) -> None:
    plan = plan_of(save_family("mixtral", tmp_path), scheme)
    experts = [group for group in plan.groups if ".experts." in group.name]
    assert experts
    assert all(is_emulated(group, {"avx512f"}) for group in experts)
    assert not any(is_emulated(group, {"avx512f", "amx_tile"}) for group in experts)


def test_recommendation_and_table_agree(llama: Path) -> None:
    """A recommended scheme runs natively, also if it stores no inputs."""
    printed = vexport("plan", llama, "--gpu", "H100").stdout
    assert re.search(r"^for 4 bits +W4A16: native, with 16-bit inputs", printed, re.MULTILINE)
    assert re.search(r"^W4A16 .* native  ", printed, re.MULTILINE)
    assert re.search(r"^NVFP4 .* inputs in 16 bits  ", printed, re.MULTILINE)
    assert re.search(r"^native .*W4A16: 16", printed, re.MULTILINE)


def test_one_hidden_scheme_is_singular(llama: Path) -> None:
    printed = vexport("plan", llama, "--gpu", "L40S").stdout
    assert re.search(r"^not shown +1 scheme that .* --all$", printed, re.MULTILINE)


def test_both_recommendations_are_next(llama: Path) -> None:
    ran = vexport("plan", llama, "--gpu", "H100")
    calls = [line.split()[-1] for line in ran.stdout.splitlines() if line.startswith("next ")]
    assert calls == ["FP8_DYNAMIC", "W4A16"]


def test_need_of_text_has_one_wording(llama: Path) -> None:
    rows = vexport("plan", llama, "--gpu", "H100").stdout.splitlines()
    listed = vexport("list", "schemes").stdout.splitlines()
    uses = (("W4A16", "helps"), ("W8A8", "helps"), ("FP8_DYNAMIC", "not needed"), ("FP8", "needed"))
    for scheme, use in uses:
        of_scheme = [row for row in rows if row.startswith(f"{scheme} ")]
        of_scheme += [row for row in listed if row.startswith(f"{scheme} ")]
        assert len(of_scheme) == 2
        assert all(f"  {use}  " in row for row in of_scheme), of_scheme
        plan = vexport("plan", llama, "--scheme", scheme).stdout
        assert f"calibration  {use}" in plan


@pytest.mark.parametrize("document", ["README.md", "vexport/docs/schemes.md"])
@pytest.mark.parametrize("gpu", ["A100", "L40S", "H100", "B200"])
def test_documents_recommend_as_plan(document: str, gpu: str, llama: Path) -> None:
    ran = vexport("plan", llama, "--gpu", gpu, "--format", "json")
    found = json.loads(ran.stdout)["gpu"]
    rows = (ROOT / document).read_text(encoding="utf-8").splitlines()
    (row,) = (row for row in rows if re.match(rf"\| .*SM {found['sm']}\b.*\| `", row))
    cells = row.split("|")[2:4]
    for cell, choice in zip(cells, found["recommended"], strict=True):
        assert cell.strip().startswith(f"`{choice['scheme']}`")
        assert cell.count("`") == 2
