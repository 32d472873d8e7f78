"""Compare two models by a metric of a whole corpus: a paired bootstrap over documents.

Each resample draws documents with replacement, the same documents for both models. Both models'
metrics are computed from the sums over the drawn documents. Bounds come from the BCa bootstrap
(Efron, JASA 82, 1987), or from Student's distribution with the jackknife's standard error if
Student's bounds are wider. A bootstrap of few documents alone would be too narrow. Student's
bounds take into account that few documents may have most of the influence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vexport.judge.resampling import (
    MOST_DRAWN,
    RESAMPLES,
    bca_bounds,
    drawn_documents,
    grouped_sums,
)
from vexport.judge.statistics import Clusters, Interval, student_reach, tango_interval
from vexport.scores.aggregates import CorpusTable, Measure, NotReadable, Scores

LEAST_DOCUMENTS = 8
"""Minimum number of documents for PASS. Fewer documents do not represent other documents."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CorpusComparison:
    """Both models' values of a metric of a whole corpus, and the values of resampled corpora.

    - `values` are the measures of the baseline and the candidate, such as mean log-likelihoods.
      `reported` are the values that lm-eval reports for them, such as perplexities.
    - `resampled` has the measures of resampled corpora, shape (2, resamples).
    - `jackknife` has the measures without one unit, for each unit, shape (2, units). A unit is a
      document with all its responses.
    - `influence` has the contribution of each response to the measures, shape (2, responses). The
      mean of the contributions is the measure.
    - `changes` has, for each response, the change of the baseline's measure if only this response
      is replaced by the candidate's, shape (responses,). Positive is better.
    - `scored` is 1 for each response that is at least partly correct, else 0, shape (2, responses).
    - `change_size` is the typical change of the measure after one response changes, times the
      number of responses. It is 0 for log-likelihoods and probabilities (see `_change_size`).
    """

    table: CorpusTable
    values: tuple[float, float]
    reported: tuple[float, float]
    resampled: Scores
    jackknife: Scores
    influence: Scores
    changes: Scores
    scored: Scores
    change_size: float

    def difference_interval(self, alpha: float) -> Interval:
        """Return bounds of candidate minus baseline. Positive is better."""
        sign = 1.0 if self.table.higher_is_better else -1.0
        difference = sign * (self.values[1] - self.values[0])
        resampled = sign * (self.resampled[1] - self.resampled[0])
        jackknife = sign * (self.jackknife[1] - self.jackknife[0])
        low, high = bootstrap_bounds(
            difference, resampled, jackknife, alpha, is_uneven=self.table.is_uneven
        )
        # Even if no response in the sample changed, responses to other documents may change (see
        # `bootstrap_interval`).
        quiet = tango_interval(0, 0, len(jackknife), alpha)
        low = min(low, difference + self.change_size * quiet.low)
        high = max(high, difference + self.change_size * quiet.high)
        return Interval(low, high)

    def shown_interval(self, side: int, alpha: float) -> Interval:
        """Return bounds of one model's aggregate. `side` is 0 for the baseline."""
        ends = bootstrap_bounds(
            self.values[side],
            self.resampled[side],
            self.jackknife[side],
            alpha,
            is_uneven=self.table.is_uneven,
        )
        low, high = sorted(self.table.to_aggregate(end) for end in ends)
        return Interval(low, high)


def compare_corpora(
    table: CorpusTable, clusters: Clusters | None = None, *, resamples: int = RESAMPLES
) -> CorpusComparison:
    """Draw `resamples` resampled corpora from the documents of a table.

    `clusters` has the number of each response's document if documents have several responses. All
    responses to a document are then drawn together.

    Raises:
        NotReadable: If the metric cannot be computed after one document is left out, for example
        because this document contains all words.
    """
    left, right = table.baseline, table.candidate
    totals = left.sum(axis=0), right.sum(axis=0)
    values = float(table.measure(totals[0])), float(table.measure(totals[1]))
    units = [_by_unit(side, clusters) for side in (left, right)]
    with np.errstate(divide="ignore", invalid="ignore"):
        influence = np.stack(
            [
                _influence(table.measure, side, total)
                for side, total in zip((left, right), totals, strict=True)
            ]
        )
        jackknife = np.stack(
            [table.measure(total - side) for side, total in zip(units, totals, strict=True)]
        )
        changes = table.measure(totals[0] - left + right) - values[0]
        resampled = _resample(table.measure, units, jackknife, resamples)
    if not np.isfinite(jackknife).all() or not np.isfinite(values).all():
        raise NotReadable("it cannot be computed if one of the documents is left out")
    is_changed = (left != right).any(axis=1)
    sign = 1.0 if table.higher_is_better else -1.0
    return CorpusComparison(
        table=table,
        values=values,
        reported=(table.to_aggregate(values[0]), table.to_aggregate(values[1])),
        resampled=resampled,
        jackknife=jackknife,
        influence=influence,
        changes=np.where(is_changed, sign * changes, 0.0),
        scored=np.stack([table.scored(left), table.scored(right)]),
        change_size=_change_size(table, totals[0], values[0], influence[0]),
    )


def _by_unit(rows: Scores, clusters: Clusters | None) -> Scores:
    if clusters is None:
        return rows
    sums = np.zeros((int(clusters.max()) + 1, rows.shape[1]))
    np.add.at(sums, clusters, rows)
    return sums


def _influence(measure: Measure, rows: Scores, total: Scores) -> Scores:
    """Return each response's contribution to the measure, by the jackknife, shape (responses,).

    The mean of the contributions is the measure. To first order, their spread gives the standard
    error of the measure (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 11).
    """
    without = measure(total - rows)
    parts: Scores = measure(total) + (len(rows) - 1) * (without.mean() - without)
    return parts


def worst_influence(table: CorpusTable) -> Scores | None:
    """Return the contributions of the worst possible responses, or None if there are none."""
    if table.worst is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return _influence(table.measure, table.worst, table.worst.sum(axis=0))


def _change_size(table: CorpusTable, total: Scores, value: float, influence: Scores) -> float:
    """Return the size of a typical change of one response, times the number of responses.

    For metrics of correct and wrong responses, the typical change replaces a response by
    `table.flipped`. For generated text, it is the typical distance of a contribution from the mean.
    The score of a changed text is assumed to differ about as much as the score of another
    document's text. For log-likelihoods and probabilities it is 0: they differ if the models differ
    at all, so equal values show that nothing changed.
    """
    if table.flipped is not None:
        changed = table.measure(total - table.baseline + table.flipped)
        return float(np.abs(changed - value).mean()) * len(changed)
    return float(np.abs(influence - value).mean()) if table.is_text else 0.0


def _resample(
    measure: Measure, units: Sequence[Scores], jackknife: Scores, resamples: int
) -> Scores:
    """Return the measures of resampled corpora, shape (2, resamples).

    Both models get the same documents. `jackknife` has the measures without each document.
    """
    count, width = len(units[0]), units[0].shape[1]
    joined = np.concatenate(units, axis=1)
    if count > MOST_DRAWN:
        sums = grouped_sums(joined, jackknife[1] - jackknife[0], resamples)
    else:
        parts = []
        for drawn in drawn_documents(count, resamples):
            many = len(drawn)
            drawn += np.arange(many)[:, np.newaxis] * count
            times = np.bincount(drawn.ravel(), minlength=many * count).reshape(many, count)
            parts.append(times.astype(np.float64) @ joined)
        sums = np.concatenate(parts)
    return np.stack([measure(sums[:, :width]), measure(sums[:, width:])])


def bootstrap_bounds(
    value: float, resampled: Scores, jackknife: Scores, alpha: float, *, is_uneven: bool
) -> Interval:
    """Return one-sided 1 - alpha bounds of a value: the wider of BCa's and Student's.

    `resampled` has the values of resampled corpora. `jackknife` has the values after each document
    is left out. `is_uneven` is explained in `student_reach`.
    """
    low, high = _bca(value, resampled, jackknife, alpha)
    error = _standard_error(jackknife)
    influence = jackknife.mean() - jackknife
    below, above = student_reach(influence, alpha, is_uneven=is_uneven)
    return Interval(min(low, value - below * error), max(high, value + above * error))


def _standard_error(jackknife: Scores) -> float:
    count = len(jackknife)
    squares = float(((jackknife - jackknife.mean()) ** 2).sum())
    return math.sqrt((count - 1) / count * squares)


def _bca(value: float, resampled: Scores, jackknife: Scores, alpha: float) -> Interval:
    """Return BCa bounds. Values that are not finite are left out."""
    known = resampled[np.isfinite(resampled)]
    rounding = 1e-12 * max(1.0, abs(value))
    if not len(known) or np.ptp(known) <= rounding:
        return Interval(value, value)
    distances = jackknife.mean() - jackknife
    return Interval(*bca_bounds(value, known, distances, alpha, rounding=rounding))
