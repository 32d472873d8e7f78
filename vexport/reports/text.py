"""Plain text for people: what was decided, why, and what to do; colour only where the console has it."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vexport.reports.coverage import coverage_lines
from vexport.reports.escaping import clip, visible
from vexport.reports.folding import Folded, fold
from vexport.reports.formatting import (
    count,
    duration,
    percent,
    plural,
)
from vexport.reports.gates import (
    Gate,
    Status,
    checkpoint_gate,
    finding_counts,
    judged_for,
    report_gates,
    staged_findings,
    verdict_gates,
)
from vexport.reports.mixing import attempt_line, mixed_line
from vexport.reports.reading import levels_line, p_values_line
from vexport.reports.sentences import (
    agreement_line,
    engine_line,
    method_line,
    opening,
    outcome_line,
    report_device,
    report_sentence,
    scale_of,
    scale_of_comparison,
    schemes_in_use,
    served_with,
    shown_comparisons,
    signal_lines,
    size_change,
    task_title,
)
from vexport.types import CheckReport, Comparison, Finding, LoadReport, Report, Severity, Verdict

WIDTH = 100
MAX_FINDINGS = 20
_MAX_TEXT = 1000
_STATUS_STYLE: dict[Status, str] = {
    "PASS": "bold green",
    "FAIL": "bold red",
    "INCONCLUSIVE": "bold yellow",
    "SKIPPED": "dim",
}
_SEVERITY_STYLE: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "info": "dim"}


def summary(report: Report) -> RenderableType:
    """The whole run on one screen, for a rich console: the answer, the gates, accuracy, size, findings."""
    parts = [
        _headline(report.outcome, report.name, report_sentence(report), report_device(report)),
        _gates(report_gates(report)[:-1]),
        _facts(report),
        *(_accuracy(report.verdict) if report.verdict else []),
        *_findings([finding for _, finding in staged_findings(report)]),
    ]
    return _spaced(parts)


def checks_summary(reports: Sequence[CheckReport], *, every: bool = False) -> RenderableType:
    """One block per checkpoint: its answer and its findings, those of a kind as one unless `every`."""
    return _spaced([part for report in reports for part in _checkpoint("check", report, every=every)])


def loads_summary(reports: Sequence[LoadReport]) -> RenderableType:
    """One block per load: its answer, the findings, the engine and what it cannot show, a dead one's log."""
    return _spaced([part for report in reports for part in (*_checkpoint("load", report), *_engine(report))])


def verdict_summary(verdict: Verdict) -> RenderableType:
    """The answer and the tasks it rests on."""
    gates = verdict_gates(verdict)[:-1]
    head = _headline(verdict.outcome, "accuracy", verdict.reason, verdict.device)
    return _spaced([head, _gates(gates), *_accuracy(verdict)])


def report(report: Report) -> str:
    """`summary` without colour, 100 columns wide."""
    return plain(summary(report))


def checks(reports: Sequence[CheckReport], *, every: bool = False) -> str:
    """`checks_summary` without colour."""
    return plain(checks_summary(reports, every=every))


def loads(reports: Sequence[LoadReport]) -> str:
    """`loads_summary` without colour."""
    return plain(loads_summary(reports))


def verdict(verdict: Verdict) -> str:
    """`verdict_summary` without colour."""
    return plain(verdict_summary(verdict))


def plain(content: RenderableType) -> str:
    """Without colour, WIDTH columns wide."""
    console = Console(
        file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False
    )
    with console.capture() as capture:
        console.print(content)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip() + "\n"


def _spaced(parts: Iterable[RenderableType]) -> RenderableType:
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def harmless(text: str, style: str = "") -> Text:
    """Text from outside: no console markup, no escape sequence, a bounded length."""
    return Text(visible(clip(text, _MAX_TEXT)), style=style, overflow="fold")


def _headline(status: Status, name: str, reason: str, device: str = "") -> RenderableType:
    """The answer with what ran the model, then why."""
    outcome = harmless(outcome_line(status, device), _STATUS_STYLE[status])
    return Text.assemble(outcome, "  ", harmless(name, "bold"), "\n", harmless(opening(reason)))


def _gates(gates: Iterable[Gate]) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for gate in gates:
        table.add_row(
            harmless(gate.name), Text(gate.status, _STATUS_STYLE[gate.status]), harmless(gate.summary)
        )
    return table


def _facts(report: Report) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("size", harmless(size_change(report.plan)))
    table.add_row("schemes", harmless(schemes_in_use(report.plan)))
    if report.mixed:
        table.add_row("auto", harmless(mixed_line(report.mixed)))
    for attempt in report.attempts:
        table.add_row(f"round {attempt.number}", harmless(attempt_line(attempt)))
    for line in coverage_lines(report.experts):
        table.add_row("experts", harmless(line))
    for row in _engine_rows(report.load):
        table.add_row(*row)
    for label, line in signal_lines(report):
        table.add_row(label, harmless(line))
    table.add_row("time", harmless(duration(sum(report.seconds.values()))))
    return table


def _engine(report: LoadReport) -> list[RenderableType]:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in _engine_rows(report):
        table.add_row(*row)
    return [table] if table.row_count else []


def _engine_rows(load: LoadReport) -> list[tuple[str, Text]]:
    rows: list[tuple[str, Text]] = []
    if load.engine:
        rows.append(("vLLM", harmless(engine_line(load.engine))))
        if load.engine.settings:
            rows.append(("served with", harmless(served_with(load.engine))))
        rows += [("not shown", harmless(spot)) for spot in load.engine.blind_spots]
    if load.logprobs:
        rows.append(("log-probs", harmless(agreement_line(load.logprobs))))
    if load.log_tail:
        rows.append(("log", harmless(load.log_tail)))
    return rows


def _accuracy(verdict: Verdict) -> list[RenderableType]:
    """The tasks, what is shown beside their gates, and what weakens the answer."""
    beside = shown_comparisons(verdict)
    warnings = [harmless(f"warning  {warning}", "yellow") for warning in verdict.warnings]
    return [_tasks(verdict), *([_comparisons(beside)] if beside else []), _reading(verdict), *warnings]


def _reading(verdict: Verdict) -> RenderableType:
    """The levels of the intervals, and the p values."""
    lines = [levels_line(verdict)]
    if p_values := p_values_line(verdict):
        lines.append(f"p values, which decide nothing: {p_values}")
    return Group(*(harmless(line, "dim") for line in lines))


def _comparisons(comparisons: Sequence[Comparison]) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for one in comparisons:
        scale = scale_of_comparison(one)
        table.add_row(
            harmless(task_title(one)),
            f"{count(one.documents)} documents",
            f"{scale.value(one.baseline)} -> {scale.value(one.candidate)}",
            f"{scale.change(one.difference)} ({scale.changes(one.low, one.high)})",
        )
    return Group(Text("for information, decides nothing", "dim"), table)


def _tasks(verdict: Verdict) -> RenderableType:
    table = Table(
        box=box.SIMPLE_HEAD, caption=harmless(method_line(verdict)), caption_justify="left", pad_edge=False
    )
    table.add_column("task", overflow="fold")
    for name in ("n", "baseline", "quantized", "difference", "recovery", "lost", "gained"):
        table.add_column(name, justify="right")
    for task in verdict.tasks:
        scale = scale_of(task)
        table.add_row(
            harmless(task_title(task)),
            count(task.documents),
            scale.value(task.baseline.value),
            scale.value(task.candidate.value),
            scale.change(task.difference),
            percent(task.recovery),
            count(task.right_to_wrong),
            count(task.wrong_to_right),
        )
    return table


def _checkpoint(name: str, report: CheckReport | LoadReport, *, every: bool = False) -> list[RenderableType]:
    gate = checkpoint_gate(name, report)
    device = report.engine.device if isinstance(report, LoadReport) and report.engine else ""
    return [
        _headline(
            gate.status, report.checkpoint, finding_counts(report.findings) + judged_for(report), device
        ),
        *_findings(gate.findings, every=every),
    ]


def _findings(findings: Sequence[Finding], *, every: bool = False) -> list[RenderableType]:
    """One block per kind of finding, or per finding: place, what was found and needed, what to do."""
    if every:
        return [_finding(finding) for finding in findings]
    folded = fold(findings)
    shown = [part for kind in folded[:MAX_FINDINGS] for part in _kind(kind)]
    more = sum(kind.count + kind.following for kind in folded[MAX_FINDINGS:])
    if more:
        shown.append(Text(f"{plural(more, 'more finding')}: see --format json"))
    return shown


def _kind(kind: Folded) -> list[RenderableType]:
    """One block, and below it what may follow from it, a line for each kind."""
    block = _finding(replace(kind.first, where=kind.places))
    if kind.count > 1:
        block = Group(
            block, Text(f"  and {kind.count - 1:,} more like it: see --all or --format json", "dim")
        )
    if not kind.follow:
        return [block]
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(justify="right")
    for other in kind.follow:
        what = f"{other.places}: {other.first.got}, need {other.first.expected}  [{other.first.check}]"
        table.add_row(f"{other.count:,}", harmless(what))
    note = f"{plural(kind.following, 'more finding')} may follow from it; correct it and check again"
    return [block, Group(Text(note), table)]


def _finding(finding: Finding) -> RenderableType:
    head = Text.assemble(
        (finding.severity, _SEVERITY_STYLE[finding.severity]),
        "  ",
        harmless(finding.where, "bold"),
        "  ",
        harmless(f"[{finding.check}]", "dim"),
    )
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    for label, text in (("got", finding.got), ("need", finding.expected), ("do", finding.fix)):
        table.add_row(Text(label, "dim"), harmless(text))
    return Group(head, table)
