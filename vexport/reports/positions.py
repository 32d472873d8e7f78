"""Build a table and charts of the loss on held-out text by the token's position in its row.

A bucket is a range of positions.
"""

import math
from collections.abc import Callable, Iterator

from vexport.records import TextBucket, TextPoint, TextVerdict
from vexport.records.scale import percent
from vexport.reports import document as doc
from vexport.reports.document import TableCell, badge, judged_cell, parts, table
from vexport.reports.formatting import (
    count,
    percent_interval,
    small,
)
from vexport.words import plural

_X_UNIT = "position of the token in its row"
# Room above the highest and below the lowest point of a chart, as a share of their distance.
_AXIS_MARGIN = 0.08


def position_parts(text: TextVerdict, candidate: str = "quantized") -> tuple[doc.Part, ...]:
    """Return the buckets and the curves. `candidate` is the name of the candidate's curves."""
    return parts(bucket_table(text), _charts(text, candidate))


def bucket_table(text: TextVerdict) -> doc.Table:
    """Return a table with a row for each bucket of positions."""
    noise = doc.Column("Read again", numeric=True, noted=True)
    titles = ("Tokens", "Result", ">KL", ">NLL", ">Rise", ">Other choice", noise)
    repeated = next((bucket.noise.rows for bucket in text.buckets if bucket.noise), 0)
    caption = (
        "by the position of a token in its row; the worst bucket decides; NLL of the baseline, and "
        "its rise; other choice: the models have different likeliest tokens"
    )
    if repeated:
        caption += (
            f"; read again: KL, change of the NLL and other choices of the baseline when it reads "
            f"{plural(repeated, 'row')} twice"
        )
    return table(titles, map(_bucket_row, text.buckets), caption)


def _bucket_row(bucket: TextBucket) -> Iterator[TableCell]:
    yield TableCell(f"{bucket.start:,}-{bucket.end:,}", f"{count(bucket.tokens)} in all rows")
    yield badge(bucket.outcome)
    yield from (judged_cell(limit) for limit in bucket.limits if not limit.is_rise)
    yield TableCell(small(bucket.baseline_nll))
    yield from (judged_cell(limit) for limit in bucket.limits if limit.is_rise)
    interval = percent_interval(bucket.changed_low, bucket.changed_high)
    yield TableCell(percent(bucket.changed), interval)
    if bucket.noise is None:
        yield TableCell("not measured")
    else:
        changes = f"NLL {bucket.noise.nll_rise:+.2g}, {percent(bucket.noise.changed)}"
        yield TableCell(f"{bucket.noise.kl:.2g}", changes)


def _charts(text: TextVerdict, candidate: str) -> Iterator[doc.Curves]:
    """Yield a chart of both models' NLL, and a chart of the KL with the noise of the baseline.

    Yields nothing if fewer than two positions were measured.
    """
    if len(text.curve) < 2:
        return
    marks = _marks(text)
    nlls = (
        _curve("baseline", "source", text, lambda point: point.baseline_nll),
        _curve(candidate, "quantized", text, lambda point: point.candidate_nll),
    )
    low, high = _range(nlls, ())
    yield doc.Curves(
        title="NLL by position",
        unit="nats per token",
        x_unit=_X_UNIT,
        curves=nlls,
        marks=marks,
        low=low,
        high=high,
    )
    kls = (
        _curve(candidate, "quantized", text, lambda point: point.kl),
        _curve("baseline, read again", "noise", text, lambda point: point.noise),
    )
    limit = text.limits[0].limit
    low, high = _range(kls, (0.0, limit))
    yield doc.Curves(
        title="KL to the baseline by position",
        unit="nats per token",
        x_unit=_X_UNIT,
        curves=tuple(curve for curve in kls if curve.points),
        marks=marks,
        low=0.0,
        high=high,
        limit=limit,
    )


def _curve(
    name: str, tone: str, text: TextVerdict, value: Callable[[TextPoint], float | None]
) -> doc.Curve:
    """Return a curve with a point for each range of positions.

    The point is at the middle of the range on a logarithmic axis.
    """
    values = [(point, value(point)) for point in text.curve]
    points = tuple((_middle(point), y) for point, y in values if y is not None)
    return doc.Curve(name=name, tone=tone, points=points)


def _middle(point: TextPoint) -> float:
    return math.sqrt(point.start * point.end)


def _marks(text: TextVerdict) -> tuple[int, ...]:
    """Return the marks of the x axis: the first and last token, and the ends of the buckets."""
    return (1, *(bucket.end for bucket in text.buckets))


def _range(curves: tuple[doc.Curve, ...], others: tuple[float, ...]) -> tuple[float, float]:
    """Return the ends of a y axis that includes all points and the additional values."""
    values = [y for curve in curves for _, y in curve.points] + list(others)
    low = min(values)
    high = max(values)
    room = _AXIS_MARGIN * (high - low) or 1.0
    return low - room, high + room
