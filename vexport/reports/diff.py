"""What differs between two checkpoints, for people: alike tensors and layers together on one line."""

import re
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

from vexport.errors.escaping import clip
from vexport.errors.extras import fix
from vexport.fidelity.diff import Difference, DiffReport, TensorDifference, WeightDifference
from vexport.files import to_json
from vexport.reports import document as doc
from vexport.reports import text
from vexport.reports.document import facts, listing, parts
from vexport.reports.formatting import decibels, percent, plural, ratio, size

T = TypeVar("T")
# Lines of one section; JSON has all.
SHOWN = 12
MAX_TEXT = 200
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def render_diff(report: DiffReport, format_: str) -> str:
    """The report as text or JSON, with a final newline."""
    return to_json(report) if format_ == "json" else text.render([_document(report)])


def _document(report: DiffReport) -> doc.Document:
    share = ratio(report.sizes[1], report.sizes[0])
    both = facts(
        ("A", f"{report.a}  {size(report.sizes[0])}"),
        ("B", f"{report.b}  {size(report.sizes[1])} ({share} of A)"),
        ("smoothed by", report.smoothing) if report.smoothing else None,
    )
    needs = f"weights once dequantized: not compared, which needs torch; {fix('torch')}"
    content = parts(
        _section("config", [_difference(difference) for difference in report.config]),
        _section("files", [_difference(difference) for difference in report.files]),
        _section("only in A", _kinds(report.only_a, str, _plain)),
        _section("only in B", _kinds(report.only_b, str, _plain)),
        _section("dtype or shape", _kinds(report.forms, lambda change: change.where, _form)),
        _section("values", _kinds(report.values, lambda change: change.name, _values)),
        None if report.dequantized else doc.Paragraph(needs),
        _section("weights once dequantized", _kinds(report.weights, lambda change: change.layer, _weights)),
    )
    same = (doc.Paragraph("the same"),)
    return doc.Document(title=report.a, parts=(both, *(same if report.same else content)), wide=True)


def _section(title: str, lines: Sequence[str]) -> doc.Section | None:
    return doc.Section(f"{title} ({len(lines)})", (listing(lines, SHOWN),)) if lines else None


def _kinds(
    entries: Sequence[T], name: Callable[[T], str], describe: Callable[[Sequence[T]], str]
) -> list[str]:
    """One line for all entries whose names differ in numbers alone: `model.layers.*.mlp.gate.weight`."""
    kinds: dict[str, list[T]] = {}
    for entry in entries:
        kinds.setdefault(NUMBER.sub("*", name(entry)), []).append(entry)
    return [f"{kind}: {describe(alike)}" for kind, alike in kinds.items()]


def _plain(names: Sequence[str]) -> str:
    return plural(len(names), "tensor")


def _form(differences: Sequence[Difference]) -> str:
    changes = list(dict.fromkeys(f"{difference.a} -> {difference.b}" for difference in differences))
    more = f" and {len(changes) - 1} other ways" if len(changes) > 1 else ""
    return f"{plural(len(differences), 'tensor')}, {changes[0]}{more}"


def _values(differences: Sequence[TensorDifference]) -> str:
    most = percent(max(difference.changed for difference in differences))
    noises = [difference.snr_db for difference in differences if difference.snr_db is not None]
    noise = f", {decibels(min(noises))} dB at worst" if noises else ""
    return f"{plural(len(differences), 'tensor')}, up to {most} of the elements{noise}"


def _weights(differences: Sequence[WeightDifference]) -> str:
    worst = min(differences, key=lambda difference: difference.snr_db)
    stored = " -> ".join(dict.fromkeys((worst.stored_a, worst.stored_b)))
    usual = decibels(median(difference.snr_db for difference in differences))
    where = f" ({worst.layer})" if len(differences) > 1 else ""
    noise = f"{usual} dB, {decibels(worst.snr_db)} at worst{where}" if where else f"{usual} dB"
    return f"{plural(len(differences), 'layer')}, {stored}, {noise}"


def _difference(difference: Difference) -> str:
    return f"{difference.where}: {clip(difference.a, MAX_TEXT)} -> {clip(difference.b, MAX_TEXT)}"
