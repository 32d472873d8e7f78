"""`check` asks vLLM's own loaders too, and says what neither they nor its rules have judged."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import copy
from xml.etree import ElementTree

import pytest

from tests.command import ROOT, vexport
from tests.models import Good
from tests.mutations.edits import QUANTIZATION, WHOLE, config, spoiled
from vexport.checks import NAMES, NUMBERS
from vexport.checks.vllm.view import Target
from vexport.engine.gate import DRY_LOAD, with_load
from vexport.files import write_text
from vexport.records import CellStatus, CheckReport, DryLoadReport, Finding, MatrixCell, NotJudged

UNKNOWN = NotJudged(what=NAMES, why="the layout of a class is not known")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is asked, as where nobody has switched it off."""
    monkeypatch.delenv("VEXPORT_NO_VERIFY")


@pytest.mark.vllm
@pytest.mark.usefixtures("asked")
def test_vllm_judges_while_the_files_are_read(good: Good, tmp_path: Path) -> None:
    """A sound checkpoint, one that transformers alone can judge, and one whose package is missing here."""
    change = config(WHOLE, quantization_config={"quant_method": "torchao"})
    other = spoiled(good("W8A8"), tmp_path / "torchao", change)
    refused = spoiled(good("W4A16"), tmp_path / "refused", config(QUANTIZATION))
    copy(ROOT / "scenarios" / "demo" / "model" / "tokenizer.json", refused)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"a": {}}}
    write_text(refused / "tokenizer_config.json", json.dumps(settings))
    answer = tmp_path / "answer.json"
    ran = vexport("check", good("W4A16"), refused, other, "-o", answer, "--strict")
    sound, wrong, unknown = json.loads(answer.read_text())
    assert (sound["ok"], sound["not_judged"]) == (True, [])
    refusals = [each["check"] for each in wrong["findings"] if each["severity"] == "error"]
    assert refusals == ["dry-load"]
    assert unknown["ok"]
    assert {each["what"] for each in unknown["not_judged"]} == {NAMES, NUMBERS, DRY_LOAD}
    assert ran.code == 1
    assert "dry load: done" in ran.stderr


@pytest.mark.usefixtures("asked")
def test_an_interpreter_without_vllm_leaves_a_line(good: Good, tmp_path: Path) -> None:
    """No failure, unless all has to be judged; each form of the answer has it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    command = ("check", good("W8A8"), "--vllm-python", python)
    ran = vexport(*command)
    assert ran.code == 0
    assert f"not judged: {DRY_LOAD}: " in ran.stdout
    strict = vexport(*command, "--strict", "--format", "junit")
    assert (strict.code, len(strict.errors)) == (3, 1)
    cases = ElementTree.fromstring(strict.stdout).iter("testcase")
    assert [case.get("name") for case in cases if case.find("skipped") is not None] == [DRY_LOAD]
    notice = vexport(*command, "--format", "github").stdout.splitlines()[-1]
    assert notice.startswith("::notice title=check%3A not judged::")
    assert vexport(*command, "--static", "--strict").code == 0


def test_neither_reading_nor_asking_imports_torch(good: Good) -> None:
    code = "import sys; import vexport.api, vexport.engine.gate; vexport.api.check(sys.argv[1], static=True);"
    code += "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", code, good("W8A8")], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"


def finding(check: str) -> Finding:
    return Finding(check=check, severity="error", where="a.b", expected="", got="", fix="")


def loaded(*findings: Finding, vllm: str = "0.32.1", status: CellStatus = "loads") -> DryLoadReport:
    cell = MatrixCell(tp=1, sm=90, status=status, reason="" if status == "loads" else "why")
    return DryLoadReport(
        checkpoint="a", ok=not findings, findings=findings, vllm=vllm, cells=(cell,), rows=(), blind_spots=()
    )


@pytest.mark.parametrize(
    ("found", "load", "ok", "severities", "left"),
    [
        # Names and shapes are the loaders' to judge, numbers are not.
        ("completeness", loaded(), True, ["warning"], []),
        ("values", loaded(), False, ["error"], []),
        # A refusal stands next to what the check has found.
        ("values", loaded(finding("dry-load"), status="faulty"), False, ["error", "error"], [NAMES]),
        # What cannot be told, on this or for another vLLM, leaves the check's own answer.
        ("completeness", loaded(status="not shown"), False, ["error"], [NAMES, DRY_LOAD]),
        ("completeness", loaded(vllm="0.3.2"), False, ["error"], [NAMES, DRY_LOAD]),
    ],
)
def test_where_both_disagree(
    found: str, load: DryLoadReport, ok: bool, severities: list[str], left: list[str]
) -> None:
    report = CheckReport(checkpoint="a", ok=False, findings=(finding(found),), not_judged=(UNKNOWN,))
    joined = with_load(report, load, Target(vllm=(0, 32)), "any")
    assert (joined.ok, [each.severity for each in joined.findings]) == (ok, severities)
    assert [each.what for each in joined.not_judged] == left
