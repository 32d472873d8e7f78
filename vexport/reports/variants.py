"""Build the table of a checkpoint's variants: settings and versions of vLLM with their verdicts."""

from collections.abc import Iterator, Mapping, Sequence

from vexport.records import ComparedVariant, TextLimit, VariantOutcome, Verdict
from vexport.records.scale import NOT_AVAILABLE
from vexport.reports import document as doc
from vexport.reports.accuracy import accuracy_section
from vexport.reports.document import TableCell, judged_cell, muted, parts, table, warnings
from vexport.reports.formatting import count, small
from vexport.words import plural

_LEGEND = (
    "The first variant is the baseline. All variants run on the same documents. Worst task: the "
    "task with the lowest bound, or the worst measure of held-out text. Difference: the task's "
    "change in points or in units of the metric, or the measure's value, with the bounds that "
    "decide. KL: divergence from the baseline in nats per token."
)
_TONES: Mapping[VariantOutcome, str] = {
    "BASELINE": "info",
    "PASS": "pass",
    "FAIL": "fail",
    "INCONCLUSIVE": "inconclusive",
    "REFUSED": "fail",
    "NO ANSWER": "inconclusive",
}
# Outcomes of the measures of held-out text, worst first. The table shows the worst outcome.
_OUTCOMES_BY_SEVERITY = ("FAIL", "INCONCLUSIVE", "PASS")


def variants_section(rows: Sequence[ComparedVariant]) -> doc.Section | None:
    """Return the table of variants and the reasons, or None without variants."""
    if not rows:
        return None
    columns = (
        "Setting",
        doc.Column("vLLM", nowrap=True),
        doc.Column("Verdict", nowrap=True),
        "Worst task",
        doc.Column("Difference", numeric=True, noted=True),
        ">KL",
    )
    reasons = [
        (row.name, TableCell(row.reason, row.folder))
        for row in rows
        if row.outcome not in ("PASS", "BASELINE")
    ]
    content = parts(
        table(columns, map(_cells, rows)),
        muted(_LEGEND),
        table(("Variant", "Reason"), reasons) if reasons else None,
    )
    lead = f"The same checkpoint, served in {plural(len(rows), 'variant')}."
    return doc.Section("Settings and versions of vLLM", content, "variants", lead)


def _cells(row: ComparedVariant) -> Iterator[TableCell | str]:
    yield TableCell(row.setting, row.vllm_python)
    yield row.vllm or NOT_AVAILABLE
    yield TableCell(row.outcome, tone=_TONES[row.outcome], badge=True)
    if row.worst is not None:
        yield row.worst.task
        yield judged_cell(row.worst)
    elif (limit := _text_limit(row.verdict)) is not None:
        yield limit.name
        yield judged_cell(limit)
    else:
        yield from (NOT_AVAILABLE, NOT_AVAILABLE)
    yield NOT_AVAILABLE if row.mean_kl is None else small(row.mean_kl)


def _text_limit(verdict: Verdict | None) -> TextLimit | None:
    """Return the measure of held-out text with the gravest outcome, or None without text."""
    limits = verdict.text.limits if verdict is not None and verdict.text is not None else ()
    return min(limits, key=lambda limit: _OUTCOMES_BY_SEVERITY.index(limit.outcome), default=None)


def variant_sections(rows: Sequence[ComparedVariant]) -> Iterator[doc.Section]:
    """Yield a page's section with all tasks, or all measures of the text, of each variant."""
    for number, row in enumerate(rows):
        if row.verdict is None:
            continue
        accuracy = accuracy_section(row.verdict)
        content = parts(muted(accuracy.lead), accuracy.parts, warnings(row.verdict.warnings))
        lead = f"{row.outcome}: {row.reason}. Responses: {row.folder}"
        yield doc.Section(row.name, content, f"variant-{number}", lead, doc.PAGE)


def variant_tiles(rows: Sequence[ComparedVariant]) -> Iterator[doc.Tile]:
    """Yield tiles with the number of variants that pass, and of variants that vLLM refuses."""
    others = [row for row in rows if row.outcome != "BASELINE"]
    passed = [row for row in others if row.outcome == "PASS"]
    refused = [row for row in others if row.outcome == "REFUSED"]
    note = f"compared with {rows[0].name}"
    yield doc.Tile("Variants that pass", count(len(passed)), f"of {count(len(others))}", note)
    yield doc.Tile("Refused by vLLM", count(len(refused)), "", "see the reasons below")
