"""Simulate how often the bounds of a corpus metric's difference cover the true difference.

    PYTHONPATH=. .venv/bin/python scripts/bootstrap_coverage.py [METRIC]... [--changed SHARE]...

A pool of documents is answered by two simulated models. The difference of the metric over the whole
pool is the true difference. Each repetition draws documents from the pool, and computes the bounds
that a verdict uses. The script prints a table with a row for each metric: the share of repetitions
whose lower bound is below the true difference, and the share whose upper bound is above it. Both
shares should be 95 of 100. They may be higher, because the wider of two intervals is used. The
progress goes to stderr.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vexport.judge.corpus import compare_corpora
from vexport.records import Json
from vexport.scores.aggregates import CorpusTable, tabulate
from vexport.scores.metrics import AGGREGATIONS

ALPHA = 0.05
RESAMPLES = 999
"""Resamples of each repetition. A verdict has ten times as many, and takes ten times as long."""
POOL = 3000
"""Number of documents in the pool."""
# Sizes of the vocabulary and of the documents, in words.
_VOCABULARY = 2000
_LENGTHS = (6, 30)
# Mean share of wrong words in the baseline's answers. The share differs between documents.
_WRONG_WORDS = 0.35
# Share of words that a changed answer gets wrong in addition.
_MORE_WRONG = 0.25
# Share of right labels of the baseline, and of documents with the positive label.
_RIGHT = 0.85
_POSITIVE = 0.4
_SYLLABLES = ("ka", "lo", "mi", "nu", "re", "sa", "ti", "vo")
Values = list[Json]
Noise = np.random.Generator
Words = NDArray[np.int64]


def translations(noise: Noise, changed: float) -> tuple[Values, Values]:
    """Return references with answers of both models. A share `changed` of the answers differs."""
    left: Values = []
    right: Values = []
    for _ in range(POOL):
        reference = _words(noise, int(noise.integers(*_LENGTHS)))
        answer = _with_errors(noise, reference, noise.beta(2, 2 / _WRONG_WORDS - 2))
        other = answer
        if noise.random() < changed:
            other = _with_errors(noise, answer, _MORE_WRONG)
        left.append([_text(reference), _text(answer)])
        right.append([_text(reference), _text(other)])
    return left, right


def _words(noise: Noise, count: int) -> Words:
    """Draw words whose frequencies follow Zipf's law."""
    weights = 1 / np.arange(1, _VOCABULARY + 1)
    drawn: Words = noise.choice(_VOCABULARY, count, p=weights / weights.sum())
    return drawn


def _with_errors(noise: Noise, words: Words, share: float) -> Words:
    """Replace, drop or move a share of the words."""
    kept = words.copy()
    is_wrong = noise.random(len(words)) < share
    kind = noise.integers(0, 3, len(words))
    replaced = is_wrong & (kind == 0)
    kept[replaced] = _words(noise, int(replaced.sum()))
    places = np.arange(len(words)) + np.where(is_wrong & (kind == 1), 4.5, 0.0)
    order = np.argsort(places, kind="stable")
    is_kept = ~(is_wrong & (kind == 2))
    result: Words = kept[order][is_kept[order]]
    return result if len(result) else words[:1]


def _text(words: Words) -> str:
    """Spell each word by its number, so that words share some letters as in a language."""
    spelled = ["".join(_SYLLABLES[int(digit)] for digit in f"{word:o}") for word in words.tolist()]
    return " ".join(spelled) + "."


def labels(noise: Noise, changed: float) -> tuple[Values, Values]:
    """Return right and chosen labels. Of the changed answers, 7 of 10 were right before."""
    gold = noise.random(POOL) < _POSITIVE
    is_right = noise.random(POOL) < _RIGHT
    weights = np.where(is_right, 0.7 / _RIGHT, 0.3 / (1 - _RIGHT))
    is_changed = noise.random(POOL) < np.minimum(1.0, changed * weights)
    old = gold == is_right
    new = np.where(is_changed, ~old, old)
    return _pairs(gold, old), _pairs(gold, new)


def _pairs(gold: NDArray[np.bool_], chosen: NDArray[np.bool_]) -> Values:
    return [[int(right), int(label)] for right, label in zip(gold, chosen, strict=True)]


def probabilities(noise: Noise, changed: float) -> tuple[Values, Values]:
    """Return right options with probabilities of four options.

    All probabilities differ a little, and those of the changed answers differ much.
    """
    gold = noise.integers(0, 4, POOL)
    scores = noise.normal(0, 1.5, (POOL, 4))
    scores[np.arange(POOL), gold] += 2.0
    spread = np.where(noise.random(POOL) < changed, 1.0, 0.05)
    moved = 0.97 * scores + spread[:, np.newaxis] * noise.normal(0, 1, (POOL, 4))
    sides: list[Values] = []
    for side in (scores, moved):
        shares = np.exp(side) / np.exp(side).sum(axis=1, keepdims=True)
        sides.append([[int(right), row] for right, row in zip(gold, shares.tolist(), strict=True)])
    return sides[0], sides[1]


def pages(noise: Noise, changed: float) -> tuple[Values, Values]:
    """Return log-likelihoods and numbers of words of pages with very different lengths."""
    words = 1 + np.exp(noise.normal(6, 1, POOL)).astype(int)
    before = -words * (3 + noise.normal(0, 0.4, POOL))
    spread = np.where(noise.random(POOL) < changed, 0.1, 0.01)
    after = before - words * noise.normal(0.01, spread)
    return _weighted(before, words), _weighted(after, words)


def _weighted(values: NDArray[np.float64], words: Words) -> Values:
    return [[value, count] for value, count in zip(values.tolist(), words.tolist(), strict=True)]


MAKERS: Mapping[str, Callable[[Noise, float], tuple[Values, Values]]] = {
    "word_perplexity": pages,
    "f1": labels,
    "mcc": labels,
    "brier_score": probabilities,
    "ter": translations,
    "bleu": translations,
    "chrf": translations,
}


def coverage(table: CorpusTable, documents: int, times: int) -> tuple[float, float, float]:
    """Return the true difference, and the shares of lower and of upper bounds that cover it."""
    sign = 1.0 if table.higher_is_better else -1.0
    totals = [side.sum(axis=0) for side in (table.baseline, table.candidate)]
    truth = sign * (float(table.measure(totals[1])) - float(table.measure(totals[0])))
    below = 0
    above = 0
    for seed in range(times):
        drawn = np.random.default_rng(seed).integers(0, len(table.baseline), documents)
        sample = replace(
            table,
            baseline=table.baseline[drawn],
            candidate=table.candidate[drawn],
            flipped=None if table.flipped is None else table.flipped[drawn],
        )
        interval = compare_corpora(sample, resamples=RESAMPLES).difference_interval(ALPHA)
        below += interval.low <= truth
        above += interval.high >= truth
    return truth, below / times, above / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics", nargs="*", metavar="METRIC", help=", ".join(MAKERS))
    parser.add_argument("--documents", type=int, default=60, help="documents of a sample")
    parser.add_argument("--times", type=int, default=2000, help="repetitions")
    parser.add_argument(
        "--changed", type=float, action="append", help="shares of changed answers [default: .2, 1]"
    )
    given = parser.parse_args()
    shares = given.changed or [0.2, 1.0]
    heads = [f"{share:.0%} change: {side} bound" for share in shares for side in ("lower", "upper")]
    print(
        f"| metric | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|", sep="\n", flush=True
    )
    for metric in given.metrics or MAKERS:
        cells = []
        for share in shares:
            start = time.monotonic()
            left, right = MAKERS[metric](np.random.default_rng(0), share)
            table = tabulate(AGGREGATIONS[metric], metric, left, right)
            truth, *held = coverage(table, given.documents, given.times)
            cells += [f"{each:.1%}" for each in held]
            seconds = time.monotonic() - start
            print(f"{metric} {share}: {truth:+.5f}, {held}, {seconds:.0f} s", file=sys.stderr)
        print(f"| `{metric}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
