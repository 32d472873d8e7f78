"""Markdown for a CI step summary: the answer, the tasks, the findings; far below GitHub's limit of 1 MiB."""

import re
from collections.abc import Iterable, Sequence

from vexport.reports.coverage import coverage_lines
from vexport.reports.escaping import clip, visible
from vexport.reports.folding import SEVERITIES, fold
from vexport.reports.formatting import (
    count,
    duration,
    percent,
    percent_interval,
    plural,
)
from vexport.reports.gates import Gate, checkpoint_gate, judged_for, report_gates, staged_findings
from vexport.reports.mixing import attempt_line, mixed_line
from vexport.reports.reading import p_values_line, reading_lines
from vexport.reports.sentences import (
    agreement_line,
    engine_line,
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
from vexport.types import CheckReport, Comparison, Finding, LoadReport, Report, TaskVerdict, Verdict

MAX_FINDINGS = 20
# GitHub refuses a step's summary above 1 MiB; other writers of the same step need room too.
SUMMARY_BYTES = 1 << 19
MAX_CHECKPOINTS = 100
_MAX_CELL = 600
_MAX_TEXT = 4000
_BESIDE = ("Also", "n", "Baseline", "Quantized", "Difference")
_PUNCTUATION = re.compile(r"([\\`*_\[\]|~#{}!])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "://": "&#58;//", "www.": "www&#46;"}


def report(report: Report) -> str:
    """The whole summary; answers and layers are left to the HTML report."""
    parts = [
        f"## {safe(outcome_line(report.outcome, report_device(report)))}: {safe(report.name)}",
        safe(opening(report_sentence(report))),
        _gate_table(report_gates(report)[:-1]),
        _size_line(report),
        _coverage(report),
        _tasks(report.verdict) if report.verdict else "",
        _load(report.load),
        _signals(report),
        _findings(report),
        f"<sub>vexport {safe(report.vexport)}, {safe(report.created)}, source {safe(report.source)}, "
        f"total {duration(sum(report.seconds.values()))}</sub>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def checks(reports: Sequence[CheckReport]) -> str:
    """What `vexport check` found, checkpoint by checkpoint, as far as the summary's limit goes."""
    shown = reports[:MAX_CHECKPOINTS]
    parts = [table(("Checkpoint", "Result", "Findings"), map(_check_row, shown))]
    size, left_out = len(parts[0].encode()), len(reports) - len(shown)
    for report in shown:
        part = _checkpoint_part(report)
        size += len(part.encode())
        if size < SUMMARY_BYTES:
            parts.append(part)
        else:
            left_out += 1
    if left_out:
        parts.append(f"{plural(left_out, 'more checkpoint')} with findings: see --format json")
    return "\n\n".join(part for part in parts if part) + "\n"


def _checkpoint_part(report: CheckReport) -> str:
    found = [("check", finding) for finding in checkpoint_gate("check", report).findings]
    rows = _finding_table(found, "--format json")
    return f"### {safe(report.checkpoint)}\n\n{rows}" if found else ""


def _check_row(report: CheckReport) -> tuple[str, ...]:
    gate = checkpoint_gate("check", report)
    return (report.checkpoint, gate.status, gate.summary + judged_for(report))


def _gate_table(gates: Sequence[Gate]) -> str:
    return table(("Gate", "Result", "Why"), ((gate.name, gate.status, gate.summary) for gate in gates))


def _size_line(report: Report) -> str:
    return f"**Size** {safe(size_change(report.plan))}, {safe(schemes_in_use(report.plan))}"


def _signals(report: Report) -> str:
    lines = [f"- **{label}** {safe(line)}" for label, line in signal_lines(report)]
    if report.mixed:
        lines.append(f"- **auto** {safe(mixed_line(report.mixed))}")
    lines += [f"- **round {one.number}** {safe(attempt_line(one))}" for one in report.attempts]
    return "\n".join(lines)


def _coverage(report: Report) -> str:
    return "\n".join(f"- {safe(line)}" for line in coverage_lines(report.experts))


def _tasks(verdict: Verdict) -> str:
    header = (
        "Task",
        "Result",
        "n",
        "Baseline",
        "Quantized",
        "Difference",
        "Recovery",
        "Flips",
    )
    parts = [f"### Accuracy\n\n{table(header, map(_task_row, verdict.tasks))}"]
    if beside := shown_comparisons(verdict):
        parts.append("For information, decides nothing:\n\n" + table(_BESIDE, map(_comparison_row, beside)))
    parts += [f"**Warning** {safe(warning)}" for warning in verdict.warnings]
    return "\n\n".join([*parts, _reading(verdict)])


def _reading(verdict: Verdict) -> str:
    """What the numbers are, folded."""
    lines = [*reading_lines(verdict)]
    if p_values := p_values_line(verdict):
        lines.append(f"p: {p_values}")
    items = "\n".join(f"- {safe(line)}" for line in lines)
    return f"<details><summary>How to read this, and p values</summary>\n\n{items}\n\n</details>"


def _comparison_row(one: Comparison) -> tuple[str, ...]:
    scale = scale_of_comparison(one)
    return (
        task_title(one),
        count(one.documents),
        scale.value(one.baseline),
        scale.value(one.candidate),
        f"{scale.change(one.difference)} ({scale.changes(one.low, one.high)}) {scale.unit}",
    )


def _task_row(task: TaskVerdict) -> tuple[str, ...]:
    scale = scale_of(task)
    return (
        task_title(task),
        task.outcome,
        count(task.documents),
        f"{scale.value(task.baseline.value)} ({scale.interval(task.baseline.low, task.baseline.high)})",
        f"{scale.value(task.candidate.value)} ({scale.interval(task.candidate.low, task.candidate.high)})",
        f"{scale.change(task.difference)} ({scale.changes(task.low, task.high)}) {scale.unit}",
        f"{percent(task.recovery)} ({percent_interval(task.recovery_low, task.recovery_high)})",
        f"{count(task.right_to_wrong)} lost, {count(task.wrong_to_right)} gained "
        f"({percent(task.flip_rate, 2)})",
    )


def _load(load: LoadReport) -> str:
    lines = ["### Load in vLLM"]
    if load.engine:
        lines.append(f"- vLLM {safe(engine_line(load.engine))}")
        if load.engine.settings:
            lines.append(f"- Served with {safe(served_with(load.engine))}")
        lines += [f"- Not shown here: {safe(spot)}" for spot in load.engine.blind_spots]
    if load.logprobs:
        lines.append(f"- Log-probabilities: {safe(agreement_line(load.logprobs))}")
    return "\n".join(lines) if len(lines) > 1 else ""


def _findings(report: Report) -> str:
    found = staged_findings(report)
    if not found:
        return ""
    return f"### Findings\n\n{_finding_table(found, 'report.json')}"


def _finding_table(found: Sequence[tuple[str, Finding]], everything: str) -> str:
    """The gravest kinds of findings, and where all of them are."""
    gates = dict.fromkeys(gate for gate, _ in found)
    folded = [(gate, kind) for gate in gates for kind in fold([one for name, one in found if name == gate])]
    folded.sort(key=lambda pair: SEVERITIES.index(pair[1].first.severity))
    rows = table(
        ("Severity", "Check", "Where", "Got", "Need", "Do"),
        (_finding_row(gate, kind.finding) for gate, kind in folded[:MAX_FINDINGS]),
    )
    more = sum(kind.count + kind.following for _, kind in folded[MAX_FINDINGS:])
    return rows + (f"\n\n{plural(more, 'more finding')} in {everything}" if more > 0 else "")


def _finding_row(gate: str, finding: Finding) -> tuple[str, ...]:
    return (
        finding.severity,
        f"{gate}: {finding.check}",
        finding.where,
        finding.got,
        finding.expected,
        finding.fix,
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose rows, not its header, come from outside."""
    lines = [header, ["---"] * len(header), *([safe(cell, _MAX_CELL) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def safe(text: str, limit: int = _MAX_TEXT) -> str:
    """`text` as itself in Markdown: no markup, HTML, link, mention or table cell of its own.

    The limit is for texts from outside; no sentence of a report is as long.
    """
    escaped = _PUNCTUATION.sub(r"\\\1", visible(clip(text, limit)))
    for plain, entity in _ENTITIES.items():
        escaped = escaped.replace(plain, entity)
    return escaped
