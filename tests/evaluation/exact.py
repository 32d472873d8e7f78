"""The exact power of the paired test, by scipy's binomial: nothing of what plans documents."""

from bisect import bisect_right

from scipy import stats

from vexport.evaluation.statistics import tango_statistic


def exact_power(documents: int, disagreement: float, margin: float, alpha: float = 0.05) -> float:
    """The chance of a PASS where nothing is lost and so large a share of the answers changes."""
    critical, power = float(stats.norm.isf(alpha)), 0.0
    low, high = stats.binom.interval(1 - 1e-6, documents, disagreement)
    for changed in range(int(low), int(high) + 1):

        def statistic(wins: int, changed: int = changed) -> float:
            return tango_statistic(wins, changed - wins, documents, -margin)

        least = bisect_right(range(changed + 1), critical, key=statistic)  # wins; it grows with them
        chance = stats.binom.pmf(changed, documents, disagreement)
        power += float(chance * stats.binom.sf(least - 1, changed, 0.5))
    return power
