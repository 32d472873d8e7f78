"""Signal-to-noise of the layers by kind."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from vexport.reports.charts.axis import Axis, Tick, padded
from vexport.reports.formatting import decibels, plural
from vexport.types import LayerError

MAX_DOTS = 240
LEAST_SPAN_DB = 3.0
"""The axis spans this at least: half a bit is 3 dB, and layers of one scheme differ by tenths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """The layers of one kind and scheme: a dot each, and what they span."""

    title: str
    scheme: str
    layers: str
    lowest: str
    median: str
    median_at: float
    dots: tuple[Tick, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChart:
    """Signal-to-noise by kind of layer; `hidden` dots were left out between their neighbours."""

    rows: tuple[LayerRow, ...]
    ticks: tuple[Tick, ...]
    hidden: int


def layer_chart(layers: Sequence[LayerError]) -> LayerChart | None:
    """Group the layers by kind and scheme; None where no layer has a finite signal-to-noise."""
    noisy = [layer for layer in layers if math.isfinite(layer.snr_db)]
    if not noisy:
        return None
    axis = padded([layer.snr_db for layer in noisy], least=LEAST_SPAN_DB)
    kinds: dict[tuple[str, str], list[LayerError]] = {}
    for layer in noisy:
        kinds.setdefault((layer_kind(layer.name), layer.scheme), []).append(layer)
    rows = tuple(_layer_row(kind, scheme, members, axis) for (kind, scheme), members in kinds.items())
    ticks = tuple(Tick(axis.at(value), f"{value:g}") for value in axis.values())
    hidden = len(noisy) - sum(len(row.dots) for row in rows)
    return LayerChart(rows=rows, ticks=ticks, hidden=hidden)


def layer_kind(name: str) -> str:
    """What repeats from block to block: `model.layers.3.mlp.experts.7.up_proj` is `mlp.experts.up_proj`."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    start = numbers[0] if numbers else 0
    return ".".join(part for part in parts[start:] if not part.isdecimal())


def _layer_row(kind: str, scheme: str, members: Sequence[LayerError], axis: Axis) -> LayerRow:
    ordered = sorted(members, key=lambda layer: layer.snr_db)
    middle = median(layer.snr_db for layer in ordered)
    return LayerRow(
        title=kind,
        scheme=scheme,
        layers=plural(len(ordered), "layer"),
        lowest=decibels(ordered[0].snr_db),
        median=decibels(middle),
        median_at=axis.at(middle),
        dots=tuple(
            Tick(axis.at(layer.snr_db), f"{layer.name}: {decibels(layer.snr_db)} dB")
            for layer in _thinned(ordered)
        ),
    )


def _thinned(ordered: Sequence[LayerError]) -> Sequence[LayerError]:
    """At most MAX_DOTS layers evenly over the order; the lowest and the highest stay."""
    if len(ordered) <= MAX_DOTS:
        return ordered
    last = len(ordered) - 1
    return [ordered[round(index * last / (MAX_DOTS - 1))] for index in range(MAX_DOTS)]
