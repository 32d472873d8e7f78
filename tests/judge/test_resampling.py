"""Bootstrap resamples compared with scipy's, and grouped draws with single draws."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from vexport.judge import corpus
from vexport.judge.resampling import RESAMPLES, grouped_sums, resampled_ratio
from vexport.judge.statistics import (
    bca_interval,
    normal_quantile,
    normal_tail,
    student_quantile,
)
from vexport.records import Json
from vexport.scores.aggregates import Scores, tabulate

Draw = Callable[[np.random.Generator, int], Scores]
DRAWS: dict[str, Draw] = {
    "normal": lambda noise, count: noise.normal(-0.01, 1, count),
    "skewed": lambda noise, count: noise.exponential(1, count) ** 3,
    "graded": lambda noise, count: noise.choice([0, 0.25, -0.5], count, p=[0.8, 0.1, 0.1]),
    "outlier": lambda noise, count: np.append(noise.normal(0, 0.001, count - 1), 5.0),
}


def scipys(
    samples: tuple[Scores, ...], statistic: Callable[..., Scores], alpha: float
) -> tuple[float, float]:
    found = stats.bootstrap(
        samples,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=4_000_000 // len(samples[0]),
        confidence_level=1 - 2 * alpha,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


@pytest.mark.parametrize("count", [6, 41, 700])
@pytest.mark.parametrize("name", DRAWS)
def test_bounds_of_a_mean_are_scipys(name: str, count: int) -> None:
    values = DRAWS[name](np.random.default_rng(count), count)
    for alpha in (0.05, 0.01):
        expected = scipys((values,), np.mean, alpha)
        assert bca_interval(values, alpha) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("count", [12, 200])
def test_bounds_of_a_ratio_are_scipys(count: int) -> None:
    noise = np.random.default_rng(count)
    sizes = noise.integers(1, 40, count).astype(np.float64)
    sums = sizes * noise.normal(0.5, 0.3, count)
    expected = scipys((sums, sizes), lambda a, b, axis: a.sum(axis) / b.sum(axis), 0.05)
    assert bca_interval(sums, 0.05, sizes) == pytest.approx(expected, rel=1e-9)


def test_quantiles_are_scipys() -> None:
    for alpha in (0.3, 0.05, 0.0125, 1e-7):
        assert normal_quantile(alpha) == float(stats.norm.isf(alpha))
        assert normal_tail(alpha) == float(stats.norm.sf(alpha))
        assert student_quantile(alpha, 9) == pytest.approx(float(stats.t.isf(alpha, 9)), rel=1e-12)


@pytest.mark.parametrize("name", DRAWS)
def test_grouped_draws_have_the_same_distribution(name: str) -> None:
    values = DRAWS[name](np.random.default_rng(1), 8000)
    single = resampled_ratio(values, np.ones(8000))
    grouped = grouped_sums(values[:, np.newaxis], values)[:, 0] / 8000
    spread = float(single.std())
    assert grouped.mean() == pytest.approx(single.mean(), abs=0.05 * spread)
    assert grouped.std() == pytest.approx(spread, rel=0.03)
    for share in (0.05, 0.95):
        ends = [float(np.quantile(each, share)) for each in (single, grouped)]
        assert ends[0] == pytest.approx(ends[1], abs=0.1 * spread)


def test_many_documents_have_students_bounds() -> None:
    values = np.random.default_rng(2).gamma(2, 1, 40_000)
    reach = 1.6448536 * float(values.std(ddof=1)) / 200
    expected = (values.mean() - reach, values.mean() + reach)
    assert bca_interval(values, 0.05) == pytest.approx(expected, abs=0.04 * reach)
    sizes = np.random.default_rng(3).integers(1, 9, 40_000).astype(np.float64)
    ratio = bca_interval(values * sizes, 0.05, sizes)
    assert ratio.low < (values * sizes).sum() / sizes.sum() < ratio.high


@pytest.mark.parametrize("metric", ["weighted_perplexity", "f1"])
def test_grouped_corpora(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(4)
    sides: list[list[Json]] = [[], []]
    for length in noise.integers(5, 400, 3000).tolist():
        gold = int(length % 3 == 0)
        for side in sides:
            chosen = gold if noise.random() < 0.8 else 1 - gold
            value = -length * (3 + float(noise.normal(0, 0.1)))
            side.append([value, length] if metric == "weighted_perplexity" else [gold, chosen])
    table = tabulate(metric, metric, *sides)
    single = corpus.compare_corpora(table).difference_interval(0.05)
    monkeypatch.setattr(corpus, "MOST_DRAWN", 100)
    grouped = corpus.compare_corpora(table).difference_interval(0.05)
    width = single.high - single.low
    assert grouped == pytest.approx(single, abs=0.04 * width)
