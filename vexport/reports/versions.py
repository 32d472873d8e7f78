"""Build the table of a checkpoint in several versions of vLLM, with the changes of each version."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from vexport.records import ComparedVersion, ComparedVersions, VersionOutcome
from vexport.records.gates import Gate, Status, findings_gate
from vexport.records.scale import NOT_AVAILABLE
from vexport.reports import document as doc
from vexport.reports.document import TableCell, muted, parts, table
from vexport.reports.formatting import small
from vexport.words import listed

_TONES: Mapping[VersionOutcome, str] = {
    "BASELINE": "info",
    "SAME": "pass",
    "DIFFERS": "fail",
    "REFUSED": "fail",
    "NOT JUDGED": "inconclusive",
    "NOT TRIED": "skipped",
}
_STATUSES: Mapping[VersionOutcome, Status] = {
    "BASELINE": "PASS",
    "SAME": "PASS",
    "DIFFERS": "FAIL",
    "REFUSED": "FAIL",
    "NOT JUDGED": "INCONCLUSIVE",
    "NOT TRIED": "SKIPPED",
}
_NOT_TRIED = "--bisect assumes that one version changes the result, and did not need this version"
_LEGEND = (
    "Each version loads the checkpoint dry, for the GPUs in the findings. KL: divergence from the "
    "baseline on text, in nats per token, measured in CPU builds only. Another kernel in the same "
    "precision is a warning."
)


def versions_document(report: ComparedVersions) -> doc.Document:
    """Return the document of a checkpoint in several versions of vLLM."""
    findings = tuple(
        (version_name(row), finding)
        for gate, row in zip(version_gates(report), report.rows, strict=False)
        for finding in gate.findings
    )
    columns = (
        doc.Column("vLLM", nowrap=True),
        "Build",
        doc.Column("Verdict", nowrap=True),
        ">KL",
        "Reason",
    )
    unjudged = tuple(_not_judged(report))
    return doc.Document(
        title=report.checkpoint,
        status=report.outcome,
        sentence=report.reason,
        parts=parts(
            table(columns, map(_cells, report.rows)),
            doc.FindingList(findings, "--format json") if findings else None,
            doc.Listing(unjudged, "not judged") if unjudged else None,
            muted(_LEGEND),
        ),
    )


def version_name(row: ComparedVersion) -> str:
    """Return the name of a row in findings and test cases: `vLLM 0.31.0`."""
    return f"vLLM {row.vllm}"


def version_gates(report: ComparedVersions) -> list[Gate]:
    """Return a gate for each version, and one for all of them, which has the outcome."""
    gates = [_gate(row) for row in report.rows]
    message = f"{report.outcome}: {report.reason}"
    return [*gates, Gate(name="versions", status=report.outcome, message=message)]


def _gate(row: ComparedVersion) -> Gate:
    reason = _NOT_TRIED if row.outcome == "NOT TRIED" else row.reason
    message = ": ".join(filter(None, (row.outcome, reason)))
    findings = findings_gate("", row.findings).findings
    status = _STATUSES[row.outcome]
    return Gate(name=version_name(row), status=status, message=message, findings=findings)


def _cells(row: ComparedVersion) -> Iterator[TableCell | str]:
    yield TableCell(row.vllm, row.vllm_python)
    yield row.build.upper() or NOT_AVAILABLE
    yield TableCell(row.outcome, tone=_TONES[row.outcome], badge=True)
    yield NOT_AVAILABLE if row.mean_kl is None else small(row.mean_kl)
    yield row.reason


def _not_judged(report: ComparedVersions) -> Iterator[TableCell]:
    """Yield the reasons why the KL was not measured, with the versions."""
    versions = defaultdict[str, list[str]](list)
    for row in report.rows:
        if row.kl_not_judged:
            versions[row.kl_not_judged].append(row.vllm)
    for reason, names in versions.items():
        yield TableCell(f"KL in vLLM {listed(names, 'and')}: {reason}")
