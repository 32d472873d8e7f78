"""What a report has of held-out text that decides in the place of tasks: gates, a section, tiles."""

from vexport.reports import document as doc
from vexport.reports.document import badge, columns, parts, row
from vexport.reports.formatting import count, percent, percent_interval, plural, small
from vexport.reports.sentences import nats, nats_interval
from vexport.types import TextLimit, TextVerdict, Verdict

_COLUMNS = columns("Measure", "Result", ">Nats per token", ">Limit")


def text_section(verdict: Verdict, text: TextVerdict) -> doc.Section:
    """The measures against their limits, and what else the log-probabilities tell."""
    return doc.Section(
        "Accuracy",
        parts(text_table(verdict, text), [doc.Paragraph(warning, "warning") for warning in verdict.warnings]),
        anchor="accuracy",
        lead="Both models read the same held-out text in vLLM; its log-probabilities decide, not tasks.",
    )


def text_table(verdict: Verdict, text: TextVerdict) -> doc.Table:
    """A row for each measure, what was read below it."""
    return doc.Table(_COLUMNS, tuple(map(_row, text.limits)), caption=_caption(verdict, text))


def _row(limit: TextLimit) -> tuple[doc.Cell, ...]:
    needed = f"about {count(limit.rows_needed)} rows would settle it" if limit.rows_needed else ""
    value = doc.Cell(nats(limit, limit.value), nats_interval(limit))
    return row(doc.Cell(limit.measure, needed), badge(limit.outcome), value, small(limit.limit))


def _caption(verdict: Verdict, text: TextVerdict) -> str:
    return (
        f"{text.data} ({text.digest}): {plural(text.rows, 'row')}, {count(text.tokens)} tokens, the KL of "
        f"{count(text.positions)} of them over the whole vocabulary; NLL {small(text.baseline_nll)} and "
        f"{small(text.candidate_nll)}; the likeliest token is the same at {percent(text.top1_agreement)} "
        f"({percent_interval(text.top1_low, text.top1_high)}); alpha {verdict.alpha:g}; {verdict.method}"
    )


def text_tiles(text: TextVerdict) -> tuple[doc.Tile, doc.Tile]:
    """The KL, and the positions where the likeliest token is another."""
    kl, rise = text.limits
    note = f"a token, limit {kl.limit:g}; NLL {nats(rise, rise.value)}, limit {rise.limit:g}"
    other = percent(1 - text.top1_agreement)
    return (
        doc.Tile("KL on held-out text", small(kl.value), "nats", note),
        doc.Tile("Other likeliest token", other, "", f"of {count(text.tokens)} tokens"),
    )
