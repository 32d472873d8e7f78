"""Reports on the variants of a checkpoint: the table, the gates, and hostile text in every form."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from tests.command import ROOT
from tests.reports import sample
from tests.texts import assert_contains
from vexport.files import from_json, to_json
from vexport.records import ComparedVariant, GivenCheckpoint, Outcome
from vexport.reports import render, render_variants
from vexport.reports.run_record import Report
from vexport.run.comparison import outcome_of_variants, reason_of_variants

HERE = Path("runs/variants-model")
SCHEMA = json.loads((ROOT / "vexport/reports/report.schema.json").read_text())


def judged(outcome: Outcome, setting: str = "kv_cache_dtype=fp8") -> ComparedVariant:
    verdict = sample.verdict(outcome)
    return ComparedVariant(
        setting=setting,
        vllm="0.32.0",
        outcome=outcome,
        reason=verdict.reason,
        mean_kl=0.25,
        worst=verdict.worst_task,
        verdict=verdict,
    )


BASELINE = ComparedVariant(setting="default", vllm="0.32.0", outcome="BASELINE")
REFUSED = ComparedVariant(
    setting="nonsense=1", vllm="0.31.0", vllm_python="a/python", outcome="REFUSED", reason="no"
)
NO_ANSWER = replace(REFUSED, setting="b=1", outcome="NO ANSWER", reason="it crashed")


def report(*rows: ComparedVariant) -> Report:
    """A report that only compares variants."""
    return replace(
        sample.report(outcome_of_variants(rows)),
        reason=reason_of_variants(rows),
        made=None,
        given=GivenCheckpoint(name="model"),
        baseline=None,
        load=None,
        verdict=None,
        variants=rows,
    )


def test_table_in_every_form() -> None:
    found = report(BASELINE, judged("FAIL"), REFUSED, NO_ANSWER)
    assert_contains(found.reason, "refuses nonsense=1", "vLLM 0.31.0")
    for form in ("text", "markdown", "html"):
        page = render_variants(found, form, folder=HERE, page=HERE).replace("\\", "")
        for word in ("kv_cache_dtype=fp8", "-10.51", "0.25", "REFUSED", "NO ANSWER", "it crashed"):
            assert word in page, form
    rows = json.loads(render_variants(found, "json", folder=HERE, page=HERE))
    assert [row["outcome"] for row in rows] == ["BASELINE", "FAIL", "REFUSED", "NO ANSWER"]
    jsonschema.validate(json.loads(render(found, "json")), SCHEMA)


def test_gates_of_variants() -> None:
    found = report(BASELINE, judged("PASS"), REFUSED, NO_ANSWER)
    tree = ElementTree.fromstring(render(found, "junit"))
    kinds = [next(iter(case), case).tag for case in tree.iter("testcase")]
    assert kinds == ["skipped", "system-out", "failure", "failure", "failure"]
    assert "nonsense=1" in render(found, "github").splitlines()[1]


def test_variants_of_a_whole_run(tmp_path: Path) -> None:
    found = replace(sample.full(), variants=(BASELINE, judged("PASS")))
    (tmp_path / "report.json").write_text(to_json(found))
    assert from_json(Report, tmp_path / "report.json") == found
    page = render(found, "html")
    assert "Settings and versions of vLLM" in page
    assert "Flipped between" in page


@pytest.mark.parametrize(
    ("rows", "outcome", "words"),
    [
        ([judged("PASS", "a=1"), judged("PASS", "b=1")], "PASS", "both variants pass: a=1: "),
        ([judged("PASS", "a=1"), judged("FAIL", "b=1")], "FAIL", "b=1: addition loses"),
        ([judged("INCONCLUSIVE", "a=1"), REFUSED], "FAIL", "vLLM refuses nonsense=1"),
        ([judged("INCONCLUSIVE", "a=1"), NO_ANSWER], "INCONCLUSIVE", "b=1 with vLLM 0.31.0: it"),
        ([judged("INCONCLUSIVE", "a=1")], "INCONCLUSIVE", "a=1: addition is not settled"),
        ([judged("FAIL", f"{name}=1") for name in "abcde"], "FAIL", " and 2 more"),
    ],
)
def test_outcome_and_reason(rows: list[ComparedVariant], outcome: Outcome, words: str) -> None:
    assert outcome_of_variants([BASELINE, *rows]) == outcome
    assert words in reason_of_variants([BASELINE, *rows])


def test_refused_baseline() -> None:
    assert outcome_of_variants([REFUSED]) == "FAIL"
    assert "first variant" in reason_of_variants([REFUSED])


@pytest.mark.parametrize("form", ["html", "markdown", "junit"])
def test_hostile_settings_are_text(form: str) -> None:
    name = sample.HOSTILE
    hostile = replace(REFUSED, setting=name, reason=name, folder=name, vllm_python=name)
    text = render_variants(report(BASELINE, hostile), form, folder=HERE, page=HERE)
    assert "<script>" not in text
    assert "\x1b" not in text
