"""Scores, their comparison and the verdict."""

from dataclasses import dataclass
from typing import Literal

from vexport.types.prompting import Prompting
from vexport.types.signals import Attribution, Drift
from vexport.types.values import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One model's mean score on one task, with a two-sided 1 - 2*alpha interval.

    Wilson's interval where each document is right or wrong, else a bootstrap in the metric's own units.
    """

    task: str
    metric: str
    filter: str
    documents: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A document whose correctness changed, with both answers."""

    doc_id: int
    prompt: str
    target: str
    baseline: str
    candidate: str
    direction: Literal["right to wrong", "wrong to right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A difference that is shown next to a gate and decides nothing.

    `baseline` and `candidate` are means; `difference` is positive where the candidate is better, with
    one-sided 1 - alpha bounds; `outcome` is what they would say as a gate.
    """

    task: str
    metric: str
    filter: str
    documents: int
    baseline: float
    candidate: float
    difference: float
    low: float
    high: float
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVerdict:
    """The comparison on one task, or on a group of tasks that lm-eval aggregates.

    `difference` is candidate minus baseline, negative where the candidate is worse; (`low`, `high`) are the
    one-sided bounds that decide: `low` at 1 - alpha, `high` at 1 - alpha or, with several tasks, at the
    level of Holm's step. `recovery` is candidate / baseline, None where the baseline scores 0.
    `documents_needed` would settle an INCONCLUSIVE; None where no number would, or nothing is open.
    Where the metric is not 0/1, right to wrong counts the documents that got worse and `mcnemar_p` is of a
    permutation test. What only paired documents show is None where the samples are missing;
    `changed_wrong` also where the baseline's answers are. `clusters` counts the tasks of a group whose
    documents are clustered, None where documents count on their own. `also` has the task's other metrics
    and filters, and a group's tasks.
    """

    task: str
    metric: str
    filter: str
    outcome: Outcome
    documents: int
    baseline: Score
    candidate: Score
    difference: float
    low: float
    high: float
    right_to_wrong: int | None
    wrong_to_right: int | None
    changed_wrong: int | None
    flip_rate: float | None
    flip_low: float | None
    flip_high: float | None
    mcnemar_p: float | None
    recovery: float | None
    recovery_low: float | None
    recovery_high: float | None
    documents_needed: int | None
    flips: tuple[Flip, ...]
    clusters: int | None = None
    also: tuple[Comparison, ...] = ()


TextMeasure = Literal["KL to the baseline", "rise of the NLL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimit:
    """One measure of held-out text against its limit, in nats a token.

    (`low`, `high`) are the bounds that decide: `high` at 1 - alpha, `low` at 1 - alpha / 2, since either of
    two measures may fail; None of one row. `rows_needed` would settle an INCONCLUSIVE, None where no number
    would.
    """

    measure: TextMeasure
    value: float
    low: float | None
    high: float | None
    limit: float
    outcome: Outcome
    rows_needed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextVerdict:
    """Both models' log-probabilities of held-out text, where that decides instead of tasks.

    The NLLs are means over `tokens`, and `top1_agreement` is the share of them with the same likeliest token
    (two-sided 1 - 2*alpha interval over rows); the KL is over the `positions` whose whole vocabulary was
    compared, the first of each row. `limits` is empty where the text is too short to decide.
    """

    data: str
    digest: str
    rows: int
    tokens: int
    positions: int
    baseline_nll: float
    candidate_nll: float
    top1_agreement: float
    top1_low: float | None
    top1_high: float | None
    limits: tuple[TextLimit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One answer for all tasks, with the sentence that justifies it.

    `pooled` takes all documents as one task, None where there is one task or a metric is not 0/1.
    `warnings` say what weakens the answer: samples that are missing, an environment that changed.
    `prompting` says how the documents were asked, None in reports that were written before it was recorded.
    `drift` and `attribution` are what
    `vexport eval` measured apart from the tasks; a run has its own in its report. `device` ran the candidate
    (`CPU, emulated`), empty where its results do not tell. `text` decides where there are no tasks: `margin`
    is then the limit of the NLL.
    """

    outcome: Outcome
    reason: str
    margin: float
    alpha: float
    method: str
    tasks: tuple[TaskVerdict, ...]
    device: str = ""
    pooled: Comparison | None = None
    warnings: tuple[str, ...] = ()
    prompting: Prompting | None = None
    drift: Drift | None = None
    attribution: Attribution | None = None
    text: TextVerdict | None = None
