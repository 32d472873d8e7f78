"""Betting: its error rates whenever one stops, its power, and how many documents it reads."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vexport.evaluation.betting import FLIPS, anytime_interval, decide_now, log_evidence, times_to_decide
from vexport.evaluation.statistics import documents_for_power, tango_interval, tango_statistic

ALPHA, REPEATS = 0.05, 2000
LIMIT = -math.log(ALPHA)
MONTE_CARLO = 3 * math.sqrt(ALPHA * (1 - ALPHA) / REPEATS)
NEVER = 10**9

# Disagreement, margin: at 1 % disagreement no loss is as large as 2 points.
AT_THE_MARGIN = [(0.01, 0.005), (0.05, 0.02), (0.20, 0.02)]


def stops(
    disagreement: float, loss: float, margin: float, *, documents: int, look: int, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each of 2000 runs first shows PASS and FAIL, looked at every `look` documents; shape (2000,)."""
    rng = np.random.default_rng(seed)
    shares = [(disagreement - loss) / 2, (disagreement + loss) / 2, 1 - disagreement]
    counts = rng.multinomial(look, shares, (REPEATS, documents // look)).cumsum(axis=1)
    found = []
    for evidence in log_evidence(counts, margin):
        shown = evidence > LIMIT
        found.append(np.where(shown.any(axis=1), (shown.argmax(axis=1) + 1) * look, NEVER))
    return found[0], found[1]


@pytest.mark.parametrize(("disagreement", "margin"), AT_THE_MARGIN)
def test_on_the_margin_each_wrong_answer_is_rare_whenever_one_stops(
    disagreement: float, margin: float
) -> None:
    passed, failed = stops(disagreement, margin, margin, documents=4000, look=4)
    assert (passed < NEVER).mean() <= ALPHA + MONTE_CARLO
    assert (failed < NEVER).mean() <= ALPHA + MONTE_CARLO
    assert ((passed < NEVER) | (failed < NEVER)).mean() > 0.01  # a test that never decides would be no test


def test_looking_after_each_document_is_allowed() -> None:
    passed, failed = stops(0.05, 0.02, 0.02, documents=1000, look=1)
    assert 0.01 < (passed < NEVER).mean() <= ALPHA + MONTE_CARLO
    assert 0.01 < (failed < NEVER).mean() <= ALPHA + MONTE_CARLO


@pytest.mark.parametrize(("disagreement", "margin"), AT_THE_MARGIN)
def test_on_the_margin_the_fixed_test_errs_as_often_as_promised(disagreement: float, margin: float) -> None:
    """Tango's score test on 3000 documents; its two answers together stay below twice alpha."""
    rng = np.random.default_rng(1)
    shares = [(disagreement - margin) / 2, (disagreement + margin) / 2, 1 - disagreement]
    drawn = rng.multinomial(3000, shares, REPEATS)
    statistics = np.array([tango_statistic(int(w), int(b), 3000, -margin) for w, b, _ in drawn])
    assert (statistics > 1.6448536).mean() <= ALPHA + MONTE_CARLO
    assert (statistics < -1.6448536).mean() <= ALPHA + MONTE_CARLO


@pytest.mark.parametrize(("disagreement", "margin"), AT_THE_MARGIN)
def test_planned_documents_have_the_planned_power(disagreement: float, margin: float) -> None:
    """They show no loss 4 times in 5."""
    documents = documents_for_power(margin, disagreement, ALPHA)
    drawn = np.random.default_rng(2).multinomial(
        documents, [disagreement / 2, disagreement / 2, 1 - disagreement], REPEATS
    )
    passed = [tango_statistic(int(w), int(b), documents, -margin) > 1.6448536 for w, b, _ in drawn]
    assert np.mean(passed) == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("counts", [(0, 0, 100), (4, 10, 386), (0, 16, 384)])
def test_so_many_such_documents_decide_and_fewer_do_not(counts: tuple[int, int, int]) -> None:
    times = times_to_decide(counts, 0.02, ALPHA, ALPHA / 2)
    assert times is not None
    level = ALPHA if counts[1] < 16 else ALPHA / 2
    fewer, more = (decide_now(np.array(counts) * factor * times, 0.02, level) for factor in (0.999, 1.001))
    assert (fewer, more) == ("INCONCLUSIVE", "PASS" if counts[1] < 16 else "FAIL")


def test_no_number_of_documents_on_the_margin_decides() -> None:
    assert times_to_decide((0, 2, 98), 0.02, ALPHA, ALPHA) is None


def test_five_per_cent_disagreement_at_two_points_takes_about_900_documents() -> None:
    passed, failed = stops(0.05, 0.0, 0.02, documents=14042, look=20)
    assert np.median(passed) == pytest.approx(900, abs=100)
    assert (passed < NEVER).mean() > 0.99
    assert (failed < passed).mean() < ALPHA


def test_a_two_point_drop_is_called_fail_at_margin_one_within_4000_documents() -> None:
    passed, failed = stops(0.05, 0.02, 0.01, documents=14042, look=20)
    assert (failed <= 4000).mean() > 0.5
    assert (failed < NEVER).mean() > 0.95
    assert (passed < failed).mean() < ALPHA


@pytest.mark.parametrize(("disagreement", "loss"), [(0.01, 0.0), (0.05, 0.0), (0.12, 0.10), (0.30, 0.25)])
def test_easy_cases_take_four_times_fewer_documents_than_the_task_has(
    disagreement: float, loss: float
) -> None:
    """The fixed test reads all 14042. Even the one planned for 20 % disagreement reads 3092."""
    passed, failed = stops(disagreement, loss, 0.02, documents=14042, look=20)
    right = failed if loss else passed
    assert np.minimum(right, 14042).mean() < 14042 / 4
    assert np.median(right) < documents_for_power(0.02, 0.20, ALPHA) / (1 if loss == 0 else 4)


def test_evidence_is_the_mean_over_bets_of_the_product_over_documents() -> None:
    rng = np.random.default_rng(3)
    gains = rng.choice([-1.0, 0.0, 1.0], 60)
    counts = [(gains == 1).sum(), (gains == -1).sum(), (gains == 0).sum()]
    bets = [0.05 * (0.99 / 0.05) ** (index / 11) for index in range(12)]
    passes = sum(math.prod(1 + bet / 0.98 * (gain + 0.02) for gain in gains) for bet in bets) / 12
    fails = sum(math.prod(1 - bet / 1.02 * (gain + 0.02) for gain in gains) for bet in bets) / 12
    assert np.exp(log_evidence(counts, 0.02)) == pytest.approx([passes, fails])


def test_capital_is_fair_on_the_margin() -> None:
    """Over all ways that three documents can go, its mean is 1 where the true loss is the margin."""
    shares = {1.0: 0.10, -1.0: 0.12, 0.0: 0.78}
    means = np.zeros(2)
    for way in product(shares, repeat=3):
        counts = [way.count(gain) for gain in FLIPS]
        means += math.prod(shares[gain] for gain in way) * np.exp(log_evidence(counts, 0.02))
    assert means == pytest.approx([1, 1])


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 3000))
def test_the_interval_is_where_the_decision_turns(wins: int, losses: int, same: int) -> None:
    counts = [wins, losses, same]
    low, high = anytime_interval(counts, ALPHA)
    assert -1 <= low < high <= 1
    assert low <= (wins - losses) / (wins + losses + same) <= high
    for margin in (0.0, 0.02, 0.3):
        outcome = decide_now(counts, margin, ALPHA)
        assert outcome == ("PASS" if low > -margin else "FAIL" if high < -margin else "INCONCLUSIVE")


def test_being_valid_at_all_times_is_wider_than_at_one() -> None:
    anytime, fixed = anytime_interval([25, 25, 950], ALPHA), tango_interval(25, 25, 1000, ALPHA)
    assert anytime.low < fixed.low < fixed.high < anytime.high


def test_graded_scores_are_bet_on_as_well() -> None:
    rng = np.random.default_rng(4)
    good, bad = rng.normal(0, 0.1, 400).clip(-1, 1), rng.normal(-0.1, 0.1, 400).clip(-1, 1)
    assert decide_now(np.ones(400), 0.02, ALPHA, gains=good) == "PASS"
    assert decide_now(np.ones(400), 0.02, ALPHA, gains=bad) == "FAIL"
    assert decide_now(np.ones(400), 0.5, ALPHA, gains=good, span=100) == "INCONCLUSIVE"


def test_a_margin_beyond_the_range_is_refused() -> None:
    with pytest.raises(ValueError, match="need a number within -1"):
        log_evidence([1, 1, 1], 1.0)
