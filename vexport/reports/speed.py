"""How fast checkpoints were: a table over how many requests ran at once, next to the baseline's."""

from collections.abc import Iterator, Sequence

from vexport.reports import document as doc
from vexport.reports.document import columns, facts, muted, row
from vexport.reports.formatting import NOT_AVAILABLE, count, duration, percent, plural, size
from vexport.reports.sentences import engine_line
from vexport.types import SpeedPoint, SpeedReport

LEGEND = (
    "tokens/s: output tokens of all requests together, the time of their prompts included; ±: median "
    "absolute deviation of the timed runs. First token, between tokens: medians over requests."
)
_HEADER = (
    *columns("checkpoint", ">at once"),
    doc.Column("tokens/s", numeric=True, noted=True),
    *columns(">of baseline", ">first token", ">between tokens"),
)


def speed_document(reports: Sequence[SpeedReport]) -> doc.Document:
    """One table over all of them, what ran each, and why vLLM refuses one."""
    title = "speed" if len(reports) > 1 else f"speed of {reports[0].checkpoint}"
    findings = tuple((report.checkpoint, finding) for report in reports for finding in report.findings)
    found = doc.FindingList(findings, "--format json") if findings else None
    return doc.Document(title=title, parts=doc.parts(found, speed_parts(reports)), wide=True)


def speed_parts(reports: Sequence[SpeedReport]) -> tuple[doc.Part, ...]:
    """The table, where anything was measured, and a line for what was not."""
    baseline = next((report for report in reports if report.role == "baseline"), None)
    rows = [cells for report in reports for cells in _rows(report, baseline)]
    return doc.parts(
        doc.Table(_HEADER, tuple(rows)) if rows else None,
        muted(LEGEND) if rows else None,
        facts(
            *(("requests", work) for work in _workloads(reports)),
            *(line for report in reports for line in _facts(report)),
        ),
    )


def speed_lines(reports: Sequence[SpeedReport]) -> Iterator[tuple[str, str]]:
    """For each number of requests at once what the checkpoint of a run does, or why that is not known."""
    baseline = next((report for report in reports if report.role == "baseline"), None)
    for report in reports:
        if report.role == "baseline":
            continue
        if report.unmeasured:
            yield "speed", f"not measured: {report.unmeasured}"
        for point in report.points:
            same = _same(point, baseline) if baseline else None
            share = f", {_share(point, same)} of the baseline's" if same else ""
            yield (
                "speed",
                f"{count(point.concurrency)} at once: {rate(point.tokens_per_second)} tokens/s{share}",
            )


def _share(point: SpeedPoint, same: SpeedPoint) -> str:
    return percent(point.tokens_per_second / same.tokens_per_second, 0)


def _rows(report: SpeedReport, baseline: SpeedReport | None) -> Iterator[tuple[doc.Cell, ...]]:
    for point in report.points:
        same = _same(point, baseline) if baseline else None
        yield row(
            report.checkpoint,
            count(point.concurrency),
            doc.Cell(rate(point.tokens_per_second), _spread(point)),
            _share(point, same) if same else NOT_AVAILABLE,
            milliseconds(point.ttft),
            milliseconds(point.itl),
        )


def _same(point: SpeedPoint, baseline: SpeedReport) -> SpeedPoint | None:
    """The baseline's point for the same work."""
    work = (point.concurrency, point.input_len, point.output_len)
    points = (one for one in baseline.points if (one.concurrency, one.input_len, one.output_len) == work)
    return next(points, None)


def _facts(report: SpeedReport) -> Iterator[tuple[str, str]]:
    name = report.checkpoint
    if report.unmeasured:
        yield name, f"not measured: {report.unmeasured}"
    if report.engine and report.start_seconds is not None and report.points:
        holds = f"; weights {size(report.weight_bytes)}" if report.weight_bytes else ""
        holds += f", KV cache of {count(report.kv_tokens)} tokens" if report.kv_tokens else ""
        yield name, f"vLLM {engine_line(report.engine)}, start {duration(report.start_seconds)}{holds}"
    elif report.points:
        yield name, f"measured elsewhere, by {report.tool}"
    if failed := sum(point.failed for point in report.points):
        yield "note", f"{name}: {plural(failed, 'request')} failed and stand for no tokens"
    waiting = [point for point in report.points if _waits(point, report.kv_tokens)]
    if waiting:
        few = ", ".join(count(point.concurrency) for point in waiting)
        yield "note", f"{name}: {few} requests do not fit in the KV cache at once, so that some wait"


def _workloads(reports: Sequence[SpeedReport]) -> list[str]:
    """The lengths of all requests, each once."""
    points = (point for report in reports for point in report.points)
    lengths = dict.fromkeys((round(point.input_len), round(point.output_len)) for point in points)
    return [f"{count(before)} input tokens, {count(after)} output tokens" for before, after in lengths]


def _waits(point: SpeedPoint, kv_tokens: int | None) -> bool:
    return kv_tokens is not None and point.concurrency * (point.input_len + point.output_len) > kv_tokens


def _spread(point: SpeedPoint) -> str:
    return "" if point.mad is None else f"±{percent(point.mad / point.tokens_per_second)}"


def points_of(reports: Sequence[SpeedReport]) -> tuple[SpeedPoint, ...]:
    """The checkpoint's points, without the baseline's."""
    return tuple(point for report in reports if report.role == "checkpoint" for point in report.points)


def most_at_once(reports: Sequence[SpeedReport]) -> SpeedPoint | None:
    """The checkpoint's point with the most requests at once; None where it was not measured."""
    return max(points_of(reports), key=lambda point: point.concurrency, default=None)


def spread(point: SpeedPoint) -> tuple[float, float]:
    """The slowest and the fastest timed run; of another tool's result the point alone."""
    runs = point.runs or (point.tokens_per_second,)
    return min(runs), max(runs)


def rate(tokens_per_second: float) -> str:
    """Tokens a second with three significant digits: `8.31`, `1,240`."""
    digits = 0 if tokens_per_second >= 99.95 else 1 if tokens_per_second >= 9.995 else 2
    return f"{tokens_per_second:,.{digits}f}"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds."""
    return NOT_AVAILABLE if seconds is None else f"{rate(1000 * seconds)} ms"
