"""Read runs and accepted baselines of one model, and return a row for each, oldest first.

A row belongs to the series of its side and setting, and is compared with earlier rows of this
series. A row keeps the verdict that its run stored.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from vexport.errors import InputError
from vexport.files import from_json, read_json_object
from vexport.inference.fingerprint import EMULATED, ENDPOINT, MODEL, TEMPLATE, Fingerprint
from vexport.records import (
    AcceptedBaseline,
    Change,
    ComparedVariant,
    History,
    HistoryRow,
    HistoryTask,
    Outcome,
    RowEvent,
    VariantOutcome,
    Verdict,
)
from vexport.reports.run_record import Report
from vexport.rules import results as rules
from vexport.run.comparison import compared_run
from vexport.run.directory import REPORT_FILE, read_report
from vexport.scores.readers.accepted import Accepted, describe_accepted, is_accepted, read_accepted
from vexport.scores.settings import changed_names, device_of, display_name, question_settings
from vexport.words import clip

_VLLM = "vllm"
_REPORT_KIND = "vexport.report/"
_SHORT = 8
_LONGEST = 60
_ACCEPTED = "accepted baseline"
# Settings that are columns of the row, or that change with every checkpoint.
_NOT_LISTED = (MODEL, _VLLM, EMULATED, TEMPLATE)
_OUTCOMES: Mapping[VariantOutcome, Outcome | None] = {
    "BASELINE": None,
    "PASS": "PASS",
    "FAIL": "FAIL",
    "INCONCLUSIVE": "INCONCLUSIVE",
    "REFUSED": "FAIL",
    "NO ANSWER": "INCONCLUSIVE",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The report of a run directory. `name` is the path in the command."""

    name: str
    folder: Path
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedResult:
    """An accepted baseline. `name` is the path in the command."""

    name: str
    content: Accepted
    identity: AcceptedBaseline


Result = RunResult | AcceptedResult


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A row before it is compared with the earlier rows of its series.

    `series` identifies the side and the setting. `loads` is False if the checkpoint failed to load
    or failed its check, and None if unknown.
    """

    row: HistoryRow
    series: Hashable
    fingerprint: Fingerprint
    verdict: Verdict | None
    loads: bool | None


def read_result(path: Path) -> Result:
    """Read a run directory, its report.json, or an accepted baseline.

    Raises InputError for any other path.
    """
    if not path.is_file():
        return RunResult(name=str(path), folder=path, report=read_report(path))
    if is_accepted(path):
        content = read_accepted(path)
        identity = describe_accepted(path, content)
        return AcceptedResult(name=str(path), content=content, identity=identity)
    schema = read_json_object(path).get("schema")
    if not isinstance(schema, str) or not schema.startswith(_REPORT_KIND):
        got = f"a file with the schema {schema}" if schema else "another file"
        raise InputError.of(rules.NO_RUN, str(path), found=got)
    return RunResult(name=str(path), folder=path.parent, report=from_json(Report, path))


def without_repetitions(results: Sequence[Result]) -> tuple[list[Result], list[InputError]]:
    """Return the results without repetitions, and an error for each repetition.

    A copy of a run directory or of an accepted baseline is a repetition, too.
    """
    kept: list[Result] = []
    problems: list[InputError] = []
    for result in results:
        same = next((other for other in kept if _is_same(other, result)), None)
        if same is None:
            kept.append(result)
            continue
        problems.append(InputError.of(rules.TWICE, result.name, other=same.name))
    return kept, problems


def _is_same(first: Result, second: Result) -> bool:
    if isinstance(first, RunResult) and isinstance(second, RunResult):
        is_same_folder = first.folder.resolve() == second.folder.resolve()
        return is_same_folder or first.report == second.report
    if isinstance(first, AcceptedResult) and isinstance(second, AcceptedResult):
        return first.identity == second.identity
    return False


def is_one_model(results: Sequence[Result]) -> bool:
    """Return True if the results can be the history of one model.

    Two runs belong together if they have the same checkpoint (by name or digest), the same source
    and schemes, or the same accepted baseline. Accepted baselines belong to every run.
    """
    runs = [result for result in results if isinstance(result, RunResult)]
    if len(runs) < len(results):
        return True
    groups: list[set[tuple[str, ...]]] = []
    for run in runs:
        marks = set(_marks(run.report))
        joined = [group for group in groups if group & marks]
        groups = [group for group in groups if not group & marks]
        groups.append(marks.union(*joined))
    return len(groups) == 1


def _marks(report: Report) -> Iterator[tuple[str, ...]]:
    """Yield the names and digests by which two runs of one model are recognized."""
    if report.made is None:
        yield "checkpoint", report.checkpoint.name
    else:
        yield "source", report.made.name, report.made.scheme_names
    verdict = report.verdict
    if verdict is not None and MODEL in verdict.fingerprint:
        yield "digest", verdict.fingerprint[MODEL]
    if verdict is not None and verdict.accepted is not None:
        yield "accepted baseline", report.baseline_name
        yield "digest of the accepted baseline", verdict.accepted.digest


def history_of(results: Sequence[Result]) -> History:
    """Return the rows of all results, oldest first, with their events and changes.

    A result without a time comes first. Raises InputError for a time that cannot be read.
    """
    entries = [entry for result in results for entry in _entries(result)]
    entries.sort(key=lambda entry: entry.row.time)
    settled = _Settled()
    latest: dict[Hashable, _Entry] = {}
    rows: list[HistoryRow] = []
    for entry in entries:
        before = latest.get(entry.series) or latest.get(_ACCEPTED)
        changes = tuple(_changes(before, entry)) if before is not None else ()
        rows.append(replace(_with_events(entry, settled), changes=changes))
        latest[entry.series] = entry
    return History(rows=tuple(rows))


def _entries(result: Result) -> Iterator[_Entry]:
    if isinstance(result, AcceptedResult):
        yield _accepted_entry(result)
        return
    report = result.report
    if not report.is_of_variants:
        yield _run_entry(result)
    for variant in report.variants:
        if report.is_of_variants or variant.outcome != "BASELINE":
            yield _variant_entry(result, variant)


def _accepted_entry(result: AcceptedResult) -> _Entry:
    content = result.content
    scores = {name: content.tasks[name].score for name in content.names if name in content.tasks}
    row = HistoryRow(
        name=Path(result.name).stem,
        folder=result.name,
        kind="accepted baseline",
        time=_time(content.accepted, f"{result.name}: accepted") if content.accepted else "",
        checkpoint=content.checkpoint,
        tasks=tuple(HistoryTask(name=name, value=scores.get(name)) for name in content.names),
    )
    return _entry(row, content.fingerprint, series=_ACCEPTED, loads=True)


def _run_entry(run: RunResult) -> _Entry:
    report = run.report
    measured = report.verdict.measured if report.verdict is not None else ""
    row = replace(
        _row_of(run, measured or report.call.created),
        vllm=_loaded_with(report),
        device=report.device,
        outcome=report.outcome,
        reason=report.reason,
    )
    fingerprint = report.verdict.fingerprint if report.verdict is not None else {}
    return _entry(row, fingerprint, verdict=report.verdict, series="", loads=_loads(report))


def _variant_entry(run: RunResult, variant: ComparedVariant) -> _Entry:
    """Return the entry of a variant. The verdicts of the others describe the first variant."""
    row = replace(
        _row_of(run, run.report.call.created),
        setting=variant.setting,
        vllm=variant.vllm,
        outcome=_OUTCOMES[variant.outcome],
        reason=variant.reason,
    )
    judged = [each.verdict for each in run.report.variants if each.verdict is not None]
    fingerprint: Fingerprint = {}
    if variant.verdict is not None:
        fingerprint = variant.verdict.fingerprint
    elif variant.outcome == "BASELINE" and judged:
        fingerprint = judged[0].baseline_fingerprint
    loads = None if variant.outcome == "NO ANSWER" else variant.outcome != "REFUSED"
    series = (variant.setting, variant.vllm_python)
    return _entry(row, fingerprint, verdict=variant.verdict, series=series, loads=loads)


def _row_of(run: RunResult, time: str) -> HistoryRow:
    report = run.report
    compared = compared_run(report, run.name)
    return HistoryRow(
        name=report.name,
        folder=run.name,
        time=_time(time, f"{run.folder / REPORT_FILE}: created"),
        checkpoint=report.checkpoint.name,
        schemes=compared.schemes,
        num_bytes=compared.num_bytes,
        baseline=report.baseline_name,
    )


def _entry(
    row: HistoryRow,
    fingerprint: Fingerprint,
    *,
    verdict: Verdict | None = None,
    series: Hashable,
    loads: bool | None,
) -> _Entry:
    """Complete a row by its fingerprint and its verdict. A server names its model itself."""
    model = fingerprint.get(MODEL, "")
    is_server = ENDPOINT in fingerprint
    completed = replace(
        row,
        checkpoint=model if is_server else row.checkpoint,
        digest="" if is_server else model,
        vllm=fingerprint.get(_VLLM, "") or row.vllm,
        device=row.device or (verdict.device if verdict is not None else device_of(fingerprint)),
        tasks=row.tasks if verdict is None else tuple(_tasks(verdict)),
    )
    return _Entry(
        row=completed, series=series, fingerprint=fingerprint, verdict=verdict, loads=loads
    )


def _tasks(verdict: Verdict) -> Iterator[HistoryTask]:
    for task in verdict.tasks:
        judged = replace(task.without_flips, also=())
        yield HistoryTask(name=task.task, value=task.candidate.value, verdict=judged)
    text = verdict.text
    if text is not None:
        for limit in text.limits:
            yield HistoryTask(name=f"{limit.measure} on {Path(text.data).name}", limit=limit)


def _with_events(entry: _Entry, settled: "_Settled") -> HistoryRow:
    row = entry.row
    tasks = tuple(replace(task, event=settled.event(entry, task)) for task in row.tasks)
    events = {settled.load_event(entry), *(task.event for task in tasks)}
    event: RowEvent = ""
    if "first regression" in events:
        event = "first regression"
    elif "passes again" in events and row.outcome != "FAIL":
        event = "passes again"
    return replace(row, tasks=tasks, event=event)


class _Settled:
    """Outcomes of each task in each series so far, with the settings of its questions."""

    def __init__(self) -> None:
        self._earlier: dict[Hashable, list[tuple[Outcome, Fingerprint]]] = {}

    def event(self, entry: _Entry, task: HistoryTask) -> RowEvent:
        """Return the event of a task, which has passed if its baseline is an accepted one."""
        verdict = entry.verdict
        has_accepted_baseline = verdict is not None and verdict.accepted is not None
        key = (entry.series, task.name, frozenset(_task_facts(entry, task).items()))
        questions = question_settings(entry.fingerprint, task.name)
        first: Outcome | None = "PASS" if has_accepted_baseline else None
        return self._next(key, task.outcome, questions, first)

    def load_event(self, entry: _Entry) -> RowEvent:
        """Return the event of loading the checkpoint. An accepted baseline has been loaded."""
        if entry.loads is None:
            return ""
        first: Outcome | None = "PASS" if (_ACCEPTED, "load") in self._earlier else None
        outcome: Outcome = "PASS" if entry.loads else "FAIL"
        is_variant = bool(entry.row.setting)
        return self._next((entry.series, "load"), outcome, {}, None if is_variant else first)

    def _next(
        self, key: Hashable, now: Outcome | None, questions: Fingerprint, first: Outcome | None
    ) -> RowEvent:
        earlier = self._earlier.setdefault(key, [])
        comparable = (
            outcome
            for outcome, asked in reversed(earlier)
            if not (asked and questions and changed_names(asked, questions))
        )
        before = next(comparable, first)
        if now in ("PASS", "FAIL"):
            earlier.append((now, questions))
        if (before, now) == ("PASS", "FAIL"):
            return "first regression"
        return "passes again" if (before, now) == ("FAIL", "PASS") else ""


def _facts(entry: _Entry) -> dict[str, str]:
    row = entry.row
    facts = {
        "checkpoint": row.checkpoint,
        "digest": row.digest[:_SHORT],
        "vLLM": row.vllm,
        "device": row.device,
    }
    for task in row.tasks:
        facts |= _task_facts(entry, task)
    return facts


def _task_facts(entry: _Entry, task: HistoryTask) -> dict[str, str]:
    verdict = entry.verdict
    if verdict is None:
        return {}
    accepted = verdict.accepted
    digest = accepted.digest if accepted else verdict.baseline_fingerprint.get(MODEL, "")
    baseline = entry.row.baseline
    # The baseline of a variant is the same checkpoint in the first setting.
    if digest and not entry.row.setting:
        baseline += f" ({digest[:_SHORT]})"
    facts = {"alpha": f"{verdict.alpha:g}", "baseline": baseline}
    if verdict.text is not None:
        facts |= {"text": verdict.text.digest[:_SHORT], "rows": f"{verdict.text.rows:,}"}
    if task.limit is not None:
        facts[f"limit of the {task.name}"] = f"{task.limit.limit:g}"
    if (judged := task.verdict) is not None:
        facts |= {
            f"metric of {task.name}": f"{judged.metric},{judged.filter}",
            f"documents of {task.name}": f"{judged.documents:,}",
            f"margin of {task.name}": judged.scale.short_limit,
        }
    return facts


def _changes(old: _Entry, new: _Entry) -> Iterator[Change]:
    before, now = _facts(old), _facts(new)
    for name, value in now.items():
        if value and before.get(name, "") not in ("", value):
            yield Change(name=name, was=before[name])
    if old.fingerprint and new.fingerprint:
        for name in changed_names(old.fingerprint, new.fingerprint):
            if name not in _NOT_LISTED:
                was = clip(old.fingerprint.get(name, "not given"), _LONGEST)
                yield Change(name=display_name(name), was=was)


def _loaded_with(report: Report) -> str:
    load = report.load
    if load is None:
        return ""
    return load.engine.vllm if load.engine is not None else load.vllm


def _loads(report: Report) -> bool | None:
    """Return False if the check or a load failed, True if the model ran, else None."""
    load = report.load
    if not report.loads:
        return False
    verdict = report.verdict
    is_answered = verdict is not None and (bool(verdict.tasks) or verdict.text is not None)
    return True if is_answered or (load is not None and load.ok) else None


def _time(text: str, where: str) -> str:
    """Return a time in UTC. A time without a zone is in UTC. Accepted baselines may have none."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InputError.of(rules.TIME, where, time=text) from None
    return (
        (time if time.tzinfo else time.replace(tzinfo=UTC))
        .astimezone(UTC)
        .isoformat(timespec="seconds")
    )
