"""Accept a model: write its scores as a baseline for later checkpoints, and describe them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from vexport.errors import InputError
from vexport.files import to_json, write_text
from vexport.inference.questions import QuestionDigests
from vexport.judge.lost import count_answers, lost_answers_text
from vexport.judge.margin_checks import require_fitting
from vexport.judge.pairs import TaskPair, gated_tasks
from vexport.records import Answers
from vexport.records.chosen_metric import Choice
from vexport.records.margin import Margins, MarginSetting
from vexport.rules import baseline as rules
from vexport.scores.metrics import is_no_share
from vexport.scores.readers.accepted import (
    Accepted,
    AcceptedTask,
    accepted_task,
    is_accepted,
    read_accepted_table,
    rounded_mean,
)
from vexport.scores.readers.lm_eval import read_lm_eval
from vexport.scores.settings import without_model
from vexport.scores.table import ScoreTable, TaskTable


def require_writable(path: Path) -> None:
    """Raise InputError if `path` must not be replaced: it exists and is no accepted baseline."""
    if path.exists() and (path.is_dir() or not is_accepted(path)):
        raise InputError.of(rules.OTHER_FILE, str(path))


def accept_results(
    folder: Path,
    path: Path,
    choice: Choice,
    settings: Mapping[str, JsonValue] | None = None,
    *,
    margin: MarginSetting = None,
    checkpoint: str = "",
    accepted_at: str = "",
) -> ScoreTable:
    """Write the scores of the deciding metrics from an lm-eval output folder to `path`.

    `choice` names the deciding metrics, as in `gated_tasks`. `settings` are the settings of the
    evaluation, if they are known. `margin` is the acceptable loss of later candidates. `checkpoint`
    is the name of the model, and `accepted_at` is the time. The file is written completely or not
    at all. Returns its scores.
    """
    require_writable(path)
    results = read_lm_eval(folder)
    tasks: dict[str, AcceptedTask] = {}
    groups: dict[str, tuple[str, ...]] = {}
    gates = gated_tasks(results, results, choice)
    for gate in gates:
        members = (gate.task,) if gate.task in results.tasks else results.groups[gate.task]
        if gate.task not in results.tasks:
            groups[gate.task] = members
        tasks |= {name: _accepted_task(results, name, gate) for name in members}
    margins = Margins.read(margin)
    require_fitting(gates, margins)
    accepted = Accepted(
        accepted=accepted_at,
        checkpoint=checkpoint,
        settings=settings,
        margin=margins.to_store({gate.task: gate.unit for gate in gates}),
        fingerprint=without_model(results.fingerprint),
        groups=groups,
        tasks=tasks,
    )
    write_text(path, to_json(accepted))
    return read_accepted_table(path)


def _accepted_task(results: ScoreTable, name: str, gate: TaskPair) -> AcceptedTask:
    where = f"{results.file}: task {name}"
    rows = sorted(results.tasks[name].after(gate.filter), key=lambda row: row.number)
    found = ""
    if any(row.seed for row in rows):
        found = "several responses to a document"
    elif rows[-1].number - rows[0].number >= len(rows):
        found = "gaps in the document numbers"
    elif not all(gate.metric in row.scores for row in rows):
        found = f"{gate.metric}, which lm-eval computes from all documents at once"
    if found:
        raise InputError.of(rules.ROWS, where, found=found, metric=gate.metric)
    return accepted_task(rows, gate.metric, _stated_direction(results.tasks[name], gate))


def _stated_direction(task: TaskTable, gate: TaskPair) -> bool | None:
    if gate.direction_assumed:
        return None
    return gate.sign > 0 if gate.own_unit is None else task.direction(gate.metric)


def expected_questions(accepted: ScoreTable) -> QuestionDigests:
    """Return the digest of each accepted question, by task and document."""
    return {
        name: {str(row.doc_id): row.digest for row in task.rows.values()}
        for name, task in accepted.tasks.items()
    }


def lost_answers(accepted: ScoreTable, alpha: float) -> tuple[str, ...]:
    """Describe lost and unparsed responses, for each task in which they reach 1 %."""
    described = []
    for name, task in accepted.tasks.items():
        rows = [*task.rows.values()]
        endings = [row.ending for row in rows if row.ending is not None]
        if len(endings) < len(rows):
            continue
        scores = np.array([score for row in rows for score in row.scores.values()])
        sign = -1 if False in task.higher_is_better.values() else 1
        counts = count_answers(endings, scores, sign=sign, alpha=alpha)
        if words := lost_answers_text(Answers(baseline=None, candidate=counts)):
            described.append(f"{name}: {words}")
    return tuple(described)


def accepted_scores_text(accepted: ScoreTable) -> str:
    """Return the accepted scores: `addition (exact_match,none) 99.6% of 1,382 documents`."""
    return "; ".join(_scores_text(task) for task in accepted.tasks.values())


def _scores_text(task: TaskTable) -> str:
    """Return the mean score: in per cent if the metric is a share, else as a number."""
    row = next(iter(task.rows.values()))
    (metric,) = row.scores
    scores = [row.scores[metric] for row in task.rows.values()]
    mean = rounded_mean(scores)
    is_share = not is_no_share(metric) and all(0 <= score <= 1 for score in scores)
    shown = f"{mean:.1%}" if is_share else f"{mean:.4g}"
    return f"{task.task} ({metric},{row.filter}) {shown} of {len(scores):,} documents"
