"""`check --ignore-rule`: a silenced rule is listed apart, and never hides a refusal by vLLM."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.command import vexport
from tests.models import Good
from tests.mutations.edits import GROUP, config, spoiled
from vexport.api import check
from vexport.errors import InputError
from vexport.rules.dry_load import REFUSED

ZERO_POINTS = "versions/zero-points"


@pytest.fixture
def asymmetric(good: Good, tmp_path: Path) -> Path:
    """Return a checkpoint with zero points that vLLM 0.30 does not support."""
    return spoiled(
        good("W4A8"), tmp_path / "asymmetric", config((*GROUP, "weights"), symmetric=False)
    )


def test_ignored_findings_are_named_in_the_first_line(good: Good) -> None:
    options = (good("FP8"), "--vllm", "0.29", "--static")
    assert "another version" in vexport("check", *options).stdout
    ran = vexport("check", *options, "--ignore-rule", "versions/unknown-version")
    assert ran.code == 0
    assert ran.stdout.startswith("PASS, 1 warning ignored (versions/unknown-version)")
    assert "another version" not in ran.stdout


def test_ignored_errors_do_not_fail(asymmetric: Path) -> None:
    options = (asymmetric, "--vllm", "0.30", "--static", "--format", "json")
    (before,) = json.loads(vexport("check", *options).stdout)
    (after,) = json.loads(vexport("check", *options, "--ignore-rule", ZERO_POINTS).stdout)
    (ignored,) = after["ignored"]
    assert ignored["severity"] == "error"
    assert ignored in before["findings"]
    assert [each for each in before["findings"] if each != ignored] == after["findings"]
    assert after["ok"] is all(each["severity"] != "error" for each in after["findings"])


def test_ci_shows_ignored_rules(asymmetric: Path) -> None:
    options = (asymmetric, "--vllm", "0.30", "--static", "--ignore-rule", ZERO_POINTS)
    ran = vexport("check", *options, "--format", "junit")
    cases = {
        each.attrib["name"]: each
        for each in ElementTree.fromstring(ran.stdout).iter("testcase")
    }  # fmt: skip
    assert cases[ZERO_POINTS].find("skipped") is not None
    ran = vexport("check", *options, "--format", "github")
    assert f"{ZERO_POINTS} ignored" in ran.stdout


def test_annotations_carry_the_rule(asymmetric: Path) -> None:
    ran = vexport("check", asymmetric, "--vllm", "0.30", "--static", "--format", "github")
    assert f"title=check: {ZERO_POINTS}".replace(":", "%3A") in ran.stdout


@pytest.mark.parametrize(
    ("id_", "rule", "hint"),
    [
        ("versions/zero-point", "usage/unknown-rule", ZERO_POINTS),
        ("usage/unknown-rule", "usage/rule-of-no-check", ""),
    ],
)
def test_other_ids_are_refused(good: Good, id_: str, rule: str, hint: str) -> None:
    ran = vexport("check", good("FP8"), "--static", "--ignore-rule", id_)
    assert (ran.code, ran.stdout) == (2, "")
    assert ran.stderr.rstrip().endswith(f"[{rule}]")
    assert hint in ran.stderr


def test_a_file_of_defaults_cannot_silence_rules(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (f'[check]\nignore-rule = ["{ZERO_POINTS}"]', 'ignore_rules = ["a"]'):
        (tmp_path / "vexport.toml").write_text(text)
        assert vexport("check", good("FP8"), "--static").code == 2


def test_python_interface_ignores_rules(asymmetric: Path) -> None:
    report = check(asymmetric, vllm="0.30", static=True, ignore_rules=[ZERO_POINTS])
    assert [finding.rule for finding in report.ignored] == [ZERO_POINTS]
    with pytest.raises(InputError) as caught:
        check(asymmetric, static=True, ignore_rules=["x/y"])
    assert caught.value.rule == "usage/unknown-rule"


def test_explain_shows_a_rule() -> None:
    ran = vexport("explain", ZERO_POINTS)
    assert ran.code == 0
    for text in (ZERO_POINTS, "**severity**: error", "vLLM refuses", "ZERO_POINTS", "remedy"):
        assert text in ran.stdout


@pytest.mark.vllm
def test_a_refusal_by_the_loaders_stays(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If vLLM refuses what an ignored rule found, the refusal is an error by itself."""
    monkeypatch.delenv("VEXPORT_NO_VERIFY")
    spoil = config((*GROUP, "weights"), num_bits=5)
    refused = spoiled(good("W4A16"), tmp_path / "refused", spoil)
    call = ("check", refused, "--format", "json")
    (report,) = json.loads(vexport(*call).stdout)
    rules = {each["rule"] for each in report["findings"] if each["severity"] == "error"}
    assert REFUSED.id in rules
    words = [word for rule in rules - {REFUSED.id} for word in ("--ignore-rule", rule)]
    ran = vexport(*call, *words)
    (report,) = json.loads(ran.stdout)
    assert (ran.code, report["ok"], len(report["ignored"])) == (1, False, 1)
    assert vexport(*call, "--ignore-rule", REFUSED.id).code == 2


@pytest.mark.vllm
def test_known_faults_of_the_loaders_can_be_ignored(
    good: Good, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VEXPORT_NO_VERIFY")
    fault = "faults/fewer-bits"
    call = ("check", good("MXFP4A16"), "--sm", 90, "--format", "json", "--ignore-rule", fault)
    (report,) = json.loads(vexport(*call).stdout)
    assert report["judged_by"] == "loaders"
    assert [each["rule"] for each in report["ignored"]] == [fault]
    assert fault not in {each["rule"] for each in report["findings"]}
