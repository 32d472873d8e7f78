"""Find the direction and unit of a metric's values, from the metric's aggregation.

lm-eval's `higher_is_better` describes the aggregate (lm_eval/api/metrics.py, 0.4.13). For a mean it
also describes the documents' values. `perplexity` is exp(-mean) of log-likelihoods: a lower
perplexity is better, but a higher log-likelihood is better. Metrics without one number for each
document are in `aggregates.py`.

A direction has one of these sources, in this order: the harness recorded it, or the user stated it
(`--gate score:lower`), or the metric's name defines it (`known_direction`). Otherwise "higher is
better" is assumed, and the verdict contains "direction assumed".
"""

import math
import re
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
# Metrics that are not a share, and for which lower is better.
_COSTS = (
    *("bits_per_byte", "brier_score", "byte_perplexity", "loss", "nll", "perplexity", "ppl"),
    *("ter", "word_perplexity"),
)
_LOWER_IS_BETTER = (*_COSTS, "cer", "edit_distance", "error", "error_rate", "wer")
_HIGHER_IS_BETTER = (
    *("acc", "acc_all", "acc_bytes", "acc_mutual_info", "acc_norm", "accuracy", "bleu", "chrf"),
    *("chrf++", "exact_match", "f1", "likelihood", "mcc", "pass@1", "pass_at_1"),
)
_SEPARATORS = re.compile(r"[\s_./-]+")
_EQUAL = 1e-6
# exp(-x) is infinite below this log-likelihood.
_LOWEST = -700.0


def _plain_name(metric: str) -> str:
    return _SEPARATORS.sub("", metric.casefold())


_DIRECTIONS = {
    _plain_name(name): higher_is_better
    for names, higher_is_better in ((_HIGHER_IS_BETTER, True), (_LOWER_IS_BETTER, False))
    for name in names
}
_NO_SHARES = frozenset(map(_plain_name, (*_COSTS, "likelihood")))


def known_direction(metric: str) -> bool | None:
    """Return whether higher is better by the definition of a metric with this name.

    Whole names are compared, without case and separators: `WER` is `wer`, but `error_free` is not
    `error`. Return None for all other names.
    """
    return _DIRECTIONS.get(_plain_name(metric))


def is_no_share(metric: str) -> bool:
    """Return True for a metric that is not a share of correct responses, in any spelling.

    Such a metric is no share even if all values are between 0 and 1.
    """
    return _plain_name(metric) in _NO_SHARES


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricKind:
    """Direction and unit of a metric's values for single documents.

    `is_assumed` is True if nothing states the direction. `in_nats` is True for log-likelihoods, and
    `is_perplexity` if the aggregate is exp(-mean) of them. `undecided` is the reason why the metric
    cannot decide a verdict, empty if it can.
    """

    higher_is_better: bool
    is_assumed: bool = False
    in_nats: bool = False
    is_perplexity: bool = False
    undecided: str = ""


def kind_of_metric(
    aggregation: str | None,
    *,
    higher_is_better: bool | None,
    values: Sequence[float],
    log_likelihoods: Sequence[float | None],
    aggregate: float | None,
) -> MetricKind:
    """Return the direction and unit of the documents' `values`, from the metric's `aggregation`.

    `higher_is_better` and `aggregate` describe the whole task, and are None if they are unknown. An
    unknown direction is assumed, unless the values are log-likelihoods. `log_likelihoods` are the
    logged responses of the same documents, None for generated text.
    """
    if aggregation in LOG_LIKELIHOODS or _are_equal(values, log_likelihoods):
        is_perplexity = aggregation == "perplexity" or _is_perplexity(values, aggregate)
        return MetricKind(higher_is_better=True, in_nats=True, is_perplexity=is_perplexity)
    if _are_equal([-value for value in values], log_likelihoods):
        return MetricKind(higher_is_better=False, in_nats=True)
    is_mean = aggregation in MEANS or aggregate is None or _is_mean(values, aggregate)
    return MetricKind(
        higher_is_better=higher_is_better is not False,
        is_assumed=higher_is_better is None,
        undecided="" if is_mean else _NO_MEAN,
    )


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
    if aggregate is None or not all(map(math.isfinite, values)):
        return False
    mean = math.fsum(values) / len(values)
    return mean > _LOWEST and math.isclose(math.exp(-mean), aggregate, rel_tol=_EQUAL)


def _is_mean(values: Sequence[float], aggregate: float) -> bool:
    if not all(map(math.isfinite, values)):
        return True  # values that are not finite are reported as another error
    return math.isclose(math.fsum(values) / len(values), aggregate, rel_tol=_EQUAL, abs_tol=_EQUAL)
