"""Two models' means on a task whose samples are missing: nothing is paired, so that far more is needed.

The difference of two independent means has the variance of both; pairing removes what the models share.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scipy import stats

from vexport.errors import InputError
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
    left = {(one.metric, one.filter): one for one in baseline.summaries[task]}
    right = {(one.metric, one.filter): one for one in candidate.summaries[task]}
    shared = [key for key in left if key in right]
    made = [one for key in shared if (one := _unpaired(left[key], right[key]))]
    if not made:
        got = "no samples, and no mean with a standard error in both results"
        place, fix = f"{candidate.file}: task {task}", "evaluate again with --log_samples"
        raise InputError(place, got=got, need="samples, or mean, standard error and n", fix=fix)
    yield from made


def join_unpaired(name: str, members: Sequence[UnpairedTask]) -> UnpairedTask:
    """The documents of several tasks as one task's: means and variances weighted by documents."""
    documents = [sum(one.documents[side] for one in members) for side in SIDES]
    means = [
        sum(one.means[side] * one.documents[side] for one in members) / documents[side] for side in SIDES
    ]
    variances = [
        sum(one.variances[side] * one.documents[side] for one in members) / documents[side] for side in SIDES
    ]
    if binary := all(one.binary for one in members):
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
    variances = [variance for one in (left, right) if (variance := _variance(one)) is not None]
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


def _variance(one: Summary) -> float | None:
    """Of one document, from the standard error; without one its bound where the metric is known."""
    if one.stderr:
        return one.stderr**2 * one.documents
    inside = one.metric in UNIT_METRICS and 0 <= one.value <= 1
    return one.value * (1 - one.value) if inside else None


def _is_share(one: Summary) -> bool:
    """Whether each document is right or wrong: only then the standard error is sqrt(p (1 - p) / (n - 1)).

    Without one, a metric in [0, 1] is taken for a share, whose variance is the greatest.
    """
    if not 0 <= one.value <= 1:
        return False
    if one.stderr is None:
        return one.metric in UNIT_METRICS
    expected = math.sqrt(one.value * (1 - one.value) / max(1, one.documents - 1))
    return math.isclose(one.stderr, expected, rel_tol=0.01, abs_tol=1e-6) and _is_count(one)


def _is_count(one: Summary) -> bool:
    """Whether mean times documents is a whole number."""
    right = one.value * one.documents
    return abs(right - round(right)) < 1e-3 * max(1.0, math.sqrt(one.documents))
