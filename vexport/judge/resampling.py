"""Bootstrap resamples of documents, and their BCa bounds.

The time of a resample grows with the number of documents, and 9,999 resamples of 300,000 documents
would take minutes. Therefore documents are drawn one by one up to MOST_DRAWN. More documents are
drawn in groups of similar documents: a multinomial draw has the number of documents from each
group, and a normal draw has the spread inside the groups. The sums have the same mean, variance
and nearly the same skewness as with single documents.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy import special

Numbers = NDArray[np.float64]
Indices = NDArray[np.intp]

RESAMPLES = 9999
"""Number of bootstrap resamples.

The Monte Carlo error of a 5 % tail is then below 0.25 points (sqrt(.05 * .95 / 9999)).
"""
MOST_DRAWN = 10_000
"""Maximum number of documents that are drawn one by one."""
# Maximum number of drawn documents in memory at once.
_AT_ONCE = 4_000_000
# Number of groups of similar documents. A group is a thousandth of the range of the values, so the
# spread inside a group is small.
_GROUPS = 1000


def drawn_documents(count: int, resamples: int = RESAMPLES) -> Iterator[NDArray[np.int64]]:
    """Yield the drawn documents of batches of resamples, shape (resamples in a batch, count).

    The draws are those of scipy.stats.bootstrap. They depend only on the numbers.
    """
    generator = np.random.default_rng(0)
    step = max(1, _AT_ONCE // count)
    for start in range(0, resamples, step):
        yield generator.integers(0, count, size=(min(step, resamples - start), count))


def resampled_ratio(sums: Numbers, sizes: Numbers) -> Numbers:
    """Return sum(sums) / sum(sizes) of resampled documents or clusters, shape (RESAMPLES,)."""
    count = len(sums)
    if count > MOST_DRAWN:
        ratio = float(sums.sum() / sizes.sum())
        # To first order, the ratio depends on the residuals alone.
        residuals = sums - ratio * sizes
        return ratio + grouped_sums(residuals[:, np.newaxis], residuals)[:, 0] / float(sizes.sum())
    if (sizes == 1).all():
        parts = [sums[drawn].mean(axis=-1) for drawn in drawn_documents(count)]
    else:
        parts = [sums[drawn].sum(-1) / sizes[drawn].sum(-1) for drawn in drawn_documents(count)]
    return np.concatenate(parts)


def grouped_sums(rows: Numbers, order: Numbers, resamples: int = RESAMPLES) -> Numbers:
    """Return the sums of resampled rows, drawn in groups, shape (resamples, numbers).

    `rows` has the shape (documents, numbers). `order` has the shape (documents,): documents with
    similar values belong to the same group. If there are few different rows, equal rows form the
    groups, and the draws are exact.
    """
    generator = np.random.default_rng(0)
    groups = _groups(rows, order)
    counts = np.bincount(groups).astype(np.float64)
    columns = [np.bincount(groups, weights=column) for column in rows.T]
    means = np.stack(columns, axis=1) / counts[:, np.newaxis]
    inside = rows - means[groups]
    values, vectors = np.linalg.eigh(inside.T @ inside)
    spread = vectors * np.sqrt(np.maximum(values, 0.0))
    drawn = generator.multinomial(len(rows), counts / len(rows), size=resamples)
    noise = generator.standard_normal((resamples, rows.shape[1]))
    sums: Numbers = drawn @ means + noise @ spread.T
    return sums


def _groups(rows: Numbers, order: Numbers) -> Indices:
    """Return the number of each row's group. Groups are numbered from 0, and none is empty."""
    few = np.unique(rows[: 10 * _GROUPS], axis=0)
    if len(few) <= _GROUPS:
        different, groups = np.unique(rows, axis=0, return_inverse=True)
        if len(different) <= _GROUPS:
            return groups.ravel()
    width = float(np.ptp(order)) / _GROUPS
    if width == 0:
        return np.zeros(len(rows), dtype=np.intp)
    numbers = np.minimum((order - order.min()) / width, _GROUPS - 1).astype(np.intp)
    return np.unique(numbers, return_inverse=True)[1]


def bca_bounds(
    value: float, resampled: Numbers, distances: Numbers, alpha: float, *, rounding: float = 0.0
) -> tuple[float, float]:
    """Return bias-corrected and accelerated bounds (Efron, JASA 82, 1987), each at 1 - alpha.

    `resampled` has the values of resamples. `distances` has the influence of each document, up to a
    common factor: for a mean, its distance from the mean; for other statistics, the mean of the
    values without a document minus the value without this document. Resampled values count as equal
    to `value` if they differ by `rounding` at most.
    """
    below = float((resampled < value - rounding).mean())
    equal = float((np.abs(resampled - value) <= rounding).mean())
    # Half of the ties count as below, as in scipy.stats.bootstrap.
    share = np.clip(below + equal / 2, 1 / len(resampled), 1 - 1 / len(resampled))
    bias = float(special.ndtri(share))
    cubes, squares = float((distances**3).sum()), float((distances**2).sum())
    acceleration = cubes / (6 * squares**1.5) if squares else 0.0
    ends = []
    for tail in (alpha, 1 - alpha):
        point = bias + float(special.ndtri(tail))
        corrected = bias + point / (1 - acceleration * point)
        ends.append(float(np.quantile(resampled, float(special.ndtr(corrected)))))
    return min(ends), max(ends)
