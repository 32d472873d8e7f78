"""`vexport check` in CI: JUnit by family, at most ten annotations, a step summary within its limit."""

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.command import vexport
from tests.mutations.edits import drop, element, put, spoiled
from vexport.checks import CHECKS
from vexport.reports import summarize_checks
from vexport.types import CheckReport, Finding

DOWN = "model.layers.2.mlp.down_proj"
SUMMARY_BYTES = 1 << 20


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


def test_annotations_are_ten_and_the_summary_has_more(
    good: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = [
        f"model.layers.{layer}.{part}.weight_scale"
        for layer in range(3)
        for part in ("mlp.down_proj", "mlp.up_proj", "mlp.gate_proj", "self_attn.o_proj")
    ]
    broken = spoiled(good("W8A8"), tmp_path / "broken", drop(*scales))
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    ran = vexport("check", broken, "--format", "github")
    assert ran.code == 1
    lines = ran.stdout.splitlines()
    assert sum(line.startswith("::error ") for line in lines) == 10
    assert "2 more annotations left out" in lines[-1]
    text = summary.read_text()
    assert text.startswith("before\n")
    assert all(f"layers.{layer}.mlp.down" in text for layer in range(3))
    assert vexport("check", good("W8A8"), "--format", "text").code == 0
    assert summary.read_text() == text


def test_a_summary_stays_in_its_limit() -> None:
    finding = Finding(
        check="x" * 300, severity="error", where="|" * 900, expected="&" * 900, got="@" * 900, fix="<" * 900
    )
    reports = [
        CheckReport(checkpoint=f"{number}", ok=False, findings=(finding,) * 50) for number in range(500)
    ]
    text = summarize_checks(reports)
    assert len(text.encode()) < SUMMARY_BYTES
    assert "more checkpoints with findings" in text


def test_one_that_is_no_checkpoint_hides_no_other(good: Callable[[str], Path], tmp_path: Path) -> None:
    ran = vexport("check", tmp_path / "none", good("FP8"), "--format", "json", "--quiet")
    none, sound = json.loads(ran.stdout)
    assert (ran.code, none["ok"], sound["ok"]) == (2, False, True)
    assert [finding["check"] for finding in none["findings"]] == ["files"]
    assert [line for line in ran.errors if str(tmp_path / "none") in line] == ran.errors != []
