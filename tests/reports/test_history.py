"""The history of one model: order, changes, regressions, and rows that cannot be compared."""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.command import Ran, vexport
from tests.reports import sample
from vexport.api import history
from vexport.files import from_json, to_json
from vexport.records import (
    AcceptedBaseline,
    Change,
    ComparedVariant,
    GivenCheckpoint,
    History,
    HistoryRow,
    LoadReport,
    Outcome,
    VariantOutcome,
    Verdict,
)
from vexport.reports import render_history
from vexport.reports.run_record import Baseline, Report
from vexport.run.history import RunResult, history_of
from vexport.scores.readers.accepted import Accepted, AcceptedTask, describe_accepted

FIRST = "1111222233334444"
SECOND = "5555666677778888"
REAL = Path(__file__).with_name("histories")
"""Two runs of `compare --serve` on the demo model in FP8."""
STRICT = replace(sample.verdict("FAIL").tasks[1], margin=0.01)
OLD = AcceptedBaseline(digest="aaaa000011112222", accepted="2026-11-01T00:00:00+00:00")


def verdict(
    outcome: Outcome, *, day: int, vllm: str = "0.31.0", model: str = FIRST, **settings: str
) -> Verdict:
    """Return a verdict on `addition` against an accepted baseline."""
    fingerprint = {"model": model, "vllm": vllm, "dtype": "bfloat16", "limit": "640", **settings}
    judged = sample.verdict(outcome)
    return replace(
        judged,
        tasks=judged.tasks[1:],
        measured=f"2026-11-{day:02d}T08:30:00+00:00",
        fingerprint=fingerprint,
        accepted=OLD,
    )


def run(judged: Verdict | None, *, day: int = 30, checkpoint: str = "out/qwen3") -> Report:
    """Return the report of `vexport eval --against baseline.json`."""
    outcome = judged.outcome if judged is not None else "PASS"
    return replace(
        sample.report(outcome),
        name="qwen3",
        call=replace(sample.WHOLE.call, created=f"2026-11-{day:02d}T09:00:00+00:00"),
        made=None,
        baseline=Baseline(name="baseline.json"),
        load=None,
        given=GivenCheckpoint(name=checkpoint, format="pack-quantized", num_bytes=2_400_000),
        verdict=judged,
    )


def write(root: Path, **reports: Report) -> list[Path]:
    """Write each report to a run directory with its name."""
    for name, report in reports.items():
        (root / name).mkdir()
        (root / name / "report.json").write_text(to_json(report))
    return [root / name for name in reports]


def rows_of(ran: Ran) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(ran.stdout)
    return rows


def events(made: History) -> list[str]:
    return [row.event for row in made.rows]


def changes(row: HistoryRow) -> dict[str, str]:
    return {change.name: change.was for change in row.changes}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Return four runs. The second fails with another vLLM, and the last has a new checkpoint."""
    return write(
        tmp_path,
        a=run(verdict("PASS", day=5)),
        b=run(verdict("FAIL", day=12, vllm="0.32.0", dtype="float16")),
        c=run(verdict("FAIL", day=19, vllm="0.32.0")),
        d=run(verdict("PASS", day=26, vllm="0.32.0", model=SECOND), checkpoint="out/qwen3-next"),
    )


def test_first_regression_and_its_changes(folders: list[Path]) -> None:
    made = history(folders[:3][::-1])
    assert [Path(row.folder).name for row in made.rows] == ["a", "b", "c"]
    assert events(made) == ["", "first regression", ""]
    assert [changes(row) for row in made.rows] == [
        {},
        {"vLLM": "0.31.0", "dtype": "bfloat16"},
        {"dtype": "float16"},
    ]
    assert made.outcome == "FAIL"


def test_new_checkpoint_passes_again(folders: list[Path]) -> None:
    made = history(folders)
    last = made.rows[-1]
    assert last.event == "passes again"
    assert last.changes == (
        Change(name="checkpoint", was="out/qwen3"),
        Change(name="digest", was="11112222"),
    )
    assert (made.outcome, made.name) == ("PASS", "out/qwen3-next")


def test_inconclusive_run_is_no_event(tmp_path: Path) -> None:
    reports = [verdict(outcome, day=5 + number) for number, outcome in enumerate(_OUTCOMES)]
    folders = write(tmp_path, **{f"r{number}": run(each) for number, each in enumerate(reports)})
    assert events(history(folders)) == ["", "", "first regression", "", "passes again"]
    assert vexport("report", *folders[:2]).code == 3


_OUTCOMES: tuple[Outcome, ...] = ("PASS", "INCONCLUSIVE", "FAIL", "INCONCLUSIVE", "PASS")


def test_other_questions_between_comparable_runs(tmp_path: Path) -> None:
    """Each run is compared with the latest run that has the same limit."""
    results: list[tuple[Outcome, str]] = [
        *(("PASS", "640"), ("FAIL", "320")),
        *(("FAIL", "640"), ("PASS", "320")),
    ]
    reports = [
        replace(verdict(outcome, day=5 + number, limit=limit), accepted=None)
        for number, (outcome, limit) in enumerate(results)
    ]
    folders = write(tmp_path, **{f"r{number}": run(each) for number, each in enumerate(reports)})
    assert events(history(folders)) == ["", "", "first regression", "passes again"]


def test_first_run_that_fails_against_a_source(tmp_path: Path) -> None:
    """A model that never passed has not regressed."""
    failed = [replace(verdict("FAIL", day=day), accepted=None) for day in (5, 12)]
    made = history(write(tmp_path, a=run(failed[0]), b=run(failed[1])))
    assert events(made) == ["", ""]


@pytest.mark.parametrize(
    ("change", "name", "was"),
    [
        ({"accepted": AcceptedBaseline(digest="bbbb")}, "baseline", "baseline.json (aaaa0000)"),
        ({"tasks": (STRICT,)}, "margin of addition", "2 points"),
        ({"alpha": 0.01}, "alpha", "0.05"),
        ({"fingerprint": {"limit": "100"}}, "limit", "640"),
    ],
)
def test_rows_that_cannot_be_compared(
    tmp_path: Path, change: dict[str, object], name: str, was: str
) -> None:
    """A row that passed by another comparison is no reference."""
    passed = verdict("PASS", day=5)
    tightened = replace(verdict("FAIL", day=12), **change)  # type: ignore[arg-type]
    folders = write(tmp_path, a=run(passed), b=run(tightened))
    made = history(folders)
    assert changes(made.rows[1])[name] == was
    assert events(made) == ["", "first regression"]  # the accepted baseline counts as passed
    without = replace(tightened, accepted=None, baseline_fingerprint={"model": "source"})
    (folders[1] / "report.json").write_text(to_json(run(without)))
    assert events(history(folders)) == ["", ""]


def test_other_tasks_are_not_mixed(tmp_path: Path) -> None:
    other = verdict("FAIL", day=12)
    renamed = replace(other, tasks=(replace(other.tasks[0], task="gsm8k"),), accepted=None)
    made = history(write(tmp_path, a=run(verdict("PASS", day=5)), b=run(renamed)))
    assert events(made) == ["", ""]
    assert [task.name for task in made.rows[1].tasks] == ["gsm8k"]


def test_failed_load_regresses(tmp_path: Path) -> None:
    refused = LoadReport(checkpoint="c", ok=False, findings=(sample.finding("error"),), vllm="0.32")
    failed = replace(run(None, day=20), load=refused, outcome="FAIL", reason="load: no kernel")
    made = history(write(tmp_path, a=run(verdict("PASS", day=5)), b=failed))
    assert events(made) == ["", "first regression"]
    assert changes(made.rows[1]) == {"vLLM": "0.31.0"}  # the digest of a load is unknown


def test_variants_are_rows(tmp_path: Path) -> None:
    judged = replace(verdict("FAIL", day=5, vllm="0.32.0"), accepted=None)
    variants = (
        ComparedVariant(setting="default", vllm="0.31.0", outcome="BASELINE"),
        ComparedVariant(
            setting="default", vllm="0.32.0", vllm_python="new", outcome="FAIL", verdict=judged
        ),
        ComparedVariant(setting="kv_cache_dtype=fp9", vllm="0.32.0", outcome="REFUSED"),
    )
    report = replace(run(None, day=7), variants=variants, outcome="FAIL", reason="gsm8k fails")
    made = history(write(tmp_path, a=run(verdict("PASS", day=5)), v=report))
    assert [row.vllm for row in made.rows] == ["0.31.0", "0.31.0", "0.32.0", "0.32.0"]
    assert [row.outcome for row in made.rows] == ["PASS", None, "FAIL", "FAIL"]
    assert events(made) == ["", "", "", ""]
    assert made.outcome == "FAIL"


def test_two_comparisons_of_settings() -> None:
    """Reports that `compare --serve` wrote: vLLM refuses one setting both times."""
    made = history([REAL / "first", REAL / "second"])
    settings = ["kv_cache_dtype=auto", "kv_cache_dtype=fp8", "kv_cache_dtype=fp9"]
    settings.append("max_model_len=128")
    assert [row.setting for row in made.rows] == 2 * settings
    assert [row.outcome for row in made.rows] == 2 * [None, "INCONCLUSIVE", "FAIL", "INCONCLUSIVE"]
    assert events(made) == 8 * [""]
    assert [row.changes for row in made.rows] == 8 * [()]
    assert {row.digest[:8] for row in made.rows if row.outcome != "FAIL"} == {"984f10b6"}
    assert vexport("report", REAL / "first", REAL / "second").code == 1


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [(("PASS", "REFUSED"), "first regression"), (("REFUSED", "PASS"), "passes again")],
)
def test_each_setting_has_its_own_history(
    tmp_path: Path, outcomes: tuple[VariantOutcome, VariantOutcome], expected: str
) -> None:
    folders: list[Path] = []
    for name, outcome in zip(("first", "second"), outcomes, strict=True):
        report = from_json(Report, REAL / name / "report.json")
        changed = [
            replace(row, outcome=outcome) if row.setting == "kv_cache_dtype=fp9" else row
            for row in report.variants
        ]
        folders += write(tmp_path, **{name: replace(report, variants=tuple(changed))})
    made = history(folders)
    found = {row.setting: row.event for row in made.rows if Path(row.folder).name == "second"}
    assert {setting for setting, event in found.items() if event} == {"kv_cache_dtype=fp9"}
    assert found["kv_cache_dtype=fp9"] == expected


def accepted_file(path: Path, *, accepted: str = "2026-11-01T10:00:00+00:00") -> Path:
    """Write an accepted baseline with four documents of `addition`."""
    task = AcceptedTask(
        metric="exact_match",
        filter="none",
        higher_is_better=True,
        documents=4,
        score=0.75,
        scores={"0-3": "1011"},
        questions={"0-3": "AAABBBCCCDDD"},
    )
    fingerprint = {"model": FIRST, "vllm": "0.31.0", "limit": "640"}
    content = Accepted(
        accepted=accepted,
        checkpoint="out/qwen3",
        fingerprint=fingerprint,
        groups={},
        tasks={"addition": task},
    )
    path.write_text(to_json(content))
    return path


def test_accepted_baseline_comes_first(tmp_path: Path) -> None:
    file = accepted_file(tmp_path / "accepted.json")
    identity = describe_accepted(file, Accepted(fingerprint={}, groups={}, tasks={}))
    failed = replace(verdict("FAIL", day=12, vllm="0.32.0"), accepted=identity)
    made = history([*write(tmp_path, b=run(failed)), file])
    assert [row.kind for row in made.rows] == ["accepted baseline", "run"]
    assert made.rows[0].tasks[0].value == 0.75
    assert events(made) == ["", "first regression"]
    assert changes(made.rows[1])["vLLM"] == "0.31.0"


def test_accepted_file_without_time(tmp_path: Path) -> None:
    file = accepted_file(tmp_path / "accepted.json")
    content = json.loads(file.read_text())
    del content["accepted"], content["checkpoint"]
    file.write_text(json.dumps(content))
    made = history([*write(tmp_path, a=run(verdict("PASS", day=5))), file])
    assert made.rows[0].time == ""
    alone = vexport("report", file)
    assert (alone.code, "accepted" in alone.stdout) == (0, True)


def test_different_models_stay_a_comparison(tmp_path: Path) -> None:
    first = replace(verdict("PASS", day=5), accepted=None)
    second = replace(verdict("PASS", day=6, model=SECOND), accepted=None)
    folders = write(tmp_path, a=run(first), b=run(second, checkpoint="out/llama"))
    assert "is the smallest that passes" in vexport("report", *folders).stdout
    assert "History of out/llama" in vexport("report", *folders, "--history").stdout


def test_bad_results_are_one_error_each(folders: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "report.json").write_bytes((folders[0] / "report.json").read_bytes())
    (tmp_path / "other.json").write_text('{"schema": "vexport.check/1"}')
    (tmp_path / "newer.json").write_text('{"schema": "vexport.report/9"}')
    (tmp_path / "broken.json").write_text("{")
    bad = [tmp_path / name for name in ("gone", "other.json", "newer.json", "broken.json")]
    ran = vexport("report", *folders, copy, *bad, "--format", "json")
    assert len(rows_of(ran)) == 4
    assert ran.code == 2
    assert len(ran.errors) == 5
    for part in ("gone", "vexport.check/1", "vexport.report/9", "broken.json:1", "the same as"):
        assert any(part in error for error in ran.errors), part


def test_unreadable_time_is_named(folders: list[Path]) -> None:
    content = json.loads((folders[0] / "report.json").read_text())
    content["verdict"]["measured"] = "yesterday"
    (folders[0] / "report.json").write_text(json.dumps(content))
    ran = vexport("report", *folders)
    assert ran.code == 2
    assert "yesterday" in ran.errors[0]
    assert "internal" not in ran.stderr


def test_json_fits_its_schema(folders: list[Path]) -> None:
    ran = vexport("report", *folders, "--format", "json")
    schema = json.loads(files("vexport.reports").joinpath("history.schema.json").read_text())
    rows = rows_of(ran)
    jsonschema.validate(rows, schema)
    assert (rows[1]["outcome"], rows[1]["event"]) == ("FAIL", "first regression")
    assert rows[1]["changes"][0] == {"name": "vLLM", "was": "0.31.0"}
    assert vexport("report", *folders, "--format", "junit").code == 2


@pytest.mark.parametrize("format_", ["text", "markdown", "html"])
def test_every_form_shows_the_regression(folders: list[Path], format_: str) -> None:
    ran = vexport("report", *folders, "--format", format_)
    for part in ("first regression", "passes again", "was 0.31.0", "88.9%", SECOND[:8]):
        assert part in ran.stdout, part
    if format_ == "html":
        assert 'nowrap regressed"' in ran.stdout


def test_several_tasks_have_a_table(tmp_path: Path) -> None:
    judged = verdict("PASS", day=5)
    tasks = tuple(replace(judged.tasks[0], task=f"task{number}") for number in range(5))
    folders = write(
        tmp_path,
        a=run(replace(judged, tasks=tasks)),
        b=run(replace(verdict("PASS", day=6), tasks=tasks)),
    )
    ran = vexport("report", *folders, "--format", "markdown")
    assert "Tasks over time" in ran.stdout
    assert all(ran.stdout.count(f"| task{number} |") == 2 for number in range(5))


def test_hostile_values_are_text() -> None:
    judged = sample.hostile().verdict
    assert judged is not None
    report = replace(run(judged, checkpoint=sample.HOSTILE), reason=sample.HOSTILE)
    results = [
        RunResult(name=f"{sample.HOSTILE}{number}", folder=Path("run"), report=report)
        for number in range(2)
    ]
    made = history_of(results)
    for format_ in ("html", "markdown"):
        page = render_history(made, format_)
        assert "History of" in page
        assert "<script>alert" not in page
