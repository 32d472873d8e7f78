"""Compares dequantized weights with their source's: equal but for rounding, in every part.

Rounding that knows the inputs (GPTQ, refit) moves a weight far from its source's where inputs
forgive it. What it leaves has no direction: a fault of scale goes along the weight, one of zero
points shifts whole parts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import normalize

from vexport.checks.vllm.groups import ConfigGroup, StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import as_loaded, weight_of
from vexport.fidelity.source import Pieces
from vexport.formats.arguments import QuantArgs
from vexport.formats.dequantize import row_chunks, rows_of
from vexport.numerics.metrics import sqnr_db
from vexport.observers import MemorylessMinMaxObserver
from vexport.observers.qparams import fake_quantize

# GPTQ was seen 0.6 to 9 dB below plain rounding with the same scales (SmolLM2-135M in W4A16), a
# refit of eight bits more, since its correction is no smaller than that of four. Another weight has
# 0 dB and less.
MOST_BELOW_ROUNDING_DB = 10.0
LEAST_DB = 3.0
# Rounding is unbiased but for what clipping and coarse steps take: at most about twice its own
# noise power. What is left to a fault of scale is more than 5 percent. A refit shrinks weights by
# what its inputs are noisier, by 10 percent with half of the correction and a fifth of noise; the
# rest of its error is well above rounding then.
MOST_GAIN_ERROR, MOST_REFIT_GAIN_ERROR = 0.05, 0.12
REFITTED_DB = 3.0
# A part (one scale's elements) is wrong where its error has a quarter of its power, is far above
# what rounding leaves in the layer's parts, and goes along the weight: a scale off by a half does,
# and so does what has nothing to do with the weight. GPTQ's own error, in which a part can drown,
# does not. Where most rows have more noise in the same columns, so may a part, but for what has
# lost three quarters.
WRONG_PART_NOISE = 0.25
WRONG_PART_FACTOR = 50.0
# Next to a value that outweighs its row rounding itself leaves a part's smaller ones that far off.
OWN_ROUNDING_FACTOR = 2.0
MOST_COARSE_NOISE = 0.75
WRONG_PART_GAIN = 0.35
PART_COLUMNS = 128
# The factors by which parts are larger differ by what rounding leaves in them, if scales are the
# parts' own; the same scales in another order make them differ more. GPTQ was seen 1.3 to 2.5 times
# above plain rounding.
MOST_SPREAD_FACTOR = 4.0
LEAST_SPREAD = 0.02
FEWEST_PARTS = 16
# A refit scales single columns, in all rows alike (`_column_factors`), whatever scales the parts
# have. A wrong scale changes all columns of its part. So parts may differ by factors of columns, if
# the median of a part's columns differs from that of the other parts by no more than this. Factors
# of fewer rows would be noise.
MOST_PART_FACTOR = 0.1
FEWEST_ROWS_FOR_FACTORS = 32
# Rounding keeps most of a weight, also with two bits: 0.7 and more of its size. Another weight
# keeps nothing.
LEAST_OWN_GAIN, MOST_OWN_GAIN = 0.5, 1.5
TINY = torch.finfo(torch.float32).tiny
# Of the whole error so much is that of parts' scales, or of a shift of whole parts, where those are
# at fault: of noise it is one in as many as a part has elements.
LEAST_SCALE_SHARE, LEAST_SHIFT_SHARE = 0.2, 0.3
# Directions that errors of all rows share (`unlike_the_others`), and how much of an error goes
# along them.
DIRECTIONS = 8
LEAST_SHARE = 0.12
# An unrelated error has about chi-square of `DIRECTIONS` / columns along them: more than this by no
# chance.
LEAST_OF_CHANCE = 64.0
# Rows that show the directions, and one in how many rows of a layer may be such a row.
SHOWN_ROWS = 512
FEWEST_ROWS_FOR_ONE = 64
# The errors (rows, in) of the rows with these ascending numbers (rows,).
ErrorsOf = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightComparison:
    """The comparison of a stored weight with its source's.

    `snr_db` is its signal-to-noise, `rounding_db` that of the source's weight rounded to nearest in
    the same scheme; `gain` the factor by which the stored weight is larger, `spread` the standard
    deviation of the parts' own, `plain_spread` what noise alone would make it; `shift` is the share
    of the error that shifts whole parts; `wrong_parts` of `parts` are far off.
    """

    snr_db: float
    rounding_db: float
    gain: float
    spread: float
    plain_spread: float
    shift: float
    parts: int
    wrong_parts: int
    first_wrong_row: int

    @property
    def is_doubtful(self) -> bool:
        """Return whether it has faults, or less of the source than rounding to nearest leaves."""
        return self.rounding_db - self.snr_db > REFITTED_DB or bool(self.faults)

    @property
    def is_same_weight(self) -> bool:
        """Return whether the stored weight is the source's, however far rounding moved parts of
        it.
        """
        return LEAST_OWN_GAIN < self.gain < MOST_OWN_GAIN

    @property
    def has_uneven_scales(self) -> bool:
        """Return whether the factors of the parts differ by more than rounding makes them
        differ.
        """
        plain = max(MOST_SPREAD_FACTOR * self.plain_spread, LEAST_SPREAD)
        noise = 10 ** (-self.snr_db / 10)
        many = self.parts >= FEWEST_PARTS
        return many and self.spread > plain and self.spread**2 > LEAST_SCALE_SHARE * noise

    @property
    def faults(self) -> tuple[str, ...]:
        """Return the implausible properties, each as a noun phrase."""
        noise = 10 ** (-self.snr_db / 10)
        below = self.rounding_db - self.snr_db
        # The error left once the scale is corrected: a refit leaves more than rounding.
        rest = max(noise - (self.gain - 1) ** 2, 0.0)
        refitted = rest > 10 ** ((REFITTED_DB - self.rounding_db) / 10)
        allowed = MOST_REFIT_GAIN_ERROR if refitted else MOST_GAIN_ERROR
        allowed += 2 * 10 ** (-self.rounding_db / 10)
        faults = []
        if below > MOST_BELOW_ROUNDING_DB and self.snr_db < LEAST_DB:
            faults.append(f"an SQNR of {self.snr_db:.1f} dB")
        if abs(self.gain - 1) > allowed:
            faults.append(f"values {self.gain:.3g} times as large")
        if self.has_uneven_scales:
            faults.append(f"scales that deviate by {self.spread:.1%} within the layer")
        if self.parts >= FEWEST_PARTS and below > REFITTED_DB and self.shift > LEAST_SHIFT_SHARE:
            faults.append(
                f"zero points that are off: {self.shift:.0%} of the error shifts whole groups"
            )
        if self.wrong_parts:
            place = f"the first in row {self.first_wrong_row}"
            faults.append(f"other values in {self.wrong_parts} of {self.parts} parts, {place}")
        return tuple(faults)


def compare_weight(
    view: CheckpointView, layer: StoredLayer, pieces: Pieces
) -> WeightComparison | None:
    """Compare a quantized layer with its source's weight, some rows at a time; None if shapes
    differ.

    If it has faults, the weight is compared once more without the factors of its columns.
    """
    group, stored = layer.group, as_loaded(view, layer)
    shape = (sum(piece.shape[0] for piece in pieces), pieces[0].shape[1])
    if group is None or stored is None or view.shape_of(layer) != shape:
        return None
    weight = _StoredWeight(group, stored, shape)
    try:
        comparison = weight.compared(pieces)
        if comparison.faults and shape[0] >= FEWEST_ROWS_FOR_FACTORS:
            comparison = _without_column_factors(comparison, weight, pieces)
    except ValueError:  # arguments or shapes that compressed-tensors refuses
        return None
    view.reader.release(layer.parameters.values())
    return comparison


def _without_column_factors(
    comparison: WeightComparison, weight: "_StoredWeight", pieces: Pieces
) -> WeightComparison:
    """Return the comparison without the factors of columns that a refit makes, if it has no faults
    then.

    A refit scales each column for what the quantized layers before make of its input, in all rows
    alike. One column of large weights then moves the factors of all parts that it is in. A wrong
    scale of some rows or blocks is in no column of all rows, and remains. The factor of the whole
    weight is that of most columns.
    """
    factors = weight.column_factors(pieces)
    of_parts = factors.reshape(-1, _part_width(weight.args, len(factors))).median(dim=1).values
    usual = float(of_parts.median())
    if float((of_parts - usual).abs().max()) > MOST_PART_FACTOR:
        return comparison
    refitted = weight.compared(tuple(piece.to(torch.float32) * factors for piece in pieces))
    explained = replace(
        comparison,
        gain=refitted.gain * usual,
        spread=refitted.spread,
        plain_spread=refitted.plain_spread,
        wrong_parts=refitted.wrong_parts,
    )
    return comparison if refitted.has_uneven_scales or explained.faults else explained


class _StoredWeight:
    """A layer's stored tensors, dequantized some rows at a time."""

    def __init__(
        self, group: ConfigGroup, stored: Mapping[str, torch.Tensor], shape: tuple[int, int]
    ) -> None:
        self.args = replace(group.weights, observer_kwargs={}, observer=None)
        self._group, self._stored, self._shape = group, stored, shape

    def compared(self, pieces: Pieces) -> WeightComparison:
        """Compare with a source's weight; ValueError if compressed-tensors refuses the tensors."""
        nearest = _Nearest(self.args, pieces)
        parts = [
            _compare(source, weight, nearest, rows) for rows, source, weight in self._chunks(pieces)
        ]

        def errors_of(rows: torch.Tensor) -> torch.Tensor:
            errors = []
            for chunk, source, weight in self._chunks(pieces):
                chosen = rows[(rows >= chunk.start) & (rows < chunk.stop)] - chunk.start
                errors.append(weight[chosen].to(torch.float32) - source[chosen])
            return torch.cat(errors)

        return _judged(parts, errors_of, self._shape[1])

    def column_factors(self, pieces: Pieces) -> torch.Tensor:
        """Return the factor by which each column is larger than the source's, float32 (in,)."""
        power = torch.zeros(self._shape[1], dtype=torch.float64)
        product = torch.zeros(self._shape[1], dtype=torch.float64)
        for _, source, weight in self._chunks(pieces):
            power += source.square().sum(dim=0, dtype=torch.float64)
            product += (source * weight).sum(dim=0, dtype=torch.float64)
        return torch.where(power > 0, product / power, 1.0).to(torch.float32)

    def _chunks(self, pieces: Pieces) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield rows, the source's weight of these rows, and the stored weight."""
        for rows in row_chunks(*self._shape):
            stored = rows_of(self._stored, self.args, rows)
            yield rows, _rows(pieces, rows), weight_of(self._group, stored)


def nearest_weight(args: QuantArgs, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight (out, in) rounded to nearest with scales from its ranges, float32."""
    nearest = _Nearest(replace(args, observer_kwargs={}, observer=None), (weight,))
    return nearest.of(weight.to(torch.float32), slice(0, len(weight)))


class _Nearest:
    """Rounds a source's weight to nearest with scales from its own ranges."""

    def __init__(self, args: QuantArgs, pieces: Pieces) -> None:
        self.args = args
        observer = MemorylessMinMaxObserver("weight", args)
        observer.forward(pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces)))
        qparams = observer.get_qparams()
        scale, global_scale = qparams["scale"], qparams["global_scale"]
        self._scale = scale if global_scale is None else scale / global_scale
        self._zero_point = qparams["zero_point"].to(torch.float32)

    def of(self, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        """The rounded weight of some rows, float32."""
        scale, zero_point = (
            self._spread(values, weight, rows) for values in (self._scale, self._zero_point)
        )
        return fake_quantize(weight, scale, zero_point, self.args)

    def _spread(self, values: torch.Tensor, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        """A value for each element, or one that broadcasts."""
        if values.numel() == 1:
            return values.reshape(1, 1)
        block_rows, block_cols = self.args.block or (1, self.args.group)
        cut = values[rows.start // block_rows : math.ceil(rows.stop / block_rows)]
        tall = (
            cut.repeat_interleave(block_rows, dim=0)[: weight.shape[0]] if block_rows > 1 else cut
        )
        return (
            tall.repeat_interleave(block_cols, dim=1)[:, : weight.shape[1]] if block_cols else tall
        )


def _rows(pieces: Pieces, rows: slice) -> torch.Tensor:
    """Some rows of the source's weight, float32."""
    parts, start = [], 0
    for piece in pieces:
        low, high = max(rows.start - start, 0), min(rows.stop - start, piece.shape[0])
        if low < high:
            parts.append(piece[low:high].to(torch.float32))
        start += piece.shape[0]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _compare(
    source: torch.Tensor, stored: torch.Tensor, nearest: _Nearest, rows: slice
) -> torch.Tensor:
    """Powers by part of some rows, (6, rows, parts of a row): source, error, error of rounding, of
    the error what shifts the part; product of source and stored, of source and rounded."""
    parts = (len(source), -1, _part_width(nearest.args, source.shape[1]))
    exact = source.reshape(parts)
    off = (stored.to(torch.float32) - source).reshape(parts)
    plain = (nearest.of(source, rows) - source).reshape(parts)
    signal, noise, rounding = (values.square().sum(dim=2) for values in (exact, off, plain))
    shift = off.mean(dim=2).square() * off.shape[2] / noise.clamp_min(TINY)
    products = ((exact * (exact + values)).sum(dim=2) for values in (off, plain))
    return torch.stack((signal, noise, rounding, shift, *products))


def _part_width(args: QuantArgs, columns: int) -> int:
    """The columns that share a scale where a row is a whole number of them; else a fixed number, or
    all.
    """
    block_cols = args.block[1] if args.block else args.group
    return next(
        (width for width in (block_cols, PART_COLUMNS) if width and columns % width == 0), columns
    )


def _judged(parts: Sequence[torch.Tensor], errors_of: ErrorsOf, columns: int) -> WeightComparison:
    """The comparison from its parts; rows in which GPTQ explains the parts are not wrong."""
    signal, noise, rounding, shift, product, plain_product = torch.cat([*parts], dim=1)
    power, error, plain, along = (
        float(values.sum(dtype=torch.float64)) for values in (signal, noise, rounding, product)
    )
    gain = product / signal.clamp_min(TINY)
    wrong = ~(noise <= WRONG_PART_NOISE * signal) & ~(noise <= _most_noise(signal, noise, rounding))
    wrong &= ~((gain - 1).abs() <= WRONG_PART_GAIN)
    wrong &= unlike_the_others(wrong.any(dim=1), errors_of, columns)[:, None]
    rows = wrong.any(dim=1).nonzero()
    return WeightComparison(
        snr_db=sqnr_db(power, error),
        rounding_db=sqnr_db(power, plain),
        gain=along / power if power else 1.0,
        spread=_spread(product, signal),
        plain_spread=_spread(plain_product, signal),
        shift=float((shift * noise).sum() / noise.sum().clamp_min(TINY)),
        parts=wrong.numel(),
        wrong_parts=int(wrong.sum()),
        first_wrong_row=int(rows[0]) if rows.numel() else 0,
    )


def _most_noise(signal: torch.Tensor, noise: torch.Tensor, rounding: torch.Tensor) -> torch.Tensor:
    """The noise up to which a part is sound: by what rounding leaves in the layer, or in its row
    where that is more, or what most rows have in its columns.

    A search that weighs errors by the inputs gives columns next to a very large one coarse scales.
    """
    of_row = rounding.mean(dim=1, keepdim=True).clamp_min(float(rounding.mean()))
    usual = torch.maximum(WRONG_PART_FACTOR * of_row, OWN_ROUNDING_FACTOR * rounding)
    if len(noise) < FEWEST_PARTS:
        return usual
    of_columns = WRONG_PART_FACTOR * noise.median(dim=0).values
    return torch.minimum(of_columns, MOST_COARSE_NOISE * signal).clamp_min(usual)


def _spread(product: torch.Tensor, signal: torch.Tensor) -> float:
    """The standard deviation of the parts' gains, weighted by their power."""
    power = signal.sum(dtype=torch.float64)
    if not power:
        return 0.0
    deviation = product - product.sum(dtype=torch.float64) / power * signal
    squares = torch.where(signal > 0, deviation.square() / signal, 0.0)
    return float((squares.sum(dtype=torch.float64) / power).sqrt())


def unlike_the_others(wrong: torch.Tensor, errors_of: ErrorsOf, columns: int) -> torch.Tensor:
    """Select those of the `wrong` rows (rows,) whose errors differ in direction from the other
    rows' errors.

    All rows of a layer are rounded for one input. Where one column of it outweighs all others, as
    the massive activations of a first token do, GPTQ corrects the error of that column in every row
    by the same combination of the others: the errors of all rows share a few directions. A row with
    a large weight in that column ends with an error of several times its weight, and still answers
    as it should. A fault does not know these directions.

    On SmolLM2-135M two down projections have such rows: -12 to 7 dB with GPTQ in W4A16, W3A16,
    NVFP4 and MXFP4, of their error 0.16 to 0.9 along eight directions. Where a row is another one's
    it is at most 0.19 for 99 rows of 100, where columns are in another order 0.014.
    """
    rows, others = wrong.nonzero()[:, 0], (~wrong).nonzero()[:, 0]
    if not len(rows) or len(rows) * FEWEST_ROWS_FOR_ONE > len(wrong):
        return wrong
    picked = others[
        torch.linspace(0, len(others) - 1, min(len(others), SHOWN_ROWS)).to(torch.int64)
    ]
    shares = _along(errors_of(picked), errors_of(rows))
    unlike = wrong.clone()
    unlike[rows] = (shares < LEAST_SHARE) | (shares * columns < LEAST_OF_CHANCE)
    return unlike


def _along(shown: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """The share of the power of each error (rows, in) along the main directions of those
    `shown`.
    """
    shown = normalize(shown, dim=1)
    _, combinations = torch.linalg.eigh(shown @ shown.T)
    directions = normalize(combinations[:, -DIRECTIONS:].T @ shown, dim=1)
    return (normalize(errors, dim=1) @ directions.T).square().sum(dim=1)
