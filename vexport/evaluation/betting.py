"""Tests by betting: anytime-valid verdicts, so that an evaluation may stop as soon as it is decided.

Each document's gain D in [-span, span] is bet on. Where the true loss is the margin m or more, the capital
prod(1 + lambda * (D + m)) is a supermartingale for every lambda >= 0 that keeps it positive, and so is a
mean of such capitals: it ever exceeds 1/alpha with probability alpha at most (Ville's inequality).
Exceeding it shows a loss below m, PASS. Mirrored, prod(1 - lambda * (D + m)) shows one beyond m, FAIL
(Waudby-Smith and Ramdas, JRSS B 86, 2024). Documents count as drawn from all such documents, as in the
fixed test, and must come in a random order that was fixed before.

The capital depends on how often each gain came, not on when: `counts` have the shape (..., gains) and
`gains` the shape (gains,), so that a whole simulation is one matrix product.
"""

import math
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize

from vexport.evaluation.statistics import Interval, Scores, normal_quantile
from vexport.types import Outcome

FLIPS = np.array([1.0, -1.0, 0.0])
"""Gains of a 0/1 metric: wrong to right, right to wrong, no change."""

_BETS = np.geomspace(0.05, 0.99, 12)
"""Shares of the largest bet that keeps the capital positive. The mean of the capitals grows as the best one
does, less the logarithm of 12 at most; neighbours differ by a third, which costs 3 % of the growth."""

MOST_TIMES = 1e6
"""A question that so many times the documents leave open lies on the margin."""


class Evidence(NamedTuple):
    """Natural logarithms of the capital of both bets, shape (...)."""

    passes: NDArray[np.float64]
    fails: NDArray[np.float64]


def log_evidence(counts: ArrayLike, margin: float, *, gains: Scores = FLIPS, span: float = 1.0) -> Evidence:
    """What bets on these gains are worth; `margin` lies strictly within (-span, span)."""
    if not -span < margin < span:
        raise ValueError(f"margin: got {margin}, need a number within -{span} and {span}; use 0.02")
    passes = np.log1p(np.multiply.outer(_BETS, (gains + margin) / (span - margin)))
    fails = np.log1p(np.multiply.outer(-_BETS, (gains + margin) / (span + margin)))
    often = np.asarray(counts, dtype=np.float64)
    return Evidence(_mean_capital(often, passes), _mean_capital(often, fails))


def _mean_capital(often: NDArray[np.float64], growth: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithm of the mean over bets, one at a time for memory; `growth` has the shape (bets, gains)."""
    peak = reduce(np.maximum, (often @ factor for factor in growth))
    total = sum(np.exp(often @ factor - peak) for factor in growth)
    means: NDArray[np.float64] = peak + np.log(total / len(growth))
    return means


def decide_now(
    counts: ArrayLike, margin: float, alpha: float, *, gains: Scores = FLIPS, span: float = 1.0
) -> Outcome:
    """PASS or FAIL where the evidence exceeds 1/alpha, else INCONCLUSIVE: read on.

    Both cannot hold: capital grows only where the sum of D + m is positive, or negative, respectively.
    """
    passes, fails = log_evidence(counts, margin, gains=gains, span=span)
    limit = -math.log(alpha)
    return "PASS" if passes > limit else "FAIL" if fails > limit else "INCONCLUSIVE"


def times_to_decide(
    counts: ArrayLike, margin: float, alpha: float, fail_alpha: float, *, gains: Scores = FLIPS
) -> float | None:
    """How many times as many such documents decide; None where MOST_TIMES as many do not.

    The excess is convex in the number, so that it turns positive once.
    """
    often = np.asarray(counts, dtype=np.float64)

    def excess(times: float) -> float:
        passes, fails = log_evidence(times * often, margin, gains=gains)
        return float(max(passes + math.log(alpha), fails + math.log(fail_alpha)))

    if excess(1.0) >= 0:
        return 1.0
    if excess(MOST_TIMES) <= 0:
        return None
    return float(optimize.brentq(excess, 1.0, MOST_TIMES))


def anytime_interval(
    counts: ArrayLike, alpha: float, *, gains: Scores = FLIPS, span: float = 1.0
) -> Interval:
    """One-sided 1 - alpha bounds of the mean gain that hold at all times at once.

    They are the margins at which the evidence turns: the lower one is above -m where PASS holds at m.
    """
    normal_quantile(alpha)
    limit, end = -math.log(alpha), span * (1 - 1e-9)

    def turn(side: int) -> float:
        def excess(margin: float) -> float:
            return float(log_evidence(counts, margin, gains=gains, span=span)[side]) - limit

        wins = excess(end if side == 0 else -end) > 0
        return -float(optimize.brentq(excess, -end, end, xtol=1e-9)) if wins else (2 * side - 1) * span

    return Interval(turn(0), turn(1))
