"""What differs between two checkpoints, for people: alike tensors and layers together on one line."""

import re
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TypeVar

from vexport.diff import Difference, DiffReport, TensorDifference, WeightDifference
from vexport.errors.escaping import clip, visible
from vexport.errors.extras import fix
from vexport.files import to_json
from vexport.reports.formatting import decibels, percent, plural, ratio, size

T = TypeVar("T")
# Lines of one section; JSON has all.
SHOWN = 12
MAX_TEXT = 200
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def render_diff(report: DiffReport, format_: str) -> str:
    """The report as text or JSON, with a final newline."""
    return to_json(report) if format_ == "json" else "\n".join(_lines(report)) + "\n"


def _lines(report: DiffReport) -> Iterator[str]:
    yield f"A  {_text(report.a)}  {size(report.sizes[0])}"
    yield f"B  {_text(report.b)}  {size(report.sizes[1])} ({ratio(report.sizes[1], report.sizes[0])} of A)"
    if report.same:
        yield "the same"
        return
    yield from _section("config", report.config, _difference)
    yield from _section("files", report.files, _difference)
    yield from _section("only in A", _kinds(report.only_a, _itself, _plain), _text)
    yield from _section("only in B", _kinds(report.only_b, _itself, _plain), _text)
    yield from _section("dtype or shape", _kinds(report.forms, _place, _form), _text)
    yield from _section("values", _kinds(report.values, _name, _values), _text)
    if not report.dequantized:
        yield ""
        yield f"weights once dequantized: not compared, which needs torch; {fix('torch')}"
    yield from _section("weights once dequantized", _kinds(report.weights, _layer, _weights), _text)


def _section(title: str, entries: Sequence[T], line: Callable[[T], str]) -> Iterator[str]:
    if not entries:
        return
    yield ""
    yield f"{title} ({len(entries)})"
    yield from (f"  {line(entry)}" for entry in entries[:SHOWN])
    if len(entries) > SHOWN:
        yield f"  and {len(entries) - SHOWN} more: see --format json"


def _kinds(
    entries: Sequence[T], name: Callable[[T], str], describe: Callable[[Sequence[T]], str]
) -> list[str]:
    """One line for all entries whose names differ in numbers alone: `model.layers.*.mlp.gate.weight`."""
    kinds: dict[str, list[T]] = {}
    for entry in entries:
        kinds.setdefault(NUMBER.sub("*", name(entry)), []).append(entry)
    return [f"{kind}: {describe(alike)}" for kind, alike in kinds.items()]


def _itself(name: str) -> str:
    return name


def _plain(names: Sequence[str]) -> str:
    return plural(len(names), "tensor")


def _place(difference: Difference) -> str:
    return difference.where


def _form(differences: Sequence[Difference]) -> str:
    sides = list(dict.fromkeys(f"{difference.a} -> {difference.b}" for difference in differences))
    more = f" and {len(sides) - 1} other ways" if len(sides) > 1 else ""
    return f"{plural(len(differences), 'tensor')}, {sides[0]}{more}"


def _name(difference: TensorDifference) -> str:
    return difference.name


def _values(differences: Sequence[TensorDifference]) -> str:
    most = percent(max(difference.changed for difference in differences))
    noises = [difference.snr_db for difference in differences if difference.snr_db is not None]
    noise = f", {decibels(min(noises))} dB at worst" if noises else ""
    return f"{plural(len(differences), 'tensor')}, up to {most} of the elements{noise}"


def _layer(difference: WeightDifference) -> str:
    return difference.layer


def _weights(differences: Sequence[WeightDifference]) -> str:
    worst = min(differences, key=lambda difference: difference.snr_db)
    stored = " -> ".join(dict.fromkeys((worst.stored_a, worst.stored_b)))
    usual = decibels(median(difference.snr_db for difference in differences))
    where = f" ({worst.layer})" if len(differences) > 1 else ""
    noise = f"{usual} dB, {decibels(worst.snr_db)} at worst{where}" if where else f"{usual} dB"
    return f"{plural(len(differences), 'layer')}, {stored}, {noise}"


def _difference(difference: Difference) -> str:
    return f"{_text(difference.where)}: {_text(difference.a)} -> {_text(difference.b)}"


def _text(text: str) -> str:
    """Text from a checkpoint: no escape sequences, a bounded length."""
    return visible(clip(text, MAX_TEXT))
