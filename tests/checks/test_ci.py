"""`vexport check` in CI: JUnit by family, at most ten annotations, a step summary within its limit."""

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.command import vexport
from tests.engine.fixtures import write_tokenizer
from tests.mutations.edits import all_of, drop, element, put, spoiled
from vexport.checks import CHECKS

DOWN = "model.layers.2.mlp.down_proj"


def test_junit_has_a_case_for_every_family(good: Callable[[str], Path], tmp_path: Path) -> None:
    broken = spoiled(good("W8A8"), tmp_path / "broken", put(f"{DOWN}.weight_scale", element(float("nan"))))
    ran = vexport("check", good("W8A8"), broken, "--format", "junit")
    assert ran.code == 1
    suites = ElementTree.fromstring(ran.stdout)
    assert [suite.get("name") for suite in suites] == [str(good("W8A8")), str(broken)]
    assert [[case.get("name") for case in suite] for suite in suites] == [["files", *CHECKS]] * 2
    failed = [
        (suite.get("name"), case.get("name"))
        for suite in suites
        for case in suite
        if case.find("failure") is not None
    ]
    assert failed == [(str(broken), "values")]
    assert (suites.get("tests"), suites.get("failures")) == (str(2 * (1 + len(CHECKS))), "1")


def test_annotations_and_the_summary_are_folded(
    good: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = [
        f"model.layers.{layer}.{part}.weight_scale"
        for layer in range(3)
        for part in ("mlp.down_proj", "mlp.up_proj", "mlp.gate_proj", "self_attn.o_proj")
    ]
    broken = spoiled(good("W8A8"), tmp_path / "broken", all_of(drop(*scales), write_tokenizer))
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    ran = vexport("check", broken, "--format", "github")
    assert ran.code == 1
    (line,) = ran.stdout.splitlines()
    assert line.startswith("::error ")
    assert "(11 more like it)" in line
    text = summary.read_text()
    assert text.startswith("before\n")
    assert r"model.layers.0-2.\{" in text
    assert "11 more like it" in text
    assert vexport("check", good("W8A8"), "--format", "text").code == 0
    assert summary.read_text() == text


def test_one_that_is_no_checkpoint_hides_no_other(good: Callable[[str], Path], tmp_path: Path) -> None:
    ran = vexport("check", tmp_path / "none", good("FP8"), "--format", "json", "--quiet")
    none, sound = json.loads(ran.stdout)
    assert (ran.code, none["ok"], sound["ok"]) == (2, False, True)
    assert [finding["check"] for finding in none["findings"]] == ["files"]
    assert [line for line in ran.errors if str(tmp_path / "none") in line] == ran.errors != []


def test_annotations_stand_at_the_file_and_line(
    good: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repository" / "models" / "broken"
    folder.parent.mkdir(parents=True)
    spoil = put(f"{DOWN}.weight_scale", element(float("nan")))
    broken = spoiled(good("W8A8"), folder, all_of(spoil, write_tokenizer))
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 9
    (broken / "config.json").write_text(json.dumps(config, indent=2))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "repository"))
    wrong, *_ = vexport("check", broken, "--format", "github").stdout.splitlines()
    lines = (broken / "config.json").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if '"group_0"' in line)
    assert wrong.startswith(f"::error file=models/broken/config.json,line={number},title=")
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    (broken / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path / "repository")
    monkeypatch.delenv("GITHUB_WORKSPACE")
    (nan,) = vexport("check", "models/broken", "--format", "github").stdout.splitlines()
    assert nan.startswith("::error file=models/broken/model.safetensors,line=1,title=")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "elsewhere"))
    (outside,) = vexport("check", "models/broken", "--format", "github").stdout.splitlines()
    assert outside.startswith("::error title=")
