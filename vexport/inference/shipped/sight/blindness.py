"""Decide from the responses to pictures whether a model sees."""

from collections.abc import Iterator

from scipy import stats

from vexport.inference.repeated import MAX_CHANGED_SHARE
from vexport.inference.shipped.base import CORRECT, ScoreRows
from vexport.inference.shipped.sight.metrics import CHANGES, REJECTS, WITHOUT


def describe_blind(rows: ScoreRows, alpha: float) -> str:
    """Describe how the responses show that a model is blind, or return "".

    A model that sees could give the same response to a few pictures by chance, so that very few
    documents show nothing.
    """
    known = [row for row in rows if CHANGES in row and WITHOUT in row]
    total = len(known)
    if not total or 0.5**total > alpha:
        return ""
    descriptions = _same_responses(known)
    for metric, description in descriptions:
        changed = round(sum(row[metric] for row in known))
        test = stats.binomtest(changed, total, MAX_CHANGED_SHARE, alternative="greater")
        if test.pvalue > alpha:
            return description
    return ""


def _same_responses(rows: ScoreRows) -> Iterator[tuple[str, str]]:
    total = len(rows)
    for metric, words in (
        (WITHOUT, "equal the responses without a picture"),
        (CHANGES, "do not depend on the picture, and stay the same with another picture"),
    ):
        same = total - round(sum(row[metric] for row in rows))
        yield metric, f"{same} of {total} responses {words}"


def describe_not_seeing(rows: ScoreRows, alpha: float) -> str:
    """Describe why the responses do not show that a model sees, or return ""."""
    if how := describe_blind(rows, alpha):
        return how
    known = [row for row in rows if REJECTS in row]
    own = sum(row[CORRECT] > 1 - row[REJECTS] for row in known)
    other = sum(row[CORRECT] < 1 - row[REJECTS] for row in known)
    if not known or (own and _sign_test(own, own + other) <= alpha):
        return ""
    right = round(sum(row[CORRECT] for row in known))
    swapped = round(sum(1 - row[REJECTS] for row in known))
    return (
        f"{right} of {len(known)} responses are right with the picture, and {swapped} with another "
        "picture"
    )


def _sign_test(own: int, total: int) -> float:
    return float(stats.binomtest(own, total, alternative="greater").pvalue)
