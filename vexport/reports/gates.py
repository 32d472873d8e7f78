"""The gates of a run in their order: what CI shows as test cases and people read as a checklist."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vexport.records import (
    CheckReport,
    DryLoadReport,
    Finding,
    LoadReport,
    MatrixCell,
    Report,
    Severity,
    TaskVerdict,
    TextLimit,
    Verdict,
)
from vexport.records.values import about
from vexport.reports.folding import SEVERITIES
from vexport.reports.formatting import count, plural
from vexport.reports.sentences import (
    nats,
    nats_interval,
    outcome_line,
    report_device,
    report_sentence,
    scale_of,
    task_title,
)

Status = Literal["PASS", "FAIL", "INCONCLUSIVE", "SKIPPED"]
_NOT_RUN = "not run: an earlier gate failed"
_NOT_ASKED = "not asked for: the scenario has no `evaluate`"
_ORDER: dict[Severity, int] = {severity: number for number, severity in enumerate(SEVERITIES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One condition of the verdict: its status, one sentence, and the findings behind it."""

    name: str
    status: Status
    message: str
    findings: tuple[Finding, ...] = ()

    @property
    def summary(self) -> str:
        """The message, or the number of findings where a list of them follows."""
        return finding_counts(self.findings) if self.findings else self.message


def report_gates(report: Report) -> tuple[Gate, ...]:
    """plan, check, dry load, load of both models, every task, the answer; a stage not reached is SKIPPED."""
    unasked = _NOT_ASKED if report.outcome == "PASS" else _NOT_RUN
    overall = f"{outcome_line(report.outcome, report_device(report))}: {report_sentence(report)}"
    return (
        findings_gate("plan", report.plan.refusals),
        checkpoint_gate("check", report.check),
        *((checkpoint_gate("dry load", report.dry_load),) if report.dry_load else ()),
        _load_gate("load baseline", report.baseline_load),
        _load_gate("load", report.load),
        *(
            _accuracy_gates(report.verdict)
            if report.verdict
            else [Gate(name="evaluate", status="SKIPPED", message=unasked)]
        ),
        Gate(name="overall", status=report.outcome, message=overall),
    )


def verdict_gates(verdict: Verdict) -> tuple[Gate, ...]:
    """Every task, or every measure of the text, and the answer."""
    message = f"{outcome_line(verdict.outcome, verdict.device)}: {verdict.reason}"
    return (*_accuracy_gates(verdict), Gate(name="overall", status=verdict.outcome, message=message))


def checkpoint_gate(name: str, report: CheckReport | DryLoadReport | LoadReport) -> Gate:
    """The findings on one checkpoint; FAIL where the report is not ok, whatever the findings say."""
    return findings_gate(name, report.findings, ok=report.ok)


def check_gates(report: CheckReport, families: Sequence[str]) -> tuple[Gate, ...]:
    """A gate for every family of checks, and for what else found something; without any the gate `check`.

    What was not judged is SKIPPED.
    """
    names = dict.fromkeys((*families, *(finding.check for finding in report.findings)))
    skipped = tuple(Gate(name=each.what, status="SKIPPED", message=each.why) for each in report.not_judged)
    if not families:
        return (checkpoint_gate("check", report), *skipped)
    return (
        tuple(
            findings_gate(name, [finding for finding in report.findings if finding.check == name])
            for name in names
        )
        + skipped
    )


def cell_gate(cell: MatrixCell) -> Gate:
    """One cell of a dry load: FAIL where it must load and does not, SKIPPED where it need not."""
    loads = cell.status in ("loads", "other precision")
    status: Status = "PASS" if loads else "FAIL" if cell.needed or cell.status == "faulty" else "SKIPPED"
    message = ": ".join(filter(None, (cell.status, cell.reason)))
    return Gate(name=f"tp {cell.tp}, sm {cell.sm}", status=status, message=message)


def findings_gate(name: str, findings: Sequence[Finding], *, ok: bool = True) -> Gate:
    """FAIL with an error finding or where `ok` is off; the message is the first error or the counts."""
    ordered = tuple(sorted(findings, key=lambda finding: _ORDER[finding.severity]))
    errors = [finding for finding in ordered if finding.severity == "error"]
    if errors:
        more = f" (and {plural(len(errors) - 1, 'more error')})" if len(errors) > 1 else ""
        return Gate(name=name, status="FAIL", message=f"{errors[0]}{more}", findings=ordered)
    if not ok:
        return Gate(name=name, status="FAIL", message="failed without a finding", findings=ordered)
    return Gate(name=name, status="PASS", message=finding_counts(ordered), findings=ordered)


def task_gate(task: TaskVerdict, margin: float) -> Gate:
    """One task: the difference with its interval against the margin."""
    scale = scale_of(task)
    message = (
        f"{scale.change(task.difference)} {scale.unit} ({scale.changes(task.low, task.high)}), "
        f"{scale.limit(margin)} accepted, {count(task.documents)} documents"
    )
    if task.uninformative:
        message = f"shows nothing: {task.uninformative}"
    elif task.outcome == "INCONCLUSIVE" and task.documents_needed is not None:
        message += f"; {about(task.documents_needed)} documents would settle it"
    return Gate(name=task_title(task), status=task.outcome, message=message)


def staged_findings(report: Report) -> tuple[tuple[str, Finding], ...]:
    """Every finding of a run with the gate it belongs to, the gravest first."""
    pairs = ((gate.name, finding) for gate in report_gates(report) for finding in gate.findings)
    return tuple(sorted(pairs, key=lambda pair: _ORDER[pair[1].severity]))


def finding_counts(findings: Sequence[Finding]) -> str:
    """`1 error, 2 warnings`, or `no findings`."""
    nouns: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}
    counts = {kind: sum(finding.severity == kind for finding in findings) for kind in nouns}
    return ", ".join(plural(counts[kind], nouns[kind]) for kind in nouns if counts[kind]) or "no findings"


def judged_for(report: CheckReport | LoadReport | DryLoadReport) -> str:
    """` for vLLM 0.32, TP 1, any GPU`: what a check asked; nothing for a load, which names its engine."""
    if not isinstance(report, CheckReport) or not report.vllm:
        return ""
    gpus = f"SM {', '.join(map(str, report.sm))}" if report.sm else "any GPU"
    return f" for vLLM {report.vllm}, TP {', '.join(map(str, report.tp))}, {gpus}"


def _load_gate(name: str, report: LoadReport) -> Gate:
    """A load without an engine and without a finding was never tried."""
    if not report.ok and not report.findings and report.engine is None:
        return Gate(name=name, status="SKIPPED", message=_NOT_RUN)
    return checkpoint_gate(name, report)


def _accuracy_gates(verdict: Verdict) -> tuple[Gate, ...]:
    return (
        *(task_gate(task, verdict.margin) for task in verdict.tasks),
        *map(_text_gate, verdict.text.limits if verdict.text else ()),
    )


def _text_gate(limit: TextLimit) -> Gate:
    """One measure of the text: its value and bounds against the limit."""
    unit, bound = ("", f"{limit.limit:.0%}") if limit.is_share else (" nats per token", f"{limit.limit:g}")
    message = f"{nats(limit, limit.value)}{unit} ({nats_interval(limit)}), limit {bound}"
    if limit.rows_needed is not None:
        message += f"; about {count(limit.rows_needed)} rows would settle it"
    return Gate(name=f"text ({limit.measure})", status=limit.outcome, message=message)
