"""Find the results of a history that regressed, and describe the history in a sentence.

A task regressed if it fails, and the latest earlier result that can be compared passed. Two results
can be compared if the metric, the documents, the prompts, the baseline, the margin and alpha are
the same. An accepted baseline counts as a result that passed.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vexport.inference.fingerprint import MODEL
from vexport.records import (
    ComparedRun,
    History,
    HistoryTask,
    Outcome,
    RowEvent,
    RowHistory,
    Verdict,
)
from vexport.records.values import join_limited, plural
from vexport.reports.formatting import margin_text, measure_interval, measure_value, scale_of
from vexport.run.comparison import mark_smallest
from vexport.run.history import VLLM, Point, baseline_of
from vexport.scores.settings import changed_names, display_name, question_settings

# Maximum number of tasks or settings that a sentence names. Others are counted.
MAX_NAMED = 3
_GRAVEST: tuple[RowEvent, ...] = ("regressed", "fails", "still fails", "passes again")
# Settings that the headline does not list under "also changed". It describes changes of the model
# and of vLLM separately. The other two settings change with every checkpoint.
_NOT_LISTED = (MODEL, VLLM, "emulated kernels", "model's chat template")
_SHORT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A point with its events, and the earlier point that it is compared with."""

    point: Point
    tasks: tuple[HistoryTask, ...] = ()
    event: RowEvent = ""
    before: Point | None = None


def history_of(points: Sequence[Point]) -> History:
    """Return the rows of a history, oldest first, with the regressions and a sentence."""
    steps: list[_Step] = []
    for point in points:
        steps.append(_step(point, [step.point for step in steps]))
    first = next((step for step in steps if step.event == "regressed"), None)
    rows = mark_smallest([_row(steps, number, first) for number in range(len(steps))])
    command, advice = _advice(steps)
    return History(
        rows=rows,
        name=_name(points),
        outcome=_outcome(points),
        headline=_headline(steps),
        command=command,
        advice=advice,
    )


def _step(point: Point, earlier: Sequence[Point]) -> _Step:
    """Compare a point with the earlier points."""
    tasks: list[HistoryTask] = []
    compared: list[Point | None] = []
    for task in point.tasks:
        event, before = _task_event(point, task, earlier)
        reasons = tuple(_obstacles(point, task, earlier))
        tasks.append(replace(task, event=event, incomparable_reasons=reasons))
        compared.append(before)
    load_event, loaded_before = _load_event(point, earlier)
    events = [load_event, *(task.event for task in tasks)]
    event = next((each for each in _GRAVEST if each in events), "")
    places = [loaded_before, *compared]
    before = places[events.index(event)] if event else None
    if not event and point.row.outcome == "FAIL":
        event, before = _other_event(earlier)
    return _Step(point=point, tasks=tuple(tasks), event=event, before=before)


def _task_event(
    point: Point, task: HistoryTask, earlier: Sequence[Point]
) -> tuple[RowEvent, Point | None]:
    """Return the event of a task, and the earlier point that the task is compared with."""
    outcome = _task_outcome(task)
    before = next(
        (
            other
            for other in reversed(earlier)
            if (old := _same_task(other, task)) is not None
            and _task_outcome(old) in ("PASS", "FAIL")
            and not list(_differences(other, old, point, task))
        ),
        None,
    )
    has_failed = before is not None and _task_outcome(_same_task(before, task)) == "FAIL"
    if outcome == "PASS":
        return ("passes again", before) if has_failed else ("", before)
    if outcome != "FAIL":
        return "", before
    if has_failed:
        return "still fails", before
    if before is None:
        before = _accepted_before(point, earlier)
    has_passed = before is not None or point.has_accepted_baseline
    return ("regressed", before) if has_passed else ("fails", None)


def _load_event(point: Point, earlier: Sequence[Point]) -> tuple[RowEvent, Point | None]:
    """Return the event of loading the checkpoint, and the earlier point that it is compared with.

    This is the latest point in which a checkpoint was loaded or failed to load.
    """
    before = next((other for other in reversed(earlier) if other.loads is not None), None)
    if point.loads is False:
        if before is None:
            return "fails", None
        return ("regressed" if before.loads else "still fails"), before
    has_failed = before is not None and before.loads is False
    return ("passes again", before) if point.loads and has_failed else ("", before)


def _other_event(earlier: Sequence[Point]) -> tuple[RowEvent, Point | None]:
    """Return the event of a run that fails although its load and its tasks do not.

    For example, a variant of the checkpoint fails. The run is compared with the latest earlier run
    that passed or failed.
    """
    settled = [other for other in earlier if other.row.outcome in ("PASS", "FAIL")]
    if not settled:
        return "fails", None
    return ("regressed" if settled[-1].row.outcome == "PASS" else "still fails"), settled[-1]


def _task_outcome(task: HistoryTask | None) -> Outcome | None:
    if task is None:
        return None
    if task.verdict is not None:
        return task.verdict.outcome
    return task.limit.outcome if task.limit is not None else None


def _same_task(point: Point, task: HistoryTask) -> HistoryTask | None:
    """Return the task of a point with the same name, or None."""
    return next((each for each in point.tasks if each.name == task.name), None)


def _accepted_before(point: Point, earlier: Sequence[Point]) -> Point | None:
    """Return the accepted baseline of a point's verdict, or None if there is none.

    If the baseline is not among the earlier points, the verdict describes it.
    """
    if point.verdict is None or not point.has_accepted_baseline:
        return None
    found = [
        other
        for other in earlier
        if other.accepted is not None and other.accepted.identity.digest == point.baseline_digest
    ]
    return found[-1] if found else baseline_of(point.verdict, point.baseline)


def _obstacles(point: Point, task: HistoryTask, earlier: Sequence[Point]) -> Iterator[str]:
    """Yield the reasons why a task cannot be compared with its latest earlier result."""
    if task.verdict is None and task.limit is None:
        return
    for other in reversed(earlier):
        old = _same_task(other, task)
        if old is not None and (old.verdict is not None or old.limit is not None):
            yield from _differences(other, old, point, task)
            return


def _differences(old: Point, before: HistoryTask, new: Point, now: HistoryTask) -> Iterator[str]:
    """Yield the reasons why a task of two points cannot be compared."""
    if (before.metric, before.filter) != (now.metric, now.filter):
        yield f"{now.metric},{now.filter} instead of {before.metric},{before.filter}"
    if before.documents != now.documents:
        noun = "rows" if now.limit is not None else "documents"
        yield f"{now.documents or 0:,} {noun} instead of {before.documents or 0:,}"
    if old.fingerprint and new.fingerprint:
        questions = (question_settings(each.fingerprint, now.name) for each in (old, new))
        if changed := changed_names(*questions):
            settings = join_limited([*map(display_name, changed)], ", ", MAX_NAMED)
            yield f"other questions: {settings} changed"
    if _is_other_baseline(old, new):
        names = new.baseline, old.baseline
        yield (
            f"another baseline: {names[0]} instead of {names[1]}"
            if names[0] != names[1]
            else f"another baseline with the name {names[0]}"
        )
    yield from _other_limits(old, before, new, now)


def _other_limits(old: Point, before: HistoryTask, new: Point, now: HistoryTask) -> Iterator[str]:
    """Yield the reasons why two verdicts on a task were made with different limits."""
    if old.verdict is None or new.verdict is None:
        return
    if before.verdict is not None and now.verdict is not None:
        texts = _margin(new.verdict, now), _margin(old.verdict, before)
        if texts[0] != texts[1]:
            yield f"margin {texts[0]} instead of {texts[1]}"
    if before.limit is not None and now.limit is not None and before.limit.limit != now.limit.limit:
        yield f"limit {now.limit.limit:g} instead of {before.limit.limit:g}"
    old_data = old.verdict.text.digest if old.verdict.text is not None else ""
    new_data = new.verdict.text.digest if new.verdict.text is not None else ""
    if old_data != new_data:
        yield "other text"
    if old.verdict.alpha != new.verdict.alpha:
        yield f"alpha {new.verdict.alpha:g} instead of {old.verdict.alpha:g}"


def _margin(verdict: Verdict, task: HistoryTask) -> str:
    """Return a task's margin as text. A relative margin is compared by its share."""
    assert task.verdict is not None
    if task.verdict.relative_margin is not None:
        return f"{100 * task.verdict.relative_margin:.6g}%"
    return f"{margin_text(task.verdict, verdict.margin)} {scale_of(task.verdict).unit}"


def _is_other_baseline(old: Point, new: Point) -> bool:
    """Return True if two points have different baselines: by content if known, else by name."""
    if old.baseline_digest and new.baseline_digest:
        return old.baseline_digest != new.baseline_digest
    return old.baseline != new.baseline


def _row(steps: Sequence[_Step], number: int, first: _Step | None) -> ComparedRun:
    """Return the row of a step."""
    step = steps[number]
    point = step.point
    before = steps[number - 1].point if number else None
    notes = list(point.notes)
    for task in step.tasks:
        if task.incomparable_reasons:
            reasons = "; ".join(task.incomparable_reasons)
            notes.append(
                f"{task.name} cannot be compared with the latest earlier result: {reasons}"
            )
    history = RowHistory(
        kind=point.kind,
        time=point.time.isoformat(timespec="seconds") if point.time is not None else "",
        setting=point.setting,
        checkpoint=point.checkpoint,
        digest=point.digest,
        checkpoint_before=_checkpoint_before(before, point),
        vllm=point.vllm,
        vllm_before=_vllm_before(before, point),
        device=point.device,
        baseline=point.baseline,
        baseline_digest=point.baseline_digest,
        judged_against=point.judged_against,
        loads=point.loads,
        tasks=step.tasks,
        event=step.event,
        is_first_regression=step is first,
        notes=tuple(notes),
    )
    return replace(point.row, history=history)


def _checkpoint_before(before: Point | None, now: Point) -> str:
    """Return the checkpoint of the row before if it changed: its digest, or else its name."""
    if before is None:
        return ""
    if before.digest and now.digest:
        return before.digest if before.digest != now.digest else ""
    return before.checkpoint if before.checkpoint != now.checkpoint else ""


def _vllm_before(before: Point | None, now: Point) -> str:
    if before is None or not before.vllm or not now.vllm:
        return ""
    return before.vllm if before.vllm != now.vllm else ""


def _name(points: Sequence[Point]) -> str:
    """Return the name of the model: the name of the newest checkpoint that has one."""
    named = [point for point in points if point.checkpoint]
    runs = [point for point in named if point.kind == "run"]
    return (runs or named)[-1].checkpoint if named else "one model"


def _outcome(points: Sequence[Point]) -> Outcome | None:
    """Return the outcome of the newest run, or None without runs.

    The variants of `compare --serve` are one run: the gravest outcome counts.
    """
    runs = [point for point in points if point.kind == "run"]
    if not runs:
        return None
    newest = [point.row for point in runs if point.row.folder == runs[-1].row.folder]
    outcomes = {row.outcome for row in newest}
    for outcome in ("FAIL", "INCONCLUSIVE", "PASS"):
        if outcome in outcomes:
            return outcome
    return "INCONCLUSIVE"


def _headline(steps: Sequence[_Step]) -> str:
    """Return the history in one or two sentences."""
    runs = [step for step in steps if step.point.kind == "run"]
    if not runs:
        file = shlex.quote(steps[-1].point.row.folder)
        return (
            f"{plural(len(steps), 'accepted baseline')}, and no run to compare. To compare a "
            f"checkpoint with the newest: `vexport eval CHECKPOINT --against {file}`"
        )
    shown = _decisive(runs)
    if shown is None:
        return _without_regression(steps, runs)
    later = runs[runs.index(shown) + 1 :]
    start = "Regressed at" if shown.event == "regressed" else "Fails since"
    sentence = f"{start} {_day(shown.point)}: {_title(shown.point)} {_failure(shown)}"
    if shown.before is not None:
        sentence += f"; {_changes(shown.before, shown.point)}"
    elif shown.event == "fails":
        sentence += "; no earlier run in this history passed"
    return f"{sentence}.{_aftermath(shown, later)}"


def _decisive(runs: Sequence[_Step]) -> _Step | None:
    """Return the run that the headline describes, or None if no run failed.

    Regressions come first. Among them, the first regression with tasks that have not passed again
    is chosen. If all tasks have passed again, the first regression is chosen. Without regressions,
    the run is chosen in the same way from the failures without an earlier PASS.
    """
    for event in ("regressed", "fails"):
        found = [step for step in runs if step.event == event]
        standing = [step for step in found if not _recovery(step, runs[runs.index(step) + 1 :])]
        if found:
            return (standing or found)[0]
    return None


def _recovery(step: _Step, later: Sequence[_Step]) -> _Step | None:
    """Return the later step in which everything that failed in `step` passes again, or None."""
    failed = [task.name for task in step.tasks if _task_outcome(task) == "FAIL"]
    waiting = set(failed)
    for other in later:
        passed = {task.name for task in other.tasks if task.event == "passes again"}
        if failed and not (waiting := waiting - passed):
            return other
        if not failed and other.point.row.outcome == "PASS":
            return other
    return None


def _without_regression(steps: Sequence[_Step], runs: Sequence[_Step]) -> str:
    sentence = f"No regression in {plural(len(runs), 'run')} since {_day(steps[0].point)}."
    unjudged = [step for step in runs if step.point.verdict is None]
    newest = runs[-1].point
    if len(unjudged) == len(runs):
        return f"{plural(len(runs), 'run')} since {_day(steps[0].point)}: none has a verdict."
    if unjudged:
        verb = "was" if len(unjudged) == 1 else "were"
        sentence += f" {len(unjudged)} of them {verb} not compared with a baseline."
    if newest.row.outcome == "INCONCLUSIVE":
        sentence += f" The newest, {_title(newest)}, is INCONCLUSIVE: {newest.row.reason}."
    return sentence


def _aftermath(shown: _Step, later: Sequence[_Step]) -> str:
    """Return a sentence on the runs after a failure, or "" if there are none."""
    if not later:
        return ""
    if recovered := _recovery(shown, later):
        return f" Passes again since {_day(recovered.point)}: {_title(recovered.point)}."
    newest = later[-1].point
    if later[-1].event == "still fails":
        return f" The newest run, {_title(newest)} ({_day(newest)}), still fails."
    outcome = newest.row.outcome or "not judged"
    reasons = [reason for task in later[-1].tasks for reason in task.incomparable_reasons]
    why = f", but with {reasons[0]}" if reasons else ""
    return f" The newest run, {_title(newest)} ({_day(newest)}), is {outcome}{why}."


def _failure(step: _Step) -> str:
    """Describe the failure: `fails gsm8k by -6.10 points (-8.00 to -4.20) against BASELINE`."""
    point = step.point
    failed = [task for task in step.tasks if task.event == step.event]
    if point.loads is False or not failed:
        return f"fails: {point.row.reason}"
    worst = min(failed, key=_loss)
    against = f" against {point.baseline}" if point.baseline else ""
    others = len(failed) - 1
    more = f" (and {plural(others, 'more task')})" if others else ""
    return f"fails {_amount(worst)}{more}{against}"


def _loss(task: HistoryTask) -> float:
    """Return the change divided by the margin, to compare tasks in different units.

    The number is negative for a loss. The change has a confidence interval. The end with the
    smaller loss is used.
    """
    if task.verdict is not None:
        return task.verdict.high / (task.verdict.margin or 1.0)
    assert task.limit is not None
    return -(task.limit.low or task.limit.value) / (task.limit.limit or 1.0)


def _amount(task: HistoryTask) -> str:
    if (limit := task.limit) is not None:
        return (
            f"the {task.name}: {measure_value(limit, limit.value)} ({measure_interval(limit)}), "
            f"limit {limit.limit:g}"
        )
    verdict = task.verdict
    assert verdict is not None
    scale = scale_of(verdict)
    change = f"{scale.change(verdict.difference)} {scale.unit}"
    return f"{task.name} by {change} ({scale.changes(verdict.low, verdict.high)})"


def _changes(old: Point, new: Point) -> str:
    """Return what changed between two points: vLLM, the checkpoint, and other settings."""
    texts = [_vllm_change(old, new), _checkpoint_change(old, new)]
    names = changed_names(old.fingerprint, new.fingerprint) if old.fingerprint else []
    changed = [display_name(name) for name in names if name not in _NOT_LISTED]
    others = changed if new.fingerprint else []
    if others:
        texts.append(f"also changed: {join_limited(others, ', ', MAX_NAMED)}")
    how = "accepted" if old.kind == "accepted baseline" else "passed"
    return f"since {_title(old)} ({how} on {_day(old)}): {', '.join(texts)}"


def _vllm_change(old: Point, new: Point) -> str:
    if not old.vllm or not new.vllm:
        return "the version of vLLM is not recorded"
    return (
        f"vLLM {old.vllm} -> {new.vllm}" if old.vllm != new.vllm else f"vLLM {new.vllm} unchanged"
    )


def _has_same_files(old: Point, new: Point) -> bool:
    """Return True if two points certainly have the same checkpoint."""
    return bool(old.digest) and old.digest == new.digest


def _checkpoint_change(old: Point, new: Point) -> str:
    if _has_same_files(old, new):
        return "checkpoint unchanged"
    if old.digest and new.digest:
        return f"checkpoint {old.digest[:_SHORT]} -> {new.digest[:_SHORT]}"
    if old.checkpoint != new.checkpoint and old.checkpoint and new.checkpoint:
        return f"checkpoint {old.checkpoint} -> {new.checkpoint}"
    return "the checkpoint's digest is not recorded"


def _title(point: Point) -> str:
    """Return the name of a point in sentences: its folder or file, and its setting."""
    return f"{point.row.folder} ({point.setting})" if point.setting else point.row.folder


def _day(point: Point) -> str:
    return point.time.date().isoformat() if point.time is not None else "an unknown date"


def _advice(steps: Sequence[_Step]) -> tuple[str, str]:
    """Return the next command (or "") and a sentence."""
    runs = [step for step in steps if step.point.kind == "run"]
    shown = _decisive(runs) if runs else None
    if shown is None or _recovery(shown, runs[runs.index(shown) + 1 :]):
        return "", ""
    if shown.before is None:
        return "", f"Read the report of {shown.point.row.folder}."
    is_same_checkpoint = _has_same_files(shown.before, shown.point)
    if _vllm_before(shown.before, shown.point):
        command = "vexport compare CHECKPOINT --vllm-python OLD/bin/python --task TASK"
        which = "the checkpoint" if is_same_checkpoint else "the earlier checkpoint"
        return command, f"Serve {which} with both versions of vLLM."
    if not is_same_checkpoint:
        return (
            "",
            f"The checkpoint changed: the report of {shown.point.row.folder} has the cause, unless "
            "its baseline is an accepted file, which has no weights to compare with.",
        )
    return "", "No change of vLLM or the checkpoint is recorded: compare the settings of both runs."
