"""Find the direction and unit of a metric's values, from the metric's aggregation.

lm-eval's `higher_is_better` describes the aggregate (lm_eval/api/metrics.py, 0.4.13). For a mean it
also describes the documents' values. `perplexity` is exp(-mean) of log-likelihoods: a lower
perplexity is better, but a higher log-likelihood is better. Metrics without one number for each
document are in `aggregates.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AGGREGATIONS: Mapping[str, str] = {
    "acc": "mean",
    "acc_all": "acc_all",
    "acc_bytes": "mean",
    "acc_mutual_info": "mean",
    "acc_norm": "mean",
    "bits_per_byte": "bits_per_byte",
    "bleu": "bleu",
    "brier_score": "brier_score",
    "bypass": "bypass",
    "byte_perplexity": "weighted_perplexity",
    "chrf": "chrf",
    "chrf++": "chrf++",
    "exact_match": "mean",
    "f1": "f1",
    "likelihood": "mean",
    "mcc": "matthews_corrcoef",
    "perplexity": "perplexity",
    "ter": "ter",
    "word_perplexity": "weighted_perplexity",
}
"""lm-eval's metrics and the aggregations that lm-eval uses if a task names none."""
MEANS = frozenset(("mean", "nanmean", "median"))
"""Aggregations that rise with each document's value."""
LOG_LIKELIHOODS = frozenset(("perplexity", "weighted_perplexity", "bits_per_byte"))
"""Aggregations of log-likelihoods. They fall as the documents' values rise."""
NO_SHARES = frozenset(
    (
        "bits_per_byte",
        "brier_score",
        "byte_perplexity",
        "likelihood",
        "perplexity",
        "ter",
        "word_perplexity",
    )
)
"""Metrics that are not a share of correct responses, even if all values are between 0 and 1."""
_EQUAL = 1e-6
# exp(-x) is infinite below this log-likelihood.
_LOWEST = -700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricKind:
    """Direction and unit of a metric's values for single documents.

    `in_nats` is True for log-likelihoods, and `is_perplexity` if the aggregate is exp(-mean) of
    them. `undecided` is the reason why the metric cannot decide a verdict, empty if it can.
    """

    higher_is_better: bool
    in_nats: bool = False
    is_perplexity: bool = False
    undecided: str = ""


def kind_of_metric(
    aggregation: str | None,
    *,
    higher_is_better: bool,
    values: Sequence[float],
    log_likelihoods: Sequence[float | None],
    aggregate: float | None,
) -> MetricKind:
    """Return the direction and unit of the documents' `values`, from the metric's `aggregation`.

    `higher_is_better` and `aggregate` are lm-eval's records for the whole task. `aggregate` is None
    if it is unknown. `log_likelihoods` are the logged responses of the same documents, None for
    generated text.
    """
    if aggregation in LOG_LIKELIHOODS or _are_equal(values, log_likelihoods):
        is_perplexity = aggregation == "perplexity" or _is_perplexity(values, aggregate)
        return MetricKind(higher_is_better=True, in_nats=True, is_perplexity=is_perplexity)
    if _are_equal([-value for value in values], log_likelihoods):
        return MetricKind(higher_is_better=False, in_nats=True)
    if aggregation in MEANS or aggregate is None or _is_mean(values, aggregate):
        return MetricKind(higher_is_better=higher_is_better)
    return MetricKind(higher_is_better=higher_is_better, undecided=_NO_MEAN)


_NO_MEAN = "it is not the mean of its documents' values, so these do not show which model is better"
WHOLE_CORPUS = (
    "it is computed from all documents at once, by an aggregation that vexport does not have"
)


def _are_equal(values: Sequence[float], others: Sequence[float | None]) -> bool:
    """Return True if the values are the log-likelihoods of the same documents, and not all zero."""
    pairs = list(zip(values, others, strict=True))
    same = all(
        other is not None and math.isclose(value, other, rel_tol=_EQUAL, abs_tol=_EQUAL)
        for value, other in pairs
    )
    return same and any(values)


def _is_perplexity(values: Sequence[float], aggregate: float | None) -> bool:
    """Return True if the aggregate is exp(-mean) of the values."""
    if aggregate is None or not all(map(math.isfinite, values)):
        return False
    mean = math.fsum(values) / len(values)
    return mean > _LOWEST and math.isclose(math.exp(-mean), aggregate, rel_tol=_EQUAL)


def _is_mean(values: Sequence[float], aggregate: float) -> bool:
    if not all(map(math.isfinite, values)):
        return True  # values that are not finite are reported as another error
    return math.isclose(math.fsum(values) / len(values), aggregate, rel_tol=_EQUAL, abs_tol=_EQUAL)
