"""Gates: the conditions of a verdict, with their statuses.

CI shows gates as test cases, reports show them as a checklist, and the first gate that fails
decides the outcome of a run.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vexport.records.findings import (
    LOADERS,
    CheckReport,
    DryLoadReport,
    Finding,
    LoadReport,
    MatrixCell,
    NotJudged,
    Severity,
    without_details,
)
from vexport.words import plural

Status = Literal["PASS", "FAIL", "INCONCLUSIVE", "SKIPPED"]
# The most serious severity first.
SEVERITIES: Sequence[Severity] = ("error", "warning", "info")
NOT_RUN = "not run: an earlier gate failed"
# Follows PASS if vLLM's loaders could not judge the checkpoint.
STATIC_SCOPE = "of the static rules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Condition of the verdict: its status, a sentence, and the findings behind it."""

    name: str
    status: Status
    message: str
    findings: tuple[Finding, ...] = ()

    @property
    def summary(self) -> str:
        """Return the number of findings, or the message if there are no findings."""
        return finding_counts(self.findings) if self.findings else self.message


def findings_gate(
    name: str, findings: Sequence[Finding], *, ok: bool = True, with_message: bool = False
) -> Gate:
    """Return a gate that fails if a finding is an error or if `ok` is False.

    The message is the first error, or the number of findings if there is no error. The gate's
    findings are sorted by severity. If vLLM refuses the checkpoint, a finding has the cause and
    vLLM's message. The message is removed unless `with_message` is True.
    """
    shown = findings if with_message else [finding.brief for finding in findings]
    ordered = tuple(sorted(shown, key=lambda finding: SEVERITIES.index(finding.severity)))
    errors = [finding for finding in ordered if finding.severity == "error"]
    if errors:
        more = f" (and {plural(len(errors) - 1, 'more error')})" if len(errors) > 1 else ""
        return Gate(name=name, status="FAIL", message=f"{errors[0]}{more}", findings=ordered)
    message = finding_counts(ordered) if ok else "failed without a finding"
    return Gate(name=name, status="PASS" if ok else "FAIL", message=message, findings=ordered)


def static_reason(report: CheckReport | DryLoadReport | LoadReport) -> str:
    """Return why only the static rules have passed a checkpoint.

    Return "" if vLLM's loaders judged it, if the user chose `--static`, or if it fails.
    """
    if not isinstance(report, CheckReport) or not report.ok or not report.loaders_failed:
        return ""
    return f"{LOADERS} could not judge it: {report.loaders_failed}"


def checkpoint_gate(
    name: str, report: CheckReport | DryLoadReport | LoadReport, *, with_message: bool = False
) -> Gate:
    """Return the gate of a checkpoint.

    It fails if the report is not ok, even if the report has no error. It is inconclusive if a
    server's log lacks values.
    """
    gate = findings_gate(name, report.findings, ok=report.ok, with_message=with_message)
    if gate.status != "PASS" or not isinstance(report, DryLoadReport) or report.server is None:
        return gate
    if not report.not_judged:
        return gate
    return replace(gate, status="INCONCLUSIVE", message=f"not compared: {report.not_judged[0]}")


def load_gate(name: str, report: LoadReport | None) -> Gate:
    """Return the gate of a load. It is skipped if the load was never tried."""
    if report is None:
        return Gate(name=name, status="SKIPPED", message=NOT_RUN)
    return checkpoint_gate(name, report)


def cell_gate(cell: MatrixCell) -> Gate:
    """Return the gate of a cell of a dry load.

    It is skipped if the checkpoint does not load in a cell that is not required.
    """
    status: Status = "PASS" if cell.loads else "FAIL" if cell.fails else "SKIPPED"
    message = ": ".join(filter(None, (cell.status, without_details(cell.reason))))
    return Gate(name=f"tp {cell.tp}, sm {cell.sm}", status=status, message=message)


def check_gates(report: CheckReport, families: Sequence[str]) -> tuple[Gate, ...]:
    """Return a gate for each family of checks, and for each other check with a finding.

    Without `families` there is a single gate, `check`. Parts of the checkpoint that were not judged
    get skipped gates, and so do findings of ignored rules.
    """
    skipped = [_not_judged_gate(report, each.brief) for each in report.not_judged]
    for finding in report.ignored:
        skipped.append(Gate(name=finding.rule, status="SKIPPED", message=f"ignored: {finding}"))
    if not families:
        return (checkpoint_gate("check", report), *skipped)
    return (*_family_gates(report, families), *skipped)


def _not_judged_gate(report: CheckReport, part: NotJudged) -> Gate:
    only_static = part.what == LOADERS and static_reason(report)
    message = f"PASS {STATIC_SCOPE}: {part.why}" if only_static else part.why
    return Gate(name=part.what, status="SKIPPED", message=message)


def _family_gates(report: CheckReport, families: Sequence[str]) -> Iterator[Gate]:
    findings: dict[str, list[Finding]] = {name: [] for name in families}
    for finding in report.findings:
        findings.setdefault(finding.check, []).append(finding)
    for name, found in findings.items():
        yield findings_gate(name, found)


def ignored_counts(report: CheckReport | DryLoadReport | LoadReport) -> str:
    """Return `2 errors ignored (config/scale, values/zero)`, or "" if nothing was ignored."""
    if not isinstance(report, CheckReport) or not report.ignored:
        return ""
    ids = dict.fromkeys(finding.rule for finding in report.ignored)
    return f"{finding_counts(report.ignored)} ignored ({', '.join(ids)})"


def finding_counts(findings: Iterable[Finding]) -> str:
    """Return `1 error, 2 warnings`, or `no findings`."""
    severities = [finding.severity for finding in findings]
    nouns = {"error": "error", "warning": "warning", "info": "note"}
    counts = ((severities.count(severity), nouns[severity]) for severity in SEVERITIES)
    return ", ".join(plural(number, noun) for number, noun in counts if number) or "no findings"
