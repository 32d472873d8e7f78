"""Read runs and accepted baselines of one model, and sort them by time.

A run keeps the verdict that it stored. There is one exception: if an accepted baseline is given and
the run was compared with another model, the run's responses are compared with the accepted
baseline. The comparison is that of `vexport verdict`, with the run's margins.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from vexport.errors import InputError, VexportError
from vexport.files import from_json, read_json_object
from vexport.inference.fingerprint import ENDPOINT, MODEL, Fingerprint, read_fingerprint
from vexport.inference.options import BASELINE, CANDIDATE
from vexport.judge.accepted import (
    Accepted,
    describe_accepted,
    is_accepted,
    read_accepted,
)
from vexport.judge.verdict import decide
from vexport.names import result_files, user_path
from vexport.records import (
    AcceptedBaseline,
    ComparedRun,
    ComparedVariant,
    HistoryTask,
    Outcome,
    RowKind,
    TaskVerdict,
    VariantOutcome,
    Verdict,
)
from vexport.records.margins import MarginSetting
from vexport.reports.formatting import margin_of
from vexport.reports.run_record import Report
from vexport.run.comparison import compared_run, reported_kl, worst_task
from vexport.run.directory import REPORT_FILE, read_report
from vexport.scenario import DEFAULT_ALPHA
from vexport.scores.settings import device_of

VLLM = "vllm"
_REPORT_KIND = "vexport.report/"
_NEED = "a run directory, its report.json, or an accepted baseline"
# Largest difference between a score in an accepted baseline, which is rounded, and the same score
# in a verdict.
_ROUNDING = 1e-6
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
    file: Path
    content: Accepted
    identity: AcceptedBaseline


Result = RunResult | AcceptedResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A run, a variant or an accepted baseline in a history, before regressions are looked for.

    `time` is None if it was not recorded. `baseline` is the name of the model or file that the
    verdict compares with, and `baseline_digest` is the digest of its content. `answers` is the path
    of the model's results, if they exist. The other fields are those of `RowHistory`.
    """

    row: ComparedRun
    kind: RowKind
    time: datetime | None
    setting: str = ""
    checkpoint: str = ""
    fingerprint: Fingerprint = field(default_factory=dict)
    vllm: str = ""
    device: str = ""
    verdict: Verdict | None = None
    baseline: str = ""
    baseline_digest: str = ""
    judged_against: str = ""
    answers: Path | None = None
    loads: bool | None = None
    tasks: tuple[HistoryTask, ...] = ()
    notes: tuple[str, ...] = ()
    accepted: AcceptedResult | None = None

    @property
    def digest(self) -> str:
        """Return the digest of the checkpoint's files, or "" if it is unknown."""
        return "" if ENDPOINT in self.fingerprint else self.fingerprint.get(MODEL, "")

    @property
    def has_accepted_baseline(self) -> bool:
        """Return True if the verdict compares with an accepted baseline."""
        return self.verdict is not None and self.verdict.accepted is not None


def read_result(path: Path) -> Result:
    """Read a run directory, its report.json, or an accepted baseline.

    Raises InputError for any other path.
    """
    if not path.is_file():
        return RunResult(name=str(path), folder=path, report=read_report(path))
    if is_accepted(path):
        content = read_accepted(path)
        identity = describe_accepted(path, content)
        return AcceptedResult(name=str(path), file=path, content=content, identity=identity)
    schema = read_json_object(path).get("schema")
    if not isinstance(schema, str) or not schema.startswith(_REPORT_KIND):
        got = f"a file with the schema {schema}" if schema else "another file"
        raise InputError(str(path), got=got, need=_NEED, fix="check the path")
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
        need = "each result once"
        problems.append(
            InputError(result.name, got=f"the same as {same.name}", need=need, fix="leave one out")
        )
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
        marks = set(_marks(run))
        joined = [group for group in groups if group & marks]
        groups = [group for group in groups if not group & marks]
        groups.append(marks.union(*joined))
    return len(groups) == 1


def _marks(run: RunResult) -> Iterator[tuple[str, ...]]:
    """Yield the names and digests by which two runs of one model are recognized."""
    report = run.report
    if report.made is None:
        yield "checkpoint", report.checkpoint.name
    else:
        yield "source", report.made.name, report.made.scheme_names
    digest = _fingerprint_of(run).get(MODEL)
    if digest is not None:
        yield "digest", digest
    verdict = report.verdict
    if verdict is not None and verdict.accepted is not None:
        yield "accepted baseline", report.baseline_name
        yield "digest of the accepted baseline", verdict.accepted.digest


def points_in_time(results: Sequence[Result]) -> tuple[Point, ...]:
    """Return the points of all results, oldest first.

    A result without a time comes first. Raises InputError for a time that cannot be read.
    """
    accepted = [_accepted_point(result) for result in results if isinstance(result, AcceptedResult)]
    accepted.sort(key=_when)
    points = list(accepted)
    for result in results:
        if isinstance(result, RunResult):
            points += [_against_accepted(point, accepted) for point in _run_points(result)]
    points.sort(key=_when)
    return tuple(points)


def _when(point: Point) -> datetime:
    return point.time or datetime.min.replace(tzinfo=UTC)


def _accepted_point(result: AcceptedResult) -> Point:
    """Return the point of an accepted baseline. It has scores, but no verdict."""
    content = result.content
    grouped = {member for members in content.groups.values() for member in members}
    tasks = [
        HistoryTask(
            name=name,
            metric=task.metric,
            filter=task.filter,
            documents=task.documents,
            value=task.score,
        )
        for name, task in content.tasks.items()
        if name not in grouped
    ]
    tasks += [HistoryTask(name=group) for group in content.groups]
    is_timed = bool(content.accepted)
    return Point(
        row=ComparedRun(name=result.file.stem, folder=result.name),
        kind="accepted baseline",
        time=_time(content.accepted, f"{result.name}: accepted") if is_timed else None,
        checkpoint=content.checkpoint or content.fingerprint.get(MODEL, ""),
        fingerprint=content.fingerprint,
        vllm=content.fingerprint.get(VLLM, ""),
        device=device_of(content.fingerprint),
        tasks=tuple(tasks),
        loads=True,
        notes=() if is_timed else ("the file does not contain the time of its acceptance",),
        accepted=result,
    )


def baseline_of(verdict: Verdict, name: str) -> Point | None:
    """Return the point of an accepted baseline from a verdict, without the baseline's file.

    Return None if the verdict has no accepted baseline, or does not contain its fingerprint.
    """
    accepted = verdict.accepted
    recorded = verdict.baseline_fingerprint
    if accepted is None or not recorded:
        return None
    return Point(
        row=ComparedRun(name=name, folder=name),
        kind="accepted baseline",
        time=_time(accepted.accepted, f"{name}: accepted") if accepted.accepted else None,
        fingerprint=recorded,
        vllm=recorded.get(VLLM, ""),
    )


def _run_points(run: RunResult) -> Sequence[Point]:
    """Return the point of a run, or a point for each variant of `compare --serve`."""
    report = run.report
    row = compared_run(report, run.name)
    where = f"{run.folder / REPORT_FILE}: created"
    created = _time(report.call.created, where)
    if report.is_of_variants:
        return [
            _variant_point(run, variant, row, created, number)
            for number, variant in enumerate(report.variants)
        ]
    verdict = report.verdict
    measured = verdict.measured if verdict is not None else ""
    fingerprint = _fingerprint_of(run)
    point = Point(
        row=row,
        kind="run",
        time=_time(measured, where) if measured else created,
        checkpoint=_checkpoint_name(report, fingerprint),
        fingerprint=fingerprint,
        vllm=fingerprint.get(VLLM, "") or _loaded_with(report),
        device=report.device or (verdict.device if verdict is not None else ""),
        answers=_answers_of(run),
        loads=_loads(report),
        notes=(report.reason,) if verdict is None and report.outcome == "PASS" else (),
    )
    return [_with_verdict(point, verdict, report.baseline_name)]


def _variant_point(
    run: RunResult, variant: ComparedVariant, row: ComparedRun, created: datetime, number: int
) -> Point:
    """Return the point of a variant. The first variant is the baseline of the others."""
    verdict = variant.verdict
    is_baseline = variant.outcome == "BASELINE"
    folder = Path(variant.folder)
    here = run.folder / (BASELINE if number == 0 else f"{CANDIDATE}/{folder.name}")
    answers = here if here.is_dir() else folder
    fingerprint = verdict.fingerprint if verdict is not None else {}
    fingerprint = fingerprint or read_fingerprint(answers)
    point = Point(
        row=replace(
            row,
            outcome=_OUTCOMES[variant.outcome],
            reason=variant.reason,
            mean_kl=variant.mean_kl,
            worst=variant.worst,
        ),
        kind="run",
        time=created,
        setting=variant.setting,
        checkpoint=_checkpoint_name(run.report, fingerprint),
        fingerprint=fingerprint,
        vllm=variant.vllm,
        device=verdict.device if verdict is not None else device_of(fingerprint),
        answers=answers if result_files(answers) else None,
        loads=_variant_loads(variant.outcome),
        notes=("the first variant: the other variants are compared with it",)
        if is_baseline
        else (),
    )
    return _with_verdict(point, verdict, run.report.baseline_name)


def _variant_loads(outcome: VariantOutcome) -> bool | None:
    if outcome == "NO ANSWER":
        return None
    return outcome != "REFUSED"


def _with_verdict(point: Point, verdict: Verdict | None, baseline: str) -> Point:
    """Return the point with the tasks or the text of a verdict."""
    if verdict is None:
        return point
    accepted = verdict.accepted
    model = verdict.baseline_fingerprint.get(MODEL, "")
    return replace(
        point,
        verdict=verdict,
        baseline=baseline,
        baseline_digest=accepted.digest if accepted is not None else model,
        tasks=tuple(_tasks(verdict)),
    )


def _tasks(verdict: Verdict) -> Iterator[HistoryTask]:
    for task in verdict.tasks:
        yield HistoryTask(
            name=task.task,
            metric=task.metric,
            filter=task.filter,
            documents=task.documents,
            value=task.candidate.value,
            verdict=replace(task, flips=(), also=(), margin=margin_of(task, verdict.margin)),
        )
    text = verdict.text
    for limit in text.limits if text is not None else ():
        assert text is not None
        name = f"{limit.measure} on {Path(text.data).name}"
        yield HistoryTask(name=name, documents=text.rows, limit=limit)


def _against_accepted(point: Point, accepted: Sequence[Point]) -> Point:
    """Compare the responses of a point with the newest accepted baseline before it.

    A verdict against an accepted baseline is kept, because the run chose this baseline. If the
    responses cannot be compared, a note has the reason.
    """
    if point.has_accepted_baseline:
        return point
    for other in accepted:
        if point.verdict is not None and _is_baseline_of(other, point.verdict):
            assert other.accepted is not None
            verdict = replace(point.verdict, accepted=other.accepted.identity)
            return _with_verdict(point, verdict, point.baseline)
    earlier = [other for other in accepted if _when(other) <= _when(point)]
    if not earlier:
        return point
    newest = earlier[-1].accepted
    assert newest is not None
    if point.answers is None:
        why = f"not compared with {newest.name}: no responses to tasks in {point.row.folder}"
        return replace(point, notes=(*point.notes, why)) if point.loads is not False else point
    try:
        verdict = decide(
            newest.file,
            point.answers,
            margin=_margins(point.verdict),
            alpha=point.verdict.alpha if point.verdict is not None else DEFAULT_ALPHA,
        )
    except VexportError as error:
        why = f"not compared with {newest.name}: {error}"
        return replace(point, notes=(*point.notes, why))
    return _judged_again(point, verdict, newest)


def _is_baseline_of(accepted: Point, verdict: Verdict) -> bool:
    """Return True if a verdict of an older version compares with this accepted baseline.

    Reports of older versions do not contain the baseline's digest. The baseline is therefore
    recognized by its scores. In addition, `changed_wrong` must be None, because accepted baselines
    do not contain responses.
    """
    scores = {task.name: task for task in accepted.tasks}
    return bool(verdict.tasks) and all(
        task.changed_wrong is None and _has_score(scores.get(task.task), task)
        for task in verdict.tasks
    )


def _has_score(accepted: HistoryTask | None, task: TaskVerdict) -> bool:
    if accepted is None or accepted.value is None:
        return False
    is_same_metric = (accepted.metric, accepted.filter) == (task.metric, task.filter)
    is_same_score = abs(accepted.value - task.baseline.value) <= _ROUNDING
    return is_same_metric and is_same_score and accepted.documents == task.documents


def _judged_again(point: Point, verdict: Verdict, accepted: AcceptedResult) -> Point:
    """Replace the verdict of a point by a verdict against an accepted baseline.

    If the checkpoint did not load, the outcome stays FAIL.
    """
    is_decisive = point.loads is not False
    own = point.row
    notes = [f"responses compared with {accepted.name}"]
    if own.outcome is not None and (own.outcome != verdict.outcome or not is_decisive):
        notes.append(f"the run itself: {own.outcome} against {point.baseline}: {own.reason}")
    row = own
    if is_decisive:
        row = replace(
            own,
            outcome=verdict.outcome,
            reason=verdict.reason,
            mean_kl=own.mean_kl if own.mean_kl is not None else reported_kl(verdict, None),
            worst=worst_task(verdict),
        )
    judged = replace(
        point,
        row=row,
        judged_against=accepted.name,
        device=point.device or verdict.device,
        notes=(*point.notes, *notes),
    )
    if not judged.fingerprint:
        judged = replace(judged, fingerprint=verdict.fingerprint)
    return _with_verdict(judged, verdict, accepted.name)


def _margins(verdict: Verdict | None) -> MarginSetting:
    """Return the margins of a verdict as a setting, or None for the defaults."""
    if verdict is None or not verdict.tasks:
        return None
    return {
        task.task: margin_of(task, verdict.margin)
        for task in verdict.tasks
        if task.relative_margin is None
    } | {
        task.task: f"{100 * task.relative_margin:.12g}%"
        for task in verdict.tasks
        if task.relative_margin is not None
    }


def _fingerprint_of(run: RunResult) -> Fingerprint:
    """Return the fingerprint of the run's model.

    Reports of older versions have no fingerprint, but the folder of the responses may have one.
    """
    verdict = run.report.verdict
    if verdict is not None and verdict.fingerprint:
        return verdict.fingerprint
    for folder in _answer_folders(run):
        if found := read_fingerprint(folder):
            return found
    return {}


def _answer_folders(run: RunResult) -> Iterator[Path]:
    """Yield the folders that may contain the responses of the run's model."""
    yield run.folder / "eval" / CANDIDATE
    yield run.folder / CANDIDATE
    # With several checkpoints, each has its report next to its responses.
    yield run.folder


def _answers_of(run: RunResult) -> Path | None:
    """Return the path of the responses to tasks, or None if they are not on this machine."""
    given = run.report.given
    for folder in _answer_folders(run):
        found = result_files(folder)
        if folder == run.folder:  # its other folders have the responses of other models
            found = [file for file in found if file.parent == folder]
        if found:
            return folder
    if given is not None and "://" not in given.name:
        path = user_path(given.name)
        if not (path / "config.json").exists() and result_files(path):
            return path
    return None


def _checkpoint_name(report: Report, fingerprint: Fingerprint) -> str:
    """Return the name of the checkpoint. A server's model has the name that the server gives."""
    if ENDPOINT in fingerprint:
        return fingerprint.get(MODEL, "")
    return report.checkpoint.name


def _loaded_with(report: Report) -> str:
    """Return the version of vLLM that loaded the checkpoint, or "" if it is unknown."""
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


def _time(text: str, where: str) -> datetime:
    """Parse a time. A time without a zone is in UTC."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        fix = "restore the file, or make it again"
        need = "a time such as 2026-11-20T08:30:00+00:00"
        raise InputError(where, got=text or "no time", need=need, fix=fix) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
