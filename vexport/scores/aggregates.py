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
        return make(metric, baseline, candidate)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise NotReadable(f"its values are not those of {aggregation}") from error


def log_likelihood_table(
    baseline: Scores,
    candidate: Scores,
    *,
    higher_is_better: bool,
    is_perplexity: bool,
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


def _weighted_perplexity(
    metric: str, baseline: Sequence[Json], candidate: Sequence[Json]
) -> CorpusTable:
    units: Mapping[str, Unit] = {
        "word_perplexity": "nats per word",
        "byte_perplexity": "nats per byte",
    }
    left, right = _weighted(baseline, candidate)
    return CorpusTable(
        baseline=left,
        candidate=right,
        measure=_ratio,
        unit=units.get(metric, "nats"),
        higher_is_better=True,
        to_aggregate=_perplexity,
    )


def _bits_per_byte(metric: str, baseline: Sequence[Json], candidate: Sequence[Json]) -> CorpusTable:
    left, right = _weighted(baseline, candidate)
    return CorpusTable(
        baseline=left,
        candidate=right,
        measure=lambda sums: -_ratio(sums) / math.log(2),
        unit="bits per byte",
        higher_is_better=False,
    )


def _weighted(baseline: Sequence[Json], candidate: Sequence[Json]) -> tuple[Scores, Scores]:
    """Read pairs of a log-likelihood and a number of words or bytes."""
    sides = []
    for values in (baseline, candidate):
        sides.append(np.stack([_column(values, 0), _column(values, 1)], axis=1))
    left, right = sides
    if (left[:, 1] != right[:, 1]).any():
        raise NotReadable("the numbers of words or bytes differ between the two models")
    if left[:, 1].min() < 0 or not left[:, 1].any():
        raise NotReadable("the numbers of words or bytes are not positive")
    return left, right


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


def _brier(metric: str, baseline: Sequence[Json], candidate: Sequence[Json]) -> CorpusTable:
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


def _f1(metric: str, baseline: Sequence[Json], candidate: Sequence[Json]) -> CorpusTable:
    """Return the table of sklearn's `f1_score` for two labels. The positive label is 1."""
    gold, sides = _labels(baseline, candidate)
    known = set(np.unique([gold, *sides]).tolist())
    if len(known | {1}) > 2:
        raise NotReadable(f"F1 needs two labels, got {sorted(known)}")
    is_positive = gold == 1
    return CorpusTable(
        baseline=_f1_counts(is_positive, sides[0] == 1),
        candidate=_f1_counts(is_positive, sides[1] == 1),
        measure=_f1_of,
        unit="metric",
        higher_is_better=True,
        to_aggregate=_clip_to(0.0, 1.0),
        flipped=_f1_counts(is_positive, sides[0] != 1),
        worst=_f1_counts(is_positive, ~is_positive),
        scored=lambda rows: 1.0 - rows[:, 1] - rows[:, 2],
    )


def _f1_counts(gold: Marks, predicted: Marks) -> Scores:
    """Return three columns: true positives, false positives, false negatives."""
    cells = (gold & predicted, ~gold & predicted, gold & ~predicted)
    return np.stack(cells, axis=1).astype(np.float64)


def _f1_of(sums: Scores) -> Scores:
    right = 2 * sums[..., 0]
    total = right + sums[..., 1] + sums[..., 2]
    return _divided(right, total)


def _divided(numerator: Scores, denominator: Scores) -> Scores:
    """Return quotients, and 0 for a denominator of 0, as sklearn does."""
    is_zero = denominator == 0
    quotient: Scores = np.where(is_zero, 0.0, numerator / np.where(is_zero, 1.0, denominator))
    return quotient


def _mcc(metric: str, baseline: Sequence[Json], candidate: Sequence[Json]) -> CorpusTable:
    """Return the table of sklearn's `matthews_corrcoef` for any number of labels."""
    gold, sides = _labels(baseline, candidate)
    labels = np.unique([gold, *sides])
    many = len(labels)
    if many > _MOST_LABELS:
        raise NotReadable(f"{many} labels, and at most {_MOST_LABELS} can be judged")
    gold_at = np.searchsorted(labels, gold)
    left_at, right_at = (np.searchsorted(labels, side) for side in sides)
    cells = np.eye(many * many)
    # The changed response is the correct label if the baseline's label is wrong, else the next
    # label.
    other_at = np.where(left_at == gold_at, (left_at + 1) % many, gold_at)
    diagonal = np.eye(many).ravel()
    return CorpusTable(
        baseline=cells[gold_at * many + left_at],
        candidate=cells[gold_at * many + right_at],
        measure=_mcc_of,
        unit="metric",
        higher_is_better=True,
        to_aggregate=_clip_to(-1.0, 1.0),
        flipped=cells[gold_at * many + other_at],
        # A model without any skill always chooses the same label. Its correlation is 0.
        worst=cells[gold_at * many],
        scored=lambda rows: rows @ diagonal,
    )


_MOST_LABELS = 64


def _mcc_of(sums: Scores) -> Scores:
    """Return Matthews' correlation of confusion matrices, shape (..., labels * labels)."""
    many = math.isqrt(sums.shape[-1])
    matrix = sums.reshape(*sums.shape[:-1], many, many)
    gold, predicted = matrix.sum(-1), matrix.sum(-2)
    right, total = np.trace(matrix, axis1=-2, axis2=-1), matrix.sum((-2, -1))
    covariance = right * total - (gold * predicted).sum(-1)
    spread_gold = total**2 - (gold**2).sum(-1)
    spread_predicted = total**2 - (predicted**2).sum(-1)
    return _divided(covariance, np.sqrt(spread_gold * spread_predicted))


def _labels(
    baseline: Sequence[Json], candidate: Sequence[Json]
) -> tuple[Labels, tuple[Labels, Labels]]:
    left, right = ([_two(value) for value in side] for side in (baseline, candidate))
    for old, new in zip(left, right, strict=True):
        if not all(isinstance(label, int) for label in (*old, *new)):
            raise NotReadable(f"{[*old, *new]!r} are not numbers of labels")
        if old[0] != new[0]:
            raise NotReadable("the correct labels differ between the two models")
    gold = np.array([old[0] for old in left], dtype=np.int64)
    chosen = tuple(np.array([pair[1] for pair in side], dtype=np.int64) for side in (left, right))
    return gold, (chosen[0], chosen[1])


def _text_table(
    metric: "Metric",
    baseline: Sequence[Json],
    candidate: Sequence[Json],
    *,
    scored: Callable[[Scores], Scores],
    higher_is_better: bool = True,
) -> CorpusTable:
    """Return the table of a metric of sacrebleu.

    sacrebleu computes the score of a corpus from the sums of its segments' statistics. A response
    without any match is the worst, unless lower is better: edits have no upper limit.
    """

    def measure(sums: Scores) -> Scores:
        rows = sums.reshape(-1, sums.shape[-1]).tolist()
        scores = [metric._compute_score_from_stats(row).score for row in rows]
        return np.array(scores, dtype=np.float64).reshape(sums.shape[:-1])

    sides = []
    for values in (baseline, candidate):
        references, answers = _references_and_answers(values)
        sides.append(metric._extract_corpus_statistics(answers, references))
    left, right = (np.array(side, dtype=np.float64) for side in sides)
    empty = metric._extract_corpus_statistics([""] * len(left), references)
    return CorpusTable(
        baseline=left,
        candidate=right,
        measure=measure,
        unit="metric",
        higher_is_better=higher_is_better,
        worst=np.array(empty, dtype=np.float64) if higher_is_better else None,
        to_aggregate=_clip_to(0.0, 100.0 if higher_is_better else math.inf),
        is_text=True,
        scored=scored,
    )


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


def _bleu(metric: str, baseline: Sequence[Json], candidate: Sequence[Json]) -> CorpusTable:
    from sacrebleu.metrics.bleu import BLEU

    # Columns 0 and 1 are two lengths. Column 2 is the number of matching unigrams.
    return _text_table(
        BLEU(), baseline, candidate, scored=lambda rows: np.where(rows[:, 2] > 0, 1.0, 0.0)
    )


def _chrf(metric: str, baseline: Sequence[Json], candidate: Sequence[Json]) -> CorpusTable:
    return _chrf_table(metric, baseline, candidate, word_order=0)


def _chrf_plus(metric: str, baseline: Sequence[Json], candidate: Sequence[Json]) -> CorpusTable:
    return _chrf_table(metric, baseline, candidate, word_order=2)


def _chrf_table(
    metric: str, baseline: Sequence[Json], candidate: Sequence[Json], *, word_order: int
) -> CorpusTable:
    from sacrebleu.metrics.chrf import CHRF

    # Each order of n-grams has three columns: counts in the response, in the reference, and
    # matches.
    return _text_table(
        CHRF(word_order=word_order),
        baseline,
        candidate,
        scored=lambda rows: np.where((rows[:, 2::3] > 0).any(axis=1), 1.0, 0.0),
    )


def _ter(metric: str, baseline: Sequence[Json], candidate: Sequence[Json]) -> CorpusTable:
    from sacrebleu.metrics.ter import TER

    # Column 0 is the number of edits, column 1 the length of the reference.
    return _text_table(
        TER(),
        baseline,
        candidate,
        scored=lambda rows: np.where(rows[:, 0] < rows[:, 1], 1.0, 0.0),
        higher_is_better=False,
    )


_TABLES: Mapping[str, Callable[[str, Sequence[Json], Sequence[Json]], CorpusTable]] = {
    "weighted_perplexity": _weighted_perplexity,
    "bits_per_byte": _bits_per_byte,
    "brier_score": _brier,
    "f1": _f1,
    "matthews_corrcoef": _mcc,
    "bleu": _bleu,
    "chrf": _chrf,
    "chrf++": _chrf_plus,
    "ter": _ter,
}
WHOLE_CORPUS_AGGREGATIONS = frozenset(_TABLES)
"""Aggregations of metrics that are computed from all documents at once."""
NEEDS_SACREBLEU = frozenset(("bleu", "chrf", "chrf++", "ter"))
"""Aggregations that sacrebleu computes, for translations. lm-eval depends on sacrebleu."""


def softmax(values: Iterable[float]) -> list[float]:
    """Return lm-eval's normalized probabilities of options (lm_eval/utils.py)."""
    numbers = np.array(list(values), dtype=np.float64)
    scaled = np.exp(numbers - numbers.max())
    probabilities: list[float] = (scaled / scaled.sum()).tolist()
    return probabilities
