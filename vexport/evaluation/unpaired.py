"""Two models' means on a task whose samples are missing: nothing is paired, so that far more is needed.

The difference of two independent means has the variance of both; pairing removes what the models share.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scipy import stats

from vexport.errors import InputError
from vexport.evaluation.pairs import different_direction
from vexport.evaluation.results import Results, Summary
from vexport.evaluation.statistics import Interval, normal_quantile, wilson_interval

UNIT_METRICS = frozenset(
    ("acc", "acc_norm", "acc_bytes", "exact_match", "em", "pass@1", "pass_at_1", "f1", "mc1", "mc2")
)
"""Metrics of one number in [0, 1] a document: their variance is at most mean * (1 - mean) (Bhatia and
Davis, American Mathematical Monthly 107, 2000), which stands in where lm-eval wrote no standard error."""

USUAL_DISAGREEMENT = 0.05
"""Share of documents whose correctness changes that the cost of missing samples is told for."""

SIDES = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpairedTask:
    """Both models' means on one task, metric and filter; `sign` is -1 where lower is better.

    `variances` are of one document, (baseline, candidate).
    """

    task: str
    metric: str
    filter: str
    sign: int
    documents: tuple[int, int]
    means: tuple[float, float]
    variances: tuple[float, float]
    binary: bool

    @property
    def difference(self) -> float:
        """How much better the candidate is."""
        return self.sign * (self.means[1] - self.means[0])

    @property
    def key(self) -> tuple[str, str, int]:
        """What must agree for tasks to be joined."""
        return self.metric, self.filter, self.sign

    def interval(self, alpha: float) -> Interval:
        """One-sided 1 - alpha bounds of the difference.

        Newcombe's hybrid of two Wilson intervals for shares (Statistics in Medicine 17, 1998, method 10 of
        the unpaired ones), else the normal interval with both standard errors.
        """
        if not self.binary:
            spread = normal_quantile(alpha) * self.stderr
            return Interval(self.difference - spread, self.difference + spread)
        (low1, high1), (low2, high2) = (
            wilson_interval(min(n, mean * n), n, alpha)
            for mean, n in zip(self.means, self.documents, strict=True)
        )
        old, new = self.means
        low = new - old - math.hypot(new - low2, high1 - old)
        high = new - old + math.hypot(high2 - new, old - low1)
        return Interval(low, high) if self.sign > 0 else Interval(-high, -low)

    @property
    def stderr(self) -> float:
        """Standard error of the difference."""
        return math.sqrt(sum(v / n for v, n in zip(self.variances, self.documents, strict=True)))

    @property
    def cost(self) -> float | None:
        """How many times fewer documents the paired test needs at USUAL_DISAGREEMENT; None if not 0/1."""
        return sum(self.variances) / USUAL_DISAGREEMENT if self.binary else None

    def statistic(self, against: float) -> float:
        """Standard normal where the true difference is `against`; 0 where nothing is known of the spread."""
        return (self.difference - against) / self.stderr if self.stderr else 0.0

    def p_value(self) -> float:
        """Two-sided, of no difference."""
        return float(2 * stats.norm.sf(abs(self.statistic(0.0))))


def unpaired_metrics(baseline: Results, candidate: Results, task: str) -> Iterator[UnpairedTask]:
    """Yield every (metric, filter) whose mean both runs have, with a standard error or in [0, 1].

    InputError where a metric has neither, and no other metric of the task has.
    """
    left = {(member.metric, member.filter): member for member in baseline.summaries[task]}
    right = {(member.metric, member.filter): member for member in candidate.summaries[task]}
    shared = [key for key in left if key in right]
    tasks = [member for key in shared if (member := _unpaired(left[key], right[key]))]
    if not tasks:
        got = "no samples, and no mean with a standard error in both results"
        where, fix = f"{candidate.file}: task {task}", "evaluate again with --log_samples"
        raise InputError(where, got=got, need="samples, or mean, standard error and n", fix=fix)
    yield from tasks


def join_unpaired(name: str, members: Sequence[UnpairedTask]) -> UnpairedTask:
    """The documents of several tasks as one task's: means and variances weighted by documents."""
    documents = [sum(member.documents[side] for member in members) for side in SIDES]
    means = [
        sum(member.means[side] * member.documents[side] for member in members) / documents[side]
        for side in SIDES
    ]
    variances = [
        sum(member.variances[side] * member.documents[side] for member in members) / documents[side]
        for side in SIDES
    ]
    if binary := all(member.binary for member in members):
        variances = [mean * (1 - mean) for mean in means]
    return UnpairedTask(
        task=name,
        metric=members[0].metric,
        filter=members[0].filter,
        sign=members[0].sign,
        documents=(documents[0], documents[1]),
        means=(means[0], means[1]),
        variances=(variances[0], variances[1]),
        binary=binary,
    )


def _unpaired(left: Summary, right: Summary) -> UnpairedTask | None:
    if left.higher_is_better != right.higher_is_better:
        raise different_direction(f"task {right.task}", right.metric)
    variances = [variance for member in (left, right) if (variance := _variance(member)) is not None]
    if len(variances) < 2:
        return None
    return UnpairedTask(
        task=left.task,
        metric=left.metric,
        filter=left.filter,
        sign=1 if left.higher_is_better else -1,
        documents=(left.documents, right.documents),
        means=(left.value, right.value),
        variances=(variances[0], variances[1]),
        binary=_is_share(left) and _is_share(right),
    )


def _variance(member: Summary) -> float | None:
    """Of one document, from the standard error; without one its bound where the metric is known."""
    if member.stderr:
        return member.stderr**2 * member.documents
    inside = member.metric in UNIT_METRICS and 0 <= member.value <= 1
    return member.value * (1 - member.value) if inside else None


def _is_share(member: Summary) -> bool:
    """Whether each document is right or wrong: only then the standard error is sqrt(p (1 - p) / (n - 1)).

    Without one, a metric in [0, 1] is taken for a share, whose variance is the greatest.
    """
    if not 0 <= member.value <= 1:
        return False
    if member.stderr is None:
        return member.metric in UNIT_METRICS
    expected = math.sqrt(member.value * (1 - member.value) / max(1, member.documents - 1))
    return math.isclose(member.stderr, expected, rel_tol=0.01, abs_tol=1e-6) and _is_count(member)


def _is_count(member: Summary) -> bool:
    """Whether mean times documents is a whole number."""
    right = member.value * member.documents
    return abs(right - round(right)) < 1e-3 * max(1.0, math.sqrt(member.documents))
