"""Judge each column of a quantized weight against the source's column.

A column holds the weights of one input. A fault in a column, such as a wrong sign, is a small part
of every row, so it is invisible in rows and blocks. But it can ruin the outputs if the input is
large.

Columns are judged relative to what rounding to nearest leaves of them. GPTQ and refits move columns
farther than rounding does, with errors that are uncorrelated with the column. They do not turn a
column around, and do not replace it by another one. Long columns are judged in segments of rows, so
that a fault in some rows is found, too.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from vexport.words import plural

# A segment has at least this number of rows, and never rows of two pieces of the source.
SEGMENT_ROWS = 256
# The limits were measured on the demo model, its harder variants and SmolLM2-135M in 16 schemes
# with nearest, GPTQ and refit, on AWQ and GPTQ of llm-compressor, and on recorded checkpoints.
# `ratio` is the median ratio of a column's error power to rounding's, in the whole weight: 1 for
# nearest, 1.5 to 8 for GPTQ and refits. It is limited so that a fault in most columns does not hide
# itself.
MAX_RATIO = 10.0
# Usual error power, as a multiple of `ratio` times rounding's error power.
USUAL_ERROR = 16.0
# Error power that neither GPTQ nor a refit reaches, even with 2,048 tokens of calibration text next
# to massive activations.
LARGEST_ERROR = 100.0
# A refit scales a column down if its input is noisy, by 0.5 at most. A search of scales clips
# columns of large weights, but rounding on the same grid clips them too.
LEAST_PROJECTION, USUAL_PROJECTION, LARGEST_PROJECTION = 0.3, 0.5, 1.5
# Number of standard deviations that a projection may differ by chance.
DEVIATIONS = 4.0
# A row with more than this multiple of the usual error power has a smaller weight in the sums.
FAR_ROW = 4.0
# If chance explains any projection, only a column with at most this cosine is certainly wrong.
TURNED_AROUND = -0.5
# Rounding keeps a column if its error power is at most this share of the column's power.
KEPT_NOISE = 0.25
# A power is zero, apart from float32's own rounding, if it is at most this share of the column's.
NEGLIGIBLE = 1e-6
TINY = torch.finfo(torch.float32).tiny


class ColumnSums:
    """Weighted sums over rows, by segment and column.

    `source`, `error` and `rounding` are the powers of the source's weight, of the error, and of the
    error of rounding to nearest. `product` is the inner product of source and stored weight. All
    are float32 (segments, in). `rows` is the sum of the rows' weights (segments, 1).
    """

    def __init__(self, heights: Sequence[int], columns: int) -> None:
        self._bounds = list(accumulate(_segment_heights(heights), initial=0))
        self._shape = (len(self._bounds) - 1, columns)
        self.source, self.error, self.rounding, self.product = (self.zeros() for _ in range(4))
        self.rows = torch.zeros(self._shape[0], 1)
        self._weights = torch.ones(self._bounds[-1])

    def zeros(self) -> torch.Tensor:
        """Return sums of nothing."""
        return torch.zeros(self._shape)

    def weigh(self, rows: slice, error: torch.Tensor, rounding: torch.Tensor) -> None:
        """Weigh some rows by their error power and the error power of rounding (rows,).

        Next to a massive activation, GPTQ may change a few rows by several times their size
        (`select_deviating_rows` in weights.py). These rows must not hide the others.
        """
        usual = FAR_ROW * torch.maximum(error.median(), rounding.mean())
        far = (error > usual) & (usual > 0)
        self._weights[rows] = torch.where(far, usual / error, 1.0)
        self.add(self.rows, torch.ones(len(error), 1), rows)

    def add(self, sums: torch.Tensor, values: torch.Tensor, rows: slice) -> None:
        """Add the weighted values (rows, in) of some rows of the weight to `sums`."""
        for segment, (start, stop) in enumerate(pairwise(self._bounds)):
            low, high = max(start, rows.start), min(stop, rows.stop)
            if low < high:
                weights = self._weights[low:high]
                sums[segment] += weights @ values[low - rows.start : high - rows.start]

    def faults(
        self, rounding_on_grid: Callable[[], torch.Tensor]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the columns that rounding cannot explain, and the columns that are only scaled.

        Both are noun phrases for a message. `rounding_on_grid` computes the error power (segments,
        in) of rounding the source to nearest with the stored scales. It is only called for doubtful
        columns.
        """
        ratio = self._ratio()
        judged = self._judged(self.rounding, ratio)
        if not any(bool(found.any()) for found in judged):
            return (), ()
        zero, wrong, scaled = self._judged(torch.maximum(self.rounding, rounding_on_grid()), ratio)
        faults = (*self._zero_columns(zero), *self._unlike_columns(wrong, "unlike the source's"))
        return faults, tuple(self._unlike_columns(scaled, "scaled"))

    def _ratio(self) -> float:
        rounded = self.rounding > 0
        if not bool(rounded.any()):
            return 1.0
        ratio = float((self.error[rounded] / self.rounding[rounded]).median())
        return min(max(ratio, 1.0), MAX_RATIO)

    def _judged(
        self, rounding: torch.Tensor, ratio: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return which columns are zero, which differ from the source's, and which are only scaled.

        All are bool (segments, in).

        The noise of a sound column comes from rounding the column and, with GPTQ, from rounding
        other columns. Its chance correlation with the source's column has a standard deviation that
        falls with the number of rows.
        """
        power = self.source.clamp_min(TINY)
        noise = ratio * torch.maximum(rounding, self.rounding.mean(dim=1, keepdim=True))
        noise = torch.maximum(noise, NEGLIGIBLE * power)
        relative = USUAL_ERROR * noise / power
        chance = DEVIATIONS * (relative / self.rows).sqrt()
        projection = self.product / power
        least = USUAL_PROJECTION - chance
        least_cosine = least / (least.square() + relative).sqrt()
        stored = self._stored_power()
        cosine = self.product / (self.source * stored).sqrt().clamp_min(TINY)
        zero = (stored <= NEGLIGIBLE * self.source) & (self.source > 0)
        unlike = (cosine < least_cosine) | (projection + chance < LEAST_PROJECTION)
        unlike = torch.where(least > 0, unlike, cosine < TURNED_AROUND)
        unlike |= projection - chance > LARGEST_PROJECTION
        unlike &= (self.source > 0) & ~zero
        wrong = unlike | (self._unaligned_error() > LARGEST_ERROR * noise)
        scaled = (self.error > LARGEST_ERROR * noise) & ~zero & ~wrong
        return zero & (rounding <= KEPT_NOISE * self.source), wrong, scaled

    def _stored_power(self) -> torch.Tensor:
        return (self.error + 2 * self.product - self.source).clamp_min(0.0)

    def _unaligned_error(self) -> torch.Tensor:
        along = (self.product - self.source).square() / self.source.clamp_min(TINY)
        return (self.error - torch.where(self.source > 0, along, 0.0)).clamp_min(0.0)

    def _zero_columns(self, zero: torch.Tensor) -> Iterator[str]:
        if bool(zero.any()):
            yield (
                f"{self._place(zero)} zero, which rounding would keep (harmless only if GPTQ "
                f"zeroed inputs that are always zero)"
            )

    def _unlike_columns(self, wrong: torch.Tensor, unlike: str) -> Iterator[str]:
        if not bool(wrong.any()):
            return
        first = int(wrong.any(dim=0).nonzero()[0])
        segment = int(wrong[:, first].nonzero()[0])
        power, error, rounding, product = (
            float(sums[segment, first])
            for sums in (self.source, self.error, self.rounding, self.product)
        )
        projection = product / power if power else 0.0
        above = 10 * math.log10(error / max(rounding, TINY))
        yield (
            f"{self._place(wrong)} {unlike} (projection {projection:.2f}, error "
            f"{above:.1f} dB above rounding to nearest)"
        )

    def _place(self, found: torch.Tensor) -> str:
        columns = found.any(dim=0).nonzero()[:, 0]
        place = f"first column {int(columns[0]):,}"
        if len(found) > 1:
            segment = int(found[:, columns[0]].nonzero()[0])
            start, stop = self._bounds[segment : segment + 2]
            place += f", rows {start:,} to {stop - 1:,}"
        return f"{len(columns):,} of {plural(found.shape[1], 'column')} ({place})"


def _segment_heights(heights: Sequence[int]) -> Iterator[int]:
    for height in heights:
        count = max(1, height // SEGMENT_ROWS)
        yield from (height // count + (number < height % count) for number in range(count))
