"""Build the worst possible candidate of a task, to test whether the task can show a loss.

A PASS that could not have been a FAIL is no PASS. Therefore the verdict makes the same decision for
a candidate that gives the worst response to every document.
"""

from dataclasses import replace

import numpy as np

from vexport.judge.corpus import compare_corpora, worst_influence
from vexport.judge.pairs import TaskPair
from vexport.scores.aggregates import Scores


def with_worst_candidate(pair: TaskPair) -> TaskPair | None:
    """Return the pair with the worst possible candidate, or None if the metric has no worst value.

    A model that has lost everything still guesses. Therefore the worst score of a document with k
    options is 1/k. Shares without options are 0 or 1 at worst, depending on the direction.
    """
    if pair.corpus is not None:
        table = pair.corpus.table
        if table.worst is None:
            return None
        corpus = compare_corpora(replace(table, candidate=table.worst), pair.clusters)
        return replace(pair, candidate=corpus.influence[1], corpus=corpus)
    worst = _worst_shares(pair) if pair.own_unit is None else _worst_parts(pair)
    return None if worst is None else replace(pair, candidate=worst)


def _worst_parts(pair: TaskPair) -> Scores | None:
    """Return the worst contributions to the metrics of joined tasks, None if one has no worst."""
    worst = [
        influence
        for part in pair.parts
        if part.corpus is not None and (influence := worst_influence(part.corpus.table)) is not None
    ]
    return np.concatenate(worst) if worst and len(worst) == len(pair.parts) else None


def _worst_shares(pair: TaskPair) -> Scores | None:
    if pair.unit != "share":
        return None
    if pair.sign < 0:
        return np.ones(len(pair.documents))
    options = np.array([new.options for _, new in pair.documents], dtype=np.float64)
    guesses: Scores = np.divide(1.0, options, out=np.zeros(len(options)), where=options > 0)
    return guesses
