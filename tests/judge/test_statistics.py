"""Intervals compared with published values, a numeric likelihood, scipy, and simulations."""

import math
from functools import cache
from itertools import product

import numpy as np
import pytest
from scipy import optimize, stats

from tests.scores.make import exact_power
from vexport.judge.statistics import (
    bootstrap_interval,
    documents_for_power,
    documents_to_settle,
    recovery_interval,
    spread_over_null,
    tango_interval,
    tango_statistic,
    wilson_interval,
)

Z = 1.6448536269514722


@pytest.mark.parametrize(
    ("wins", "losses", "documents", "alpha", "low", "high"),
    [
        # Fagerland, Lydersen and Laake, Statistics in Medicine 33, 2014, table II: airway data (1,
        # 1, 7, 12).
        (1, 7, 21, 0.025, -0.517, -0.026),
        # R, PropCIs::scoreci.mp(25, 28, 618, conf.level = 0.90), whose estimate is (28 - 25) / 618.
        (28, 25, 618, 0.05, -0.0148, 0.0247),
    ],
)
def test_tango_matches_published_intervals(
    wins: int, losses: int, documents: int, alpha: float, low: float, high: float
) -> None:
    interval = tango_interval(wins, losses, documents, alpha)
    digits = 3 if low == -0.517 else 4
    assert (round(interval.low, digits), round(interval.high, digits)) == (low, high)


def numeric_statistic(wins: int, losses: int, documents: int, difference: float) -> float:
    """Compute the score statistic with a numeric search for the restricted maximum.

    The code under test uses a closed form.
    """
    same = documents - wins - losses

    def loss(p_loss: float) -> float:
        shares = np.clip([p_loss + difference, p_loss, 1 - 2 * p_loss - difference], 1e-300, 1)
        return -float(np.dot([wins, losses, same], np.log(shares)))

    bounds = (max(0.0, -difference), (1 - difference) / 2)
    p_loss = optimize.minimize_scalar(
        loss, bounds=bounds, method="bounded", options={"xatol": 1e-12}
    ).x
    variance = documents * (2 * p_loss + difference - difference**2)
    return float((wins - losses - documents * difference) / math.sqrt(variance))


@pytest.mark.parametrize(("wins", "losses", "documents"), [(2, 12, 50), (0, 0, 25)])
def test_tango_equals_grid_of_score_tests(wins: int, losses: int, documents: int) -> None:
    grid = np.arange(-0.995, 0.995, 0.001)
    kept = [d for d in grid if abs(numeric_statistic(wins, losses, documents, float(d))) <= Z]
    interval = tango_interval(wins, losses, documents, 0.05)
    assert interval.low == pytest.approx(min(kept), abs=0.0011)
    assert interval.high == pytest.approx(max(kept), abs=0.0011)


@pytest.mark.parametrize("documents", [1, 10, 1000])
def test_interval_without_changes_has_width(documents: int) -> None:
    width = Z**2 / (documents + Z**2)
    assert tango_interval(0, 0, documents, 0.05) == pytest.approx((-width, width), abs=1e-9)
    assert tango_interval(30, 0, 30, 0.05).high == 1
    assert tango_interval(0, 30, 30, 0.05).low == -1


@pytest.mark.parametrize(("wins", "losses"), [*product((0, 1, 2, 7, 60), repeat=2)])
@pytest.mark.parametrize("rest", [1, 2, 200])
def test_tango_contains_estimate_and_is_symmetric(wins: int, losses: int, rest: int) -> None:
    documents = wins + losses + rest
    interval, mirrored = (
        tango_interval(*pair, documents, 0.05) for pair in ((wins, losses), (losses, wins))
    )
    assert -1 <= interval.low <= (wins - losses) / documents <= interval.high <= 1
    assert interval.low == pytest.approx(-mirrored.high, abs=1e-9)


@pytest.mark.parametrize(("wins", "losses", "documents"), [(1, 1, 1), (-1, 0, 5), (0, 0, 0)])
def test_impossible_counts_are_refused(wins: int, losses: int, documents: int) -> None:
    with pytest.raises(ValueError, match="paired counts"):
        tango_statistic(wins, losses, documents, 0.0)


@pytest.mark.parametrize(("successes", "trials"), [(0, 12), (7, 12), (12, 12), (990, 1000)])
def test_wilson_equals_scipys(successes: int, trials: int) -> None:
    expected = stats.binomtest(successes, trials).proportion_ci(
        confidence_level=0.9, method="wilson"
    )
    assert wilson_interval(successes, trials, 0.05) == pytest.approx(
        (expected.low, expected.high), abs=1e-9
    )


@pytest.mark.parametrize(("loss", "win"), [(0.10, 0.02), (0.02, 0.02)])
def test_one_sided_bounds_miss_rate(loss: float, win: float) -> None:
    """Simulate 4000 draws of 500 documents: 5 % of the bounds miss.

    The tolerance is 4 standard errors of the simulation (1.4 points).
    """
    bounds = cache(lambda wins, losses: tango_interval(wins, losses, 500, 0.05))
    rng = np.random.default_rng(1)
    drawn = [
        bounds(int(w), int(lo))
        for w, lo, _ in rng.multinomial(500, [win, loss, 1 - win - loss], 4000)
    ]
    assert np.mean([interval.low > win - loss for interval in drawn]) == pytest.approx(
        0.05, abs=0.014
    )
    assert np.mean([interval.high < win - loss for interval in drawn]) == pytest.approx(
        0.05, abs=0.014
    )


def test_recovery_covers_the_true_ratio() -> None:
    """Simulate 2000 draws of 300 documents with the true ratio 0.75 / 0.80.

    The 90 % interval contains the true ratio in 88 % to 94 % of the draws.
    """
    rng = np.random.default_rng(2)
    hits = 0
    for both, losses, wins, _ in rng.multinomial(300, [0.70, 0.10, 0.05, 0.15], 2000):
        interval = recovery_interval(int(both), int(wins), int(losses), 0.05)
        hits += interval.low <= 0.75 / 0.80 <= interval.high
    assert 0.88 < hits / 2000 < 0.94


def test_bootstrap_agrees_with_student() -> None:
    values = np.random.default_rng(3).normal(-0.01, 0.1, 800)
    spread = float(stats.t.isf(0.05, 799)) * values.std(ddof=1) / math.sqrt(800)
    expected = (values.mean() - spread, values.mean() + spread)
    assert bootstrap_interval(values, 0.05, span=1) == pytest.approx(expected, abs=5e-4)
    quiet = tango_interval(0, 0, 50, 0.05)
    low, high = bootstrap_interval(np.full(50, 0.25), 0.05, span=2)
    assert (low, high) == pytest.approx((0.25 + 2 * quiet.low, 0.25 + 2 * quiet.high))
    assert bootstrap_interval(np.array([0.0, 0.0, 0.5]), 0.05, span=1).low < -0.2


def test_planned_documents_reach_planned_power() -> None:
    documents = documents_for_power(0.02, 0.05, 0.05)
    bounds = cache(lambda wins, losses: tango_interval(wins, losses, documents, 0.05))
    draws = np.random.default_rng(4).multinomial(documents, [0.025, 0.025, 0.95], 2000)
    power = np.mean([bounds(int(wins), int(losses)).low > -0.02 for wins, losses, _ in draws])
    assert power == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize("margin", [0.01, 0.02, 0.03, 0.05, 0.1])
@pytest.mark.parametrize("disagreement", [0.01, 0.05, 0.2])
def test_planned_documents_suffice_at_any_margin(margin: float, disagreement: float) -> None:
    """Compare with the exact power.

    With (1.645 + 0.842)^2 * disagreement / margin^2 documents alone, the power is only 0.001 at a
    margin of 0.1 and a disagreement of 0.01.
    """
    documents = documents_for_power(margin, disagreement, 0.05)
    power = exact_power(documents, disagreement, margin) if documents < 5000 else 0.8
    assert 0.75 < power < 0.9


def test_planned_and_reported_documents_agree() -> None:
    """2,000 of 40,000 answers changed, which is the plan's assumption of 5 %."""
    planned = documents_for_power(0.1, 0.05, 0.05)
    statistic = tango_statistic(1000, 1000, 40000, -0.1)
    spread = spread_over_null(1000, 1000, 40000, 0.1)
    assert documents_to_settle(40000, statistic, 0.05, spread=spread) == planned == 56
    # 24 documents without a change need more than documents that are known never to change.
    few = spread_over_null(0, 0, 24, 0.1)
    needed = documents_to_settle(24, tango_statistic(0, 0, 24, -0.1), 0.05, spread=few)
    assert needed is not None
    assert documents_for_power(0.1, 0.0, 0.05) == 25 < needed < planned


def test_documents_to_settle_reach_statistic() -> None:
    """If wins and losses grow with the documents, the statistic reaches a power of 80 %."""
    needed = documents_to_settle(400, tango_statistic(4, 10, 400, -0.02), 0.05)
    assert needed is not None
    scale = needed / 400
    reached = tango_statistic(4 * scale, 10 * scale, needed, -0.02)
    assert reached == pytest.approx(1.6448536 + 0.8416212, rel=1e-3)
    assert documents_to_settle(400, 0.0, 0.05) is None
