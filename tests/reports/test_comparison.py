"""Several runs in one table: their order, their losses, and the smallest checkpoint that passes."""

import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from tests.command import vexport
from tests.reports import sample
from tests.texts import assert_contains
from vexport.errors import InputError
from vexport.files import to_json
from vexport.records import ComparedRun
from vexport.reports import render_comparison
from vexport.reports.run_record import Report
from vexport.run.comparison import compared_run, mark_smallest, outcome_of


def runs() -> list[Report]:
    """Return three runs, newest first. The newest failed at the check and is the smallest."""
    base = sample.full()
    return [
        _run(sample.unloaded(), "third", day=16, output_bytes=1_000_000),
        _run(base, "first", day=14, output_bytes=sample.made_of(base).plan.output_bytes),
        _run(base, "second", day=15, output_bytes=1_100_000),
    ]


def _run(report: Report, name: str, *, day: int, output_bytes: int) -> Report:
    plan = replace(sample.made_of(report).plan, output_bytes=output_bytes)
    call = replace(report.call, created=f"2025-03-{day}T00:00:00Z")
    return replace(sample.with_made(report, plan=plan), name=name, call=call)


def rows() -> tuple[ComparedRun, ...]:
    return mark_smallest([compared_run(report, f"runs/{report.name}") for report in runs()])


def test_smallest_that_passes_is_marked() -> None:
    assert {row.name: row.smallest for row in rows()} == {
        "third": False,
        "first": False,
        "second": True,
    }
    text = render_comparison(rows(), "text")
    assert re.search(r"\bsecond\b.*\bsmallest\b", text)
    (line,) = [line for line in text.splitlines() if line.lstrip().startswith("runs/second *")]
    assert "NVFP4" in line
    assert line.rstrip().endswith("PASS")
    failed = [row for row in rows() if row.outcome != "PASS"]
    assert "none passes" in render_comparison(mark_smallest(failed), "text")


def test_no_smallest_with_unknown_size() -> None:
    """Servers and given results have no size."""
    unknown = replace(rows()[1], name="served", num_bytes=0)
    marked = mark_smallest([*rows(), unknown])
    assert not any(row.smallest for row in marked)
    assert "3 of 4 pass" in render_comparison(marked, "text")


def test_outcome_of_several_runs() -> None:
    passed, failed, open_ = (
        replace(rows()[0], outcome=outcome) for outcome in ("PASS", "FAIL", "INCONCLUSIVE")
    )
    none = replace(passed, outcome=None)
    assert outcome_of([failed, none, passed]) == "PASS"
    assert outcome_of([failed, failed]) == "FAIL"
    assert outcome_of([failed, open_]) == outcome_of([failed, none]) == "INCONCLUSIVE"


def test_refused_scheme_shows_reason() -> None:
    refused = ComparedRun(
        name="m-W4A8", folder="runs/W4A8", schemes="W4A8", reason="576 is no multiple"
    )
    for format_ in ("text", "markdown", "html"):
        text = render_comparison(mark_smallest([*rows(), refused]), format_)
        assert "no result" in text
        assert "576 is no multiple" in " ".join(text.split())


def test_runs_without_tasks_have_no_task_columns() -> None:
    """Runs that were judged by held-out text alone."""
    of_text = [replace(row, worst=None) for row in rows()]
    text = render_comparison(of_text, "text")
    assert not re.search("worst task|change", text, re.IGNORECASE)
    assert "worst task" in render_comparison([of_text[0], *rows()[1:]], "text")


def test_json_schema_and_single_run_formats() -> None:
    schema = json.loads(files("vexport.reports").joinpath("compare.schema.json").read_text())
    found = json.loads(render_comparison(rows(), "json"))
    jsonschema.validate(found, schema)
    assert [run["smallest"] for run in found] == [False, False, True]
    assert found[1]["worst"]["task"] == "addition"
    assert found[1]["worst"]["changes"]["flips"] == []
    with pytest.raises(InputError, match="junit"):
        render_comparison(rows(), "junit")


@pytest.mark.parametrize("format_", ["html", "markdown"])
def test_hostile_names_are_text(format_: str) -> None:
    hostile = compared_run(sample.hostile(), "runs/<script>alert(1)</script>")
    assert "<script>alert" not in render_comparison([hostile, *rows()], format_)


def test_unreadable_report_is_skipped(tmp_path: Path) -> None:
    """Its error line names the file. The output has the other reports, oldest first."""
    for run in runs():
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / "report.json").write_text(to_json(run))
    (tmp_path / "second" / "report.json").write_text('{"name": ')
    ran = vexport("report", *(tmp_path / run.name for run in runs()), "--format", "json")
    assert [run["name"] for run in json.loads(ran.stdout)] == ["first", "third"]
    assert (ran.code, len(ran.errors)) == (2, 1)
    assert f"{tmp_path / 'second' / 'report.json'}:1" in ran.errors[0]
    alone = vexport("report", tmp_path / "second", tmp_path / "none")
    assert (alone.code, alone.stdout, len(alone.errors)) == (2, "", 2)


def test_folder_of_runs_names_remedy(tmp_path: Path) -> None:
    (tmp_path / "monday").mkdir()
    ran = vexport("report", tmp_path)
    assert ran.code == 2
    assert_contains(ran.stderr, "`vexport run`")
    (tmp_path / "monday" / "report.json").write_text("{}")
    assert_contains(vexport("report", tmp_path).stderr, f"`vexport report {tmp_path}/*`")
