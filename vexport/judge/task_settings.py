"""Check margins and gates against the tasks' metrics, before a model runs.

Only mistakes that are certain before the run are found here. The responses may show which metric
decides and whether it is a share. Therefore `decide` checks everything again.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vexport.calibration.data import require_rows
from vexport.errors import InputError, raise_all
from vexport.inference.options import EngineOptions
from vexport.inference.requested_tasks import fetch_tasks, prepare_tasks
from vexport.inference.tasks import TaskMetrics
from vexport.judge.margin_checks import wrong_kind
from vexport.judge.pairs import PREFERRED_METRICS, SHARES, no_such_metric, unknown_names
from vexport.records.chosen_metric import parse_chosen_metric
from vexport.records.margin import EVERY_TASK, Margin, Margins, MarginSetting
from vexport.scenario import Evaluate
from vexport.scores.aggregates import WHOLE_CORPUS_AGGREGATIONS
from vexport.scores.comparable_results import read_comparable, require_comparable_results
from vexport.scores.metrics import (
    AGGREGATIONS,
    LOG_LIKELIHOODS,
    MEANS,
    is_no_share,
)
from vexport.scores.readers.accepted import read_accepted_table
from vexport.scores.table import ScoreTable

_NOT_SHARES = WHOLE_CORPUS_AGGREGATIONS | LOG_LIKELIHOODS


def check_tasks(
    settings: Evaluate,
    options: EngineOptions,
    *,
    against: Path | None = None,
    given: Sequence[Path] = (),
) -> None:
    """Raise errors, before a model runs, if the tasks or the text cannot be used or compared.

    Margins and gates must fit the tasks. `given` results and the accepted baseline `against` must
    contain the tasks' documents. Nothing is downloaded.
    """
    if text := settings.held_out():
        require_rows(text)
    prepared = prepare_tasks(settings, options)
    accepted = None if against is None else read_accepted_table(against)
    for table in (*map(read_comparable, given if prepared.tasks else ()), accepted):
        if table is not None:
            require_comparable_results(table, prepared.names, prepared.exact_names, settings.limit)
    _require_fitting(settings, prepared.metrics, accepted)


def download_tasks(
    settings: Evaluate, options: EngineOptions, *, against: Path | None = None
) -> None:
    """Download the documents of checked tasks into the cache.

    lm-eval also looks up the metrics of tasks that are given by name. Raises InputError if the
    margins or gates do not fit them.
    """
    metrics = fetch_tasks(prepare_tasks(settings, options), settings, options)
    _require_fitting(settings, metrics, None if against is None else read_accepted_table(against))


def _require_fitting(
    settings: Evaluate, metrics: Sequence[TaskMetrics], accepted: ScoreTable | None
) -> None:
    if accepted is None:
        require_valid_settings(settings, metrics)
    else:
        require_valid_against(settings.margin, metrics, accepted)


def require_valid_settings(settings: Evaluate, tasks: Sequence[TaskMetrics]) -> None:
    """Raise InputError if a margin or gate certainly does not fit its task, or its task is unknown.

    The error lists the problems of all tasks. `tasks` are all tasks of the evaluation, or nothing
    if their metrics are not known yet.
    """
    if not tasks:
        return
    names = [task.name for task in tasks]
    margins = Margins.read(settings.margin)
    problems = [
        *unknown_names("margin", margins.by_task, names),
        *unknown_names("gate", settings.gate, names),
        *_unknown_gates(settings.gate, tasks),
    ]
    for task in tasks:
        problems += _wrong_kinds(task, margins.given(task.name), settings.gate)
    raise_all(problems)


def require_valid_against(
    margin: MarginSetting, tasks: Sequence[TaskMetrics], accepted: ScoreTable
) -> None:
    """Raise InputError if a margin or a task does not fit the accepted baseline.

    A margin does not fit if it is relative and the accepted metric needs points, or the reverse. A
    task does not fit if it no longer has the accepted metric. The error lists the problems of all
    tasks. `tasks` are all tasks of the evaluation, or nothing if their metrics are not known yet.
    """
    margins = Margins.read(margin)
    gates = accepted.gates
    problems = [
        *unknown_names("margin", margins.by_task, [*gates]),
        *_missing_metrics(tasks, accepted),
    ]
    for name, gate in gates.items():
        metric = parse_chosen_metric(gate).metric
        is_share = _is_accepted_share(accepted, name, metric)
        if is_share is not None:
            problems += wrong_kind(name, metric, margins.given(name), is_share=is_share)
    raise_all(problems)


def _missing_metrics(tasks: Sequence[TaskMetrics], accepted: ScoreTable) -> Iterator[InputError]:
    for task in tasks:
        old = accepted.tasks.get(task.name)
        metrics = next(iter(old.rows.values())).scores if old is not None else ()
        for metric in (metric for metric in metrics if _certainly_lacks(task, metric)):
            yield no_such_metric(f"task {task.name}, as accepted", metric, [*task.metrics])


def _is_accepted_share(accepted: ScoreTable, name: str, metric: str) -> bool | None:
    """Return whether an accepted metric is a share, or None if only the responses show it."""
    if metric in SHARES:
        return True
    members = accepted.groups.get(name, (name,))
    for member in members:
        for row in accepted.tasks[member].rows.values():
            if not all(0 <= score <= 1 for score in row.scores.values()):
                return False
    return False if is_no_share(metric) else None


def _unknown_gates(gates: Mapping[str, str], tasks: Sequence[TaskMetrics]) -> Iterator[InputError]:
    for task in tasks:
        gate = gates.get(task.name)
        if gate is not None and _certainly_lacks(task, gate):
            yield no_such_metric(f"gate of task {task.name}", gate, [*task.metrics])
    everywhere = gates.get(EVERY_TASK)
    if everywhere is not None and all(_certainly_lacks(task, everywhere) for task in tasks):
        known = dict.fromkeys(metric for task in tasks for metric in task.metrics)
        yield no_such_metric("gate", everywhere, [*known])


def _certainly_lacks(task: TaskMetrics, gate: str) -> bool:
    """Return True if a task certainly does not have the chosen metric.

    Return False if the task has Python code or metrics from outside lm-eval, because these may
    record further metrics when the task runs.
    """
    is_complete = not task.has_code and task.metrics.keys() <= AGGREGATIONS.keys()
    return is_complete and parse_chosen_metric(gate).metric not in task.metrics


def _wrong_kinds(
    task: TaskMetrics, margin: Margin | None, gates: Mapping[str, str]
) -> Iterator[InputError]:
    """Yield an error if the margin is relative and the deciding metric needs points, or reversely.

    Nothing is yielded if no metric is known, or if several metrics may decide and they need
    different kinds of margins.
    """
    metrics = _possible_gates(task, gates)
    kinds = {_is_share(metric, task.metrics.get(metric, "")) for metric in metrics}
    is_share = kinds.pop() if len(kinds) == 1 else None
    if is_share is not None:
        yield from wrong_kind(task.name, metrics[0], margin, is_share=is_share)


def _possible_gates(task: TaskMetrics, gates: Mapping[str, str]) -> list[str]:
    """Return the metrics that may decide, the most likely metric first."""
    if task.name in gates:
        return [parse_chosen_metric(gates[task.name]).metric]
    everywhere = gates.get(EVERY_TASK)
    if everywhere is not None and parse_chosen_metric(everywhere).metric in task.metrics:
        return [parse_chosen_metric(everywhere).metric]
    preferred = [metric for metric in PREFERRED_METRICS if metric in task.metrics]
    return preferred[:1] or [*task.metrics]


def _is_share(metric: str, aggregation: str) -> bool | None:
    """Return True if a metric is a share of correct responses, and False if it is not.

    Return None if this can only be decided from the metric's values.
    """
    name = aggregation or AGGREGATIONS.get(metric, "")
    if name in _NOT_SHARES or is_no_share(metric):
        return False
    return True if metric in SHARES and name in MEANS else None
