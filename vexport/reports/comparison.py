"""Several schemes of one model: one table, what to take, and the loss against size and against speed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from vexport.reports import document as doc
from vexport.reports.charts.plane import Cost, Plane, pareto_chart
from vexport.reports.document import PAGE, Cell, Column, facts, muted, row
from vexport.reports.formatting import NOT_AVAILABLE, count, percent, percent_interval, plural, size, small
from vexport.reports.gates import Status
from vexport.reports.speed import rate
from vexport.types import ComparedScheme, SchemeComparison

_LEGEND = (
    "KL: nats per token between the baseline's log-probabilities and the scheme's. Recovery: score over the "
    "baseline's, of the task that lost most, with its interval."
)
_MEASURED = "Measured: output tokens/s of all requests together, on {device}, as by `vexport bench`."
_BOUND = (
    "Bound: tokens/s on {tp} x {gpu} with {context} tokens of context, 50 to 90 % of what its data sheet "
    "allows: not a measurement. Weights and KV tokens: of one GPU."
)
_GREY = "Grey: another scheme is no worse in size, KL and speed ({kind}), and better in one."


def comparison_document(found: SchemeComparison) -> doc.Document:
    """The answer first, then the table that it rests on."""
    answer = f"take {found.recommended}" if found.recommended else "no recommendation"
    return doc.Document(
        title=f"{found.name}: {answer}",
        status=_status(found),
        device=found.device,
        sentence=". ".join(found.reasons),
        subtitle=f"{plural(len(found.schemes), 'scheme')} of {found.source}, {_made(found)} UTC",
        next_step=_next_step(found),
        parts=doc.parts(
            doc.Section("Schemes", doc.parts(_table(found), map(muted, _notes(found))), anchor="schemes"),
            doc.Section("Loss, size and speed", doc.parts(_charts(found)), anchor="pareto", forms=PAGE),
            _speeds(found),
            doc.Section("Why", (facts(*_whys(found)),), anchor="why") if _whys(found) else None,
        ),
        footer=f"vexport {found.vexport}, {found.created}, source {found.source}",
        wide=True,
    )


def _status(found: SchemeComparison) -> Status:
    """As the exit code of the command."""
    if found.recommended:
        return "PASS"
    return "FAIL" if all(one.outcome == "FAIL" for one in found.schemes) else "INCONCLUSIVE"


def _next_step(found: SchemeComparison) -> tuple[str, str]:
    """A command to be called in the folder of the comparison, or nothing in its place, and a sentence."""
    if found.recommended:
        return f"vllm serve schemes/{found.recommended}/checkpoint", "Serve it, called in this folder."
    return "", "Choose by the table, evaluate more documents, or try other schemes."


def _made(found: SchemeComparison) -> str:
    return found.created[:16].replace("T", " ")


def _notes(found: SchemeComparison) -> Iterator[str]:
    yield _LEGEND
    if _measured_at(found):
        yield _MEASURED.format(device=found.device)
    if found.gpu:
        yield _BOUND.format(tp=found.tp, gpu=found.gpu, context=count(found.context))
    if any(one.dominated_by for one in found.schemes):
        kind = {"measured": "measured", "bound": "by the bound", "none": "not known"}[found.speed_kind]
        yield _GREY.format(kind=kind)


def _table(found: SchemeComparison) -> doc.Table:
    """What decides, with the speeds that are compared."""
    at = sorted({number for one in _rows(found) for number, _ in one.rates})
    shown = _bound if found.speed_kind == "bound" else _measured
    columns = (
        Column("scheme", nowrap=True),
        Column("result", nowrap=True),
        *doc.columns(">bits"),
        Column("size", numeric=True, nowrap=True),
        *(doc.columns(">KV tokens") if found.gpu else ()),
        *doc.columns(">KL"),
        Column("recovery", numeric=True, noted=True),
        *(Column(f"{found.speed_kind}, {count(one)} at once", numeric=True, nowrap=True) for one in at),
    )
    rows = (_cells(one, found, [shown(one, number) for number in at]) for one in _rows(found))
    return doc.Table(columns, tuple(rows))


def _rows(found: SchemeComparison) -> tuple[ComparedScheme, ...]:
    return (found.baseline, *found.schemes)


def _cells(one: ComparedScheme, found: SchemeComparison, speeds: Sequence[str]) -> tuple[Cell, ...]:
    made = one.num_bytes > 0
    recovery = Cell(percent(one.recovery), percent_interval(one.recovery_low, one.recovery_high))
    cells = row(
        Cell(one.scheme, href=f"{one.folder}/report.html" if one.folder else ""),
        doc.badge(one.outcome) if one.outcome else "" if made else "not made",
        f"{one.bits_per_weight:.2f}" if made else NOT_AVAILABLE,
        size(one.num_bytes) if made else NOT_AVAILABLE,
        *([_kv_tokens(one)] if found.gpu else ()),
        NOT_AVAILABLE if one.mean_kl is None else small(one.mean_kl),
        recovery if one.recovery is not None else NOT_AVAILABLE,
        *speeds,
    )
    return tuple(replace(cell, grey=bool(one.dominated_by) or not made) for cell in cells)


def _kv_tokens(one: ComparedScheme) -> str:
    if one.on_gpu is None or not one.on_gpu.weight_bytes:
        return NOT_AVAILABLE
    return count(one.on_gpu.kv_tokens) if one.on_gpu.sequences != 0 else "does not fit"


def _speeds(found: SchemeComparison) -> doc.Section | None:
    """What was measured next to the bound, which are of two devices and never compared."""
    at, batches = _measured_at(found), _bound_at(found)
    if not at or not batches:
        return None
    header = (
        Column("scheme", nowrap=True),
        *doc.columns(f">weights on {found.gpu}"),
        *doc.columns(*(f">measured, {count(one)} at once" for one in at)),
        *doc.columns(*(f">bound, {count(one)} at once" for one in batches)),
    )
    rows = tuple(
        row(
            one.scheme,
            size(one.on_gpu.weight_bytes) if one.on_gpu else NOT_AVAILABLE,
            *(_measured(one, number) for number in at),
            *(_bound(one, number) for number in batches),
        )
        for one in _rows(found)
    )
    return doc.Section("Measured, and bound", (doc.Table(header, rows),), anchor="speeds")


def _measured(one: ComparedScheme, concurrency: int) -> str:
    point = next((point for point in one.points if point.concurrency == concurrency), None)
    if point is not None:
        return rate(point.tokens_per_second)
    return "emulated" if one.unmeasured else NOT_AVAILABLE


def _bound(one: ComparedScheme, batch: int) -> str:
    speed = one.on_gpu.speed if one.on_gpu else None
    found = next((each for each in speed.decode if each.batch == batch), None) if speed else None
    if found is None or found.low is None or found.high is None:
        return NOT_AVAILABLE
    return _short_interval(found.low, found.high)


def _short_interval(low: float, high: float) -> str:
    """Three digits, which is more than a bound has: `370-666`, `17.3k-31.1k`."""
    factor, unit = (1000, "k") if high >= 10_000 else (1, "")
    return f"{rate(low / factor)}{unit}-{rate(high / factor)}{unit}"


def _measured_at(found: SchemeComparison) -> list[int]:
    return sorted({point.concurrency for one in _rows(found) for point in one.points})


def _bound_at(found: SchemeComparison) -> list[int]:
    speeds = [one.on_gpu.speed for one in _rows(found) if one.on_gpu and one.on_gpu.speed]
    return sorted({each.batch for speed in speeds for each in speed.decode})


def _charts(found: SchemeComparison) -> Iterator[Plane]:
    yield from _chart(found, "KL against size", "size of the checkpoint", _size, lambda at: size(round(at)))
    concurrencies = sorted({at for one in found.schemes for at, _ in one.rates})
    kind = "measured" if found.speed_kind == "measured" else f"bound on {found.gpu}"
    for at in dict.fromkeys((*concurrencies[:1], *concurrencies[-1:])):
        title = f"KL against tokens/s, {count(at)} at once"
        yield from _chart(found, title, f"tokens/s, {kind}", _rate_at(at), rate)


def _chart(
    found: SchemeComparison,
    title: str,
    unit: str,
    cost: Callable[[ComparedScheme], float | None],
    shown: Callable[[float], str],
) -> Iterator[Plane]:
    costs = [
        Cost(name=one.scheme, at=at, kl=one.mean_kl, outcome=one.outcome, grey=bool(one.dominated_by))
        for one in found.schemes
        if one.mean_kl is not None and (at := cost(one)) is not None
    ]
    chart = pareto_chart(title, unit, costs, shown)
    if chart is not None:
        yield chart


def _size(one: ComparedScheme) -> float:
    return float(one.num_bytes)


def _rate_at(concurrency: int) -> Callable[[ComparedScheme], float | None]:
    return lambda one: dict(one.rates).get(concurrency)


def _whys(found: SchemeComparison) -> list[tuple[str, str]]:
    """For each scheme that did not pass, or is dominated, why."""
    whys = []
    for one in found.schemes:
        if one.outcome != "PASS":
            whys.append((one.scheme, one.reason))
        if one.dominated_by:
            whys.append((one.scheme, f"{one.dominated_by} is no worse in size, KL and speed"))
        if one.unmeasured:
            whys.append((one.scheme, f"speed not measured: {one.unmeasured}"))
    return whys
