"""Compute lm-eval's metrics of a whole corpus from a few numbers for each document.

lm-eval computes these metrics from all documents at once (lm_eval/api/metrics.py, 0.4.13). Each
metric depends only on sums of these numbers over the documents:

| metric | numbers of a document |
|---|---|
| `perplexity` | log-likelihood, 1 |
| `word_perplexity`, `byte_perplexity`, `bits_per_byte` | log-likelihood, words or bytes |
| `brier_score` | squared error of the probabilities, 1 |
| `f1` | whether it is a true positive, a false positive, a false negative |
| `mcc` | its cell in the confusion matrix |
| `bleu`, `chrf`, `chrf++`, `ter` | sacrebleu's counts of n-grams or edits |

A bootstrap draws documents and adds their numbers. No text is tokenized again.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vexport.errors.extras import is_installed
from vexport.foreign import LARGEST_SCORE
from vexport.records import Json
from vexport.records.margin import Unit

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

Scores = NDArray[np.float64]
Marks = NDArray[np.bool_]
Labels = NDArray[np.int64]
Measure = Callable[[Scores], Scores]
"""Function from sums over documents, shape (..., numbers), to values of the metric, shape (...,).
"""
_NUMBERS = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf")


class NotReadable(Exception):
    """vexport cannot compute a metric from the values that lm-eval stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusTable:
    """Numbers of each document for both models, and the functions that compute a metric from them.

    If a document has several responses, it has a row for each response.

    - `baseline` and `candidate` have the shape (responses, numbers).
    - `measure` computes a value from sums over documents. The verdict is based on the difference
      between the two models' values.
    - `to_aggregate` converts a value of `measure` to lm-eval's aggregate.
    - `unit` is the unit of a difference, and `higher_is_better` is its direction.
    - `flipped` has the numbers that each row would have if the baseline's response changed from
      correct to wrong or back, shape (responses, numbers). It is None if the metric does not score
      responses as correct or wrong.
    - `worst` has the numbers of the worst possible responses, shape (responses, numbers), or is
      None if the metric has no worst value.
    - `is_text` is True if the metric scores generated text.
    - `scored` returns 1 for each response that is at least partly correct, else 0.
    """

    baseline: Scores
    candidate: Scores
    measure: Measure
    unit: Unit
    higher_is_better: bool
    to_aggregate: Callable[[float], float] = field(default=float)
    flipped: Scores | None = None
    worst: Scores | None = None
    is_text: bool = False
    scored: Callable[[Scores], Scores] = field(default=lambda rows: np.ones(len(rows)))

    @property
    def is_uneven(self) -> bool:
        """True if few documents may have most of the influence on the metric.

        A document may be much longer than others, or its probability or its text may change much
        more. A label is only correct or wrong.
        """
        return self.flipped is None


def tabulate(
    aggregation: str, metric: str, baseline: Sequence[Json], candidate: Sequence[Json]
) -> CorpusTable:
    """Return the table of a metric that lm-eval computes with `aggregation`.

    `baseline` and `candidate` are the values that lm-eval stored for the same documents.

    Raises:
        NotReadable: If the aggregation is unknown, if the stored values do not fit the aggregation,
        or if the metric needs sacrebleu and sacrebleu is not installed.
    """
    make = _TABLES.get(aggregation)
    if make is None:
        raise NotReadable(f"its aggregation {aggregation!r} is not lm-eval's")
    if aggregation in NEEDS_SACREBLEU and not is_installed("sacrebleu"):
        raise NotReadable("sacrebleu is not installed")
    try:
        return make(aggregation, metric, baseline, candidate)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise NotReadable(f"its values are not those of {aggregation}") from error


def log_likelihood_table(
    baseline: Scores, candidate: Scores, *, higher_is_better: bool, is_perplexity: bool
) -> CorpusTable:
    """Return the table of a metric with one log-likelihood (or its negative) for each document.

    The aggregate is exp(-mean) with `is_perplexity`, and the mean without it.
    """
    return CorpusTable(
        baseline=_with_ones(baseline),
        candidate=_with_ones(candidate),
        measure=_ratio,
        unit="nats",
        higher_is_better=higher_is_better,
        to_aggregate=_perplexity if is_perplexity else float,
    )


def _with_ones(values: Scores) -> Scores:
    return np.stack([values, np.ones(len(values))], axis=1)


def _ratio(sums: Scores) -> Scores:
    result: Scores = sums[..., 0] / sums[..., 1]
    return result


def _perplexity(log_likelihood: float) -> float:
    return math.exp(-log_likelihood) if log_likelihood > -700 else math.inf


def _weighted(
    aggregation: str, metric: str, baseline: Sequence[Json], candidate: Sequence[Json]
) -> CorpusTable:
    """The stored values are pairs of a log-likelihood and a number of words or bytes."""
    left, right = (
        np.stack([_column(values, 0), _column(values, 1)], axis=1)
        for values in (baseline, candidate)
    )
    if (left[:, 1] != right[:, 1]).any():
        raise NotReadable("the numbers of words or bytes differ between the two models")
    if left[:, 1].min() < 0 or not left[:, 1].any():
        raise NotReadable("the numbers of words or bytes are not positive")
    is_bits = aggregation == "bits_per_byte"
    return CorpusTable(
        baseline=left,
        candidate=right,
        measure=(lambda sums: -_ratio(sums) / math.log(2)) if is_bits else _ratio,
        unit="bits per byte" if is_bits else _UNITS.get(metric, "nats"),
        higher_is_better=not is_bits,
        to_aggregate=float if is_bits else _perplexity,
    )


_UNITS: Mapping[str, Unit] = {
    "word_perplexity": "nats per word",
    "byte_perplexity": "nats per byte",
}


def _column(values: Sequence[Json], index: int) -> Scores:
    """Return a number for each value: the value itself, or its element `index` if it is a list.

    Raises NotReadable if a number is missing, not finite or beyond LARGEST_SCORE.
    """
    column = []
    for value in values:
        member = value[index] if isinstance(value, list) else value
        if isinstance(member, bool) or not isinstance(member, int | float):
            raise NotReadable(f"{member!r} is not a number")
        if not abs(member) <= LARGEST_SCORE:
            raise NotReadable("a value is not finite or too large")
        column.append(float(member))
    return np.array(column, dtype=np.float64)


def _brier(
    aggregation: str, metric: str, baseline: Sequence[Json], candidate: Sequence[Json]
) -> CorpusTable:
    left, right = (_with_ones(_squared_errors(side)) for side in (baseline, candidate))
    return CorpusTable(
        baseline=left,
        candidate=right,
        measure=_ratio,
        unit="metric",
        higher_is_better=False,
        worst=_with_ones(np.full(len(left), _WORST_BRIER)),
        to_aggregate=_clip_to(0.0, _WORST_BRIER),
    )


# Squared error of a response that is sure of a wrong option.
_WORST_BRIER = 2.0


def _squared_errors(values: Sequence[Json]) -> Scores:
    errors = []
    for value in values:
        gold, given = _two(value)
        probabilities = np.array(numbers_in(given))
        right = np.zeros(len(probabilities))
        right[_index(gold, len(right))] = 1.0
        errors.append(float(((probabilities - right) ** 2).sum()))
    return np.array(errors)


def numbers_in(value: Json) -> list[float]:
    """Return the numbers of a stored list.

    lm-eval may have stored the list as the text of a numpy array, with 8 digits per number.
    """
    if isinstance(value, str):
        if "..." in value:
            raise NotReadable("numpy left out numbers of a long array")
        return [float(number) for number in _NUMBERS.findall(value)]
    if not isinstance(value, list):
        raise NotReadable(f"{value!r} is not a list of numbers")
    return [float(number) for number in _column(value, 0)]


def _two(value: Json) -> tuple[Json, Json]:
    if not isinstance(value, list) or len(value) != 2:
        raise NotReadable(f"{value!r} is not a pair")
    return value[0], value[1]


def _index(gold: Json, options: int) -> int:
    if not isinstance(gold, int) or not 0 <= gold < options:
        raise NotReadable(f"{gold!r} is not the number of an option")
    return int(gold)


def _clip_to(least: float, greatest: float) -> Callable[[float], float]:
    """Return a function that clips a number to the metric's range.

    Bounds from Student's distribution may lie outside this range.
    """
    return lambda value: min(max(value, least), greatest)


def _confusion(
    aggregation: str, metric: str, baseline: Sequence[Json], candidate: Sequence[Json]
) -> CorpusTable:
    """Return the table of a metric of labels. Each response is a cell of the confusion matrix.

    sklearn's `f1_score` has two labels, and the positive label is 1. `matthews_corrcoef` has any
    number of labels.
    """
    gold, left, right = _labels(baseline, candidate)
    is_f1 = aggregation == "f1"
    labels = np.unique([gold, left, right])
    if is_f1:
        labels = np.union1d(labels, [0, 1] if (labels == 1).all() else [1])
    many = len(labels)
    most = 2 if is_f1 else _MOST_LABELS
    if many > most:
        raise NotReadable(f"{many} labels, and at most {most} can be judged")
    gold_at, left_at, right_at = (np.searchsorted(labels, side) for side in (gold, left, right))
    positive = int(np.searchsorted(labels, 1))
    cells, diagonal = np.eye(many * many), np.eye(many).ravel()
    next_at = (gold_at + 1) % many
    # A model without any skill always chooses the same label. Its correlation is 0.
    worst_at = next_at if is_f1 else np.zeros_like(gold_at)
    # The changed response is the correct label if the baseline's label is wrong, else the next
    # label.
    flipped_at = np.where(left_at == gold_at, next_at, gold_at)
    return CorpusTable(
        baseline=cells[gold_at * many + left_at],
        candidate=cells[gold_at * many + right_at],
        measure=partial(_f1_of, positive) if is_f1 else _mcc_of,
        unit="metric",
        higher_is_better=True,
        to_aggregate=_clip_to(0.0 if is_f1 else -1.0, 1.0),
        flipped=cells[gold_at * many + flipped_at],
        worst=cells[gold_at * many + worst_at],
        scored=lambda rows: rows @ diagonal,
    )


_MOST_LABELS = 64


def _matrices(sums: Scores) -> Scores:
    """Shape (..., correct labels, chosen labels)."""
    many = math.isqrt(sums.shape[-1])
    return sums.reshape(*sums.shape[:-1], many, many)


def _f1_of(positive: int, sums: Scores) -> Scores:
    matrix = _matrices(sums)
    right = matrix[..., positive, positive]
    named = matrix[..., positive, :].sum(-1) + matrix[..., :, positive].sum(-1)
    return _divided(2 * right, named)


def _mcc_of(sums: Scores) -> Scores:
    matrix = _matrices(sums)
    gold, predicted = matrix.sum(-1), matrix.sum(-2)
    right, total = np.trace(matrix, axis1=-2, axis2=-1), matrix.sum((-2, -1))
    covariance = right * total - (gold * predicted).sum(-1)
    spread_gold = total**2 - (gold**2).sum(-1)
    spread_predicted = total**2 - (predicted**2).sum(-1)
    return _divided(covariance, np.sqrt(spread_gold * spread_predicted))


def _divided(numerator: Scores, denominator: Scores) -> Scores:
    """Return quotients, and 0 for a denominator of 0, as sklearn does."""
    is_zero = denominator == 0
    quotient: Scores = np.where(is_zero, 0.0, numerator / np.where(is_zero, 1.0, denominator))
    return quotient


def _labels(baseline: Sequence[Json], candidate: Sequence[Json]) -> tuple[Labels, Labels, Labels]:
    """Correct labels, and the labels that the two models chose."""
    sides = []
    for values in (baseline, candidate):
        pairs = [_two(value) for value in values]
        if not all(isinstance(label, int) for pair in pairs for label in pair):
            raise NotReadable("a label is not a number")
        sides.append(np.array(pairs, dtype=np.int64))
    left, right = sides
    if (left[:, 0] != right[:, 0]).any():
        raise NotReadable("the correct labels differ between the two models")
    return left[:, 0], left[:, 1], right[:, 1]


def _text_table(
    aggregation: str, metric: str, baseline: Sequence[Json], candidate: Sequence[Json]
) -> CorpusTable:
    """Return the table of a metric of sacrebleu.

    sacrebleu computes the score of a corpus from the sums of its segments' statistics. A response
    without any match is the worst, unless lower is better: edits have no upper limit.
    """
    scorer, is_partly_right = _sacrebleu(aggregation)
    higher_is_better = aggregation != "ter"

    def measure(sums: Scores) -> Scores:
        rows = sums.reshape(-1, sums.shape[-1]).tolist()
        scores = [scorer._compute_score_from_stats(row).score for row in rows]
        return np.array(scores, dtype=np.float64).reshape(sums.shape[:-1])

    def counts(values: Sequence[Json], *, is_empty: bool = False) -> Scores:
        references, answers = _references_and_answers(values)
        answers = [""] * len(answers) if is_empty else answers
        found = scorer._extract_corpus_statistics(answers, references)
        return np.array(found, dtype=np.float64)

    return CorpusTable(
        baseline=counts(baseline),
        candidate=counts(candidate),
        measure=measure,
        unit="metric",
        higher_is_better=higher_is_better,
        worst=counts(candidate, is_empty=True) if higher_is_better else None,
        to_aggregate=_clip_to(0.0, 100.0 if higher_is_better else math.inf),
        is_text=True,
        scored=lambda rows: is_partly_right(rows).astype(np.float64),
    )


def _sacrebleu(aggregation: str) -> tuple["Metric", Callable[[Scores], Marks]]:
    """Return sacrebleu's metric, and a function that finds the responses that are partly correct.

    The function gets sacrebleu's counts, shape (responses, numbers).
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if aggregation == "ter":
        # Column 0 is the number of edits, column 1 the length of the reference.
        return TER(), lambda rows: rows[:, 0] < rows[:, 1]
    if aggregation == "bleu":
        # Columns 0 and 1 are two lengths. Column 2 is the number of matching unigrams.
        return BLEU(), lambda rows: rows[:, 2] > 0
    # Each order of n-grams has three columns: counts in the response, in the reference, and
    # matches.
    word_order = 2 if aggregation == "chrf++" else 0
    return CHRF(word_order=word_order), lambda rows: (rows[:, 2::3] > 0).any(axis=1)


def _references_and_answers(values: Sequence[Json]) -> tuple[list[list[str]], list[str]]:
    """Return references and responses as lm-eval's `_sacreformat` passes them to sacrebleu.

    References are lists of one reference per document. If the documents have different numbers of
    references, lm-eval uses the smallest number.
    """
    references: list[list[str]] = []
    answers: list[str] = []
    for value in values:
        given, answer = _two(value)
        listed = given if isinstance(given, list) else [given]
        text = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
        if not listed or not all(isinstance(each, str) for each in (*listed, text)):
            raise NotReadable(f"{value!r} is not a reference and a response")
        references.append([str(each) for each in listed])
        answers.append(str(text))
    fewest = min(map(len, references))
    return [[listed[index] for listed in references] for index in range(fewest)], answers


NEEDS_SACREBLEU = frozenset(("bleu", "chrf", "chrf++", "ter"))
"""Aggregations that sacrebleu computes, for translations. lm-eval depends on sacrebleu."""
_TABLES: Mapping[str, Callable[[str, str, Sequence[Json], Sequence[Json]], CorpusTable]] = {
    "weighted_perplexity": _weighted,
    "bits_per_byte": _weighted,
    "brier_score": _brier,
    "f1": _confusion,
    "matthews_corrcoef": _confusion,
    **dict.fromkeys(NEEDS_SACREBLEU, _text_table),
}
WHOLE_CORPUS_AGGREGATIONS = frozenset(_TABLES)
"""Aggregations of metrics that are computed from all documents at once."""


def softmax(values: Iterable[float]) -> list[float]:
    """Return lm-eval's normalized probabilities of options (lm_eval/utils.py)."""
    numbers = np.array(list(values), dtype=np.float64)
    scaled = np.exp(numbers - numbers.max())
    probabilities: list[float] = (scaled / scaled.sum()).tolist()
    return probabilities
