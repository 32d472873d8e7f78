"""Which scheme for which GPU, for people: one table, one recommendation with its reasons."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from vexport.files import to_json
from vexport.reports import document as doc
from vexport.reports import text
from vexport.reports.document import columns, facts, row
from vexport.reports.formatting import NOT_AVAILABLE, count, duration, size
from vexport.types import Candidate, Recommendation

NONE = "-"
LEGEND = (
    "batch, prefill: tokens/s of the whole batch, 50 to 90 % of what bandwidth and tensor cores of the data "
    "sheet allow: a bound, not a measurement.",
    "KV tokens: what fits next to the weights; vLLM takes 1 to 3 GB of it at its start. text: whether "
    "calibration text is needed, and what refit takes with it, on two CPU cores.",
)


def render_recommendation(found: Recommendation, format_: str) -> str:
    """The answer as text or JSON (recommend.schema.json), with a final newline."""
    if format_ == "json":
        return to_json(found)
    return text.render([_document(found)])


def _document(found: Recommendation) -> doc.Document:
    gpus = f"{found.tp} x {found.gpu}"
    title = (
        f"{found.source}: {found.architecture}, {count(found.parameters)} parameters, on {gpus}, "
        f"{found.gpu_architecture}, vLLM {found.vllm}"
    )
    memory = (
        f"{size(found.usable_bytes)} for vLLM on each GPU; KV cache of {count(found.context)} tokens: "
        f"{NOT_AVAILABLE if found.kv_bytes is None else size(found.kv_bytes)}"
    )
    shown = [one for one in found.schemes if one.runs != "no"]
    batches = found.source_row.speed or next((one.speed for one in shown if one.speed), None)
    names = [f">batch {one.batch}" for one in batches.decode] if batches else []
    table = doc.Table(
        columns("scheme", "runs", ">weights", ">KV tokens", *names, ">prefill", "text"),
        tuple(_cells(one, len(names)) for one in (found.source_row, *shown)),
    )
    return doc.Document(
        title=found.source,
        parts=doc.parts(
            doc.Paragraph(title),
            doc.Paragraph(memory),
            table,
            (doc.muted(line) for line in LEGEND),
            facts(
                ("recommended", _recommended(found)),
                *((("because" if number == 0 else ""), why) for number, why in enumerate(found.reasons)),
                ("kernels", _kernels(found)) if found.recommended else None,
                ("crossover", _crossover(found)) if found.crossover else None,
                *(("note", note) for note in found.notes),
                *_not_in_full(found.schemes),
                *_next(found),
            ),
        ),
        wide=True,
    )


def _cells(one: Candidate, batches: int) -> tuple[doc.Cell, ...]:
    speed = one.speed
    decode = [_interval(each.low, each.high) for each in speed.decode] if speed else [NONE] * batches
    tokens = NOT_AVAILABLE if one.kv_tokens is None else count(one.kv_tokens)
    return row(
        one.scheme,
        one.runs,
        size(one.weight_bytes),
        tokens if one.sequences != 0 else "does not fit",
        *decode,
        _interval(speed.prefill_low, speed.prefill_high) if speed else NONE,
        _text(one),
    )


def _text(one: Candidate) -> str:
    """What calibration costs: needed for static scales, and what rounding by text takes."""
    if not one.explain:
        return NONE
    need = f"needed, {duration(one.seconds)}" if one.needs_calibration else "no"
    return need if one.refit_seconds is None else f"{need}; refit {duration(one.refit_seconds)}"


def _interval(low: float | None, high: float | None) -> str:
    return NONE if low is None or high is None else f"{low:,.0f}-{high:,.0f}"


def _recommended(found: Recommendation) -> str:
    if not found.recommended:
        return "none"
    link = f"(vexport explain {found.recommended})"
    if not found.alternative:
        return f"{found.recommended} {link}"
    return f"start with {found.recommended} {link}; compare {found.alternative} in accuracy"


def _kernels(found: Recommendation) -> str:
    """What runs the recommended scheme."""
    chosen = next(one for one in found.schemes if one.scheme == found.recommended)
    return "; ".join(chosen.kernels) or NOT_AVAILABLE


def _crossover(found: Recommendation) -> str:
    return f"by the bound W4A16 is no longer ahead of FP8_DYNAMIC from batch {count(found.crossover)} on"


def _not_in_full(schemes: Sequence[Candidate]) -> list[tuple[str, str]]:
    """One line for schemes that are not run, or not in full, for the same reason."""
    alike: dict[tuple[str, str], list[Candidate]] = {}
    for one in schemes:
        if one.reason:
            alike.setdefault((one.runs, one.reason), []).append(one)
    return [
        (
            "not at all" if runs == "no" else runs,
            f"{', '.join(one.scheme for one in same)}: {reason} ({same[0].explain})",
        )
        for (runs, reason), same in sorted(alike.items())
    ]


def _next(found: Recommendation) -> list[tuple[str, str]]:
    """The commands that make the recommended checkpoint and measure what it lost."""
    if not found.recommended:
        return []
    out = f"{Path(found.source).resolve().name.partition('@')[0]}-{found.recommended}"
    tp = ["--tp", str(found.tp)] if found.tp > 1 else []
    make = ["vexport", "quantize", found.source, out, "--scheme", found.recommended, *tp]
    measure = ["vexport", "eval", out, "--baseline", found.source, "--task", "TASK"]
    return [("next", shlex.join(make)), ("", shlex.join(measure))]
