"""One bad checkpoint, or a mistake of ours on it, never takes the answers on the others."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from xml.etree import ElementTree

import pytest

from tests.command import vexport
from tests.models import Good
from vexport.checks import CHECKS, Check
from vexport.checks.vllm.view import CheckpointView
from vexport.records import Finding


def _broken(view: CheckpointView) -> Iterator[Finding]:
    if view.index.root.name == "bad":
        raise KeyError("a mistake of ours")
    yield from ()


@pytest.fixture
def three(good: Good, tmp_path: Path) -> list[Path]:
    """Two sound checkpoints and between them one on which a check ends with an exception."""
    copytree(good("W4A16"), tmp_path / "bad")
    (tmp_path / "bad" / "tokenizer_config.json").write_text("[]")
    return [good("W4A16"), tmp_path / "bad", good("FP8_BLOCK")]


def test_a_mistake_in_one_check_leaves_all_other_answers(
    three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Miscopy injection: what is left of a family that raises, in each form of the answer."""
    monkeypatch.setattr(
        "vexport.checks.CHECKS", {**CHECKS, "values": Check(description="values", run=_broken)}
    )
    ran = vexport("check", *three, "--format", "json")
    assert ran.code == 4
    assert [line for line in ran.errors if "internal error in the check values" in line] == ran.errors
    reports = json.loads(ran.stdout)
    assert [report["ok"] for report in reports] == [True, False, True]
    findings = {finding["check"]: finding for finding in reports[1]["findings"]}
    assert set(findings) == {"internal", "tokenizer"}
    assert "KeyError: 'a mistake of ours'" in findings["internal"]["got"]
    junit = ElementTree.fromstring(vexport("check", *three, "--format", "junit").stdout)
    assert [suite.get("failures") for suite in junit] == ["0", "2", "0"]


def test_a_folder_that_cannot_be_read_at_all_leaves_the_others(three: list[Path]) -> None:
    ran = vexport("check", three[0], three[1] / ("x" * 300), three[2], "--format", "json")
    assert ran.code == 2
    assert [report["ok"] for report in json.loads(ran.stdout)] == [True, False, True]
