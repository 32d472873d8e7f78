"""JUnit XML: one test case per gate, per checkpoint of `check`, per cell of `load`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from vexport.errors.escaping import visible
from vexport.records import CheckReport, DryLoadReport, LoadReport, Report, Verdict
from vexport.reports.checkpoints import column_names
from vexport.reports.folding import kinds
from vexport.reports.gates import (
    Gate,
    cell_gate,
    check_gates,
    checkpoint_gate,
    findings_gate,
    report_gates,
    verdict_gates,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suite:
    name: str
    gates: tuple[Gate, ...]


def report(report: Report) -> str:
    """One suite with a case for every gate of the run."""
    return _document((_Suite(name=report.name, gates=report_gates(report)),), report.seconds)


def checks(reports: Sequence[CheckReport], families: Sequence[str] = ()) -> str:
    """One suite per checkpoint with a case for every family of checks, or the case `check`."""
    return _document(
        [_Suite(name=report.checkpoint, gates=check_gates(report, families)) for report in reports], {}
    )


def loads(reports: Sequence[LoadReport]) -> str:
    """One suite per checkpoint with the case `load`, or one for each vLLM and mode it was loaded in."""
    columns = column_names(reports)
    names = dict.fromkeys(report.checkpoint for report in reports)
    cells = [
        (report.checkpoint, checkpoint_gate(f"load {column}".strip(), report))
        for report, column in zip(reports, columns, strict=True)
    ]
    suites = [_Suite(name=name, gates=tuple(gate for of, gate in cells if of == name)) for name in names]
    return _document(suites, {})


def dry_loads(reports: Sequence[DryLoadReport]) -> str:
    """One suite per checkpoint and vLLM: a case for each cell, and one with the findings, `dry load`."""
    return _document(
        [
            _Suite(
                name=f"{report.checkpoint} {column}".strip(),
                gates=(
                    *map(cell_gate, report.cells),
                    findings_gate("dry load", report.findings, ok=report.ok),
                ),
            )
            for report, column in zip(reports, column_names(reports), strict=True)
        ],
        {},
    )


def verdicts(verdicts: Sequence[Verdict]) -> str:
    """One suite per checkpoint with a case for every task and one for the answer."""
    names = ["verdict" if len(verdicts) == 1 else verdict.checkpoint for verdict in verdicts]
    suites = zip(names, verdicts, strict=True)
    return _document([_Suite(name=name, gates=verdict_gates(verdict)) for name, verdict in suites], {})


def _document(suites: Sequence[_Suite], seconds: Mapping[str, float]) -> str:
    gates = [gate for suite in suites for gate in suite.gates]
    root = ElementTree.Element("testsuites", {"name": "vexport", **_totals(gates, seconds)})
    for suite in suites:
        attributes = {"name": visible(suite.name), **_totals(suite.gates, seconds)}
        element = ElementTree.SubElement(root, "testsuite", attributes)
        for gate in suite.gates:
            _add_case(element, suite.name, gate, seconds)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _totals(gates: Sequence[Gate], seconds: Mapping[str, float]) -> dict[str, str]:
    return {
        "tests": str(len(gates)),
        "failures": str(sum(gate.status in ("FAIL", "INCONCLUSIVE") for gate in gates)),
        "errors": "0",
        "skipped": str(sum(gate.status == "SKIPPED" for gate in gates)),
        "time": f"{sum(seconds.values()):.3f}",
    }


def _add_case(suite: ElementTree.Element, name: str, gate: Gate, seconds: Mapping[str, float]) -> None:
    attributes = {
        "classname": f"vexport.{visible(name)}",
        "name": visible(gate.name),
        "time": f"{seconds.get(gate.name, 0.0):.3f}",
    }
    case = ElementTree.SubElement(suite, "testcase", attributes)
    message = visible(gate.message)
    details = "\n".join(
        f"{kind.first.severity}: {visible(str(kind.finding))}" for kind in kinds(gate.findings)
    )
    if gate.status == "SKIPPED":
        ElementTree.SubElement(case, "skipped", {"message": message})
    elif gate.status == "PASS":
        ElementTree.SubElement(case, "system-out").text = details or message
    else:
        failure = ElementTree.SubElement(case, "failure", {"message": message, "type": gate.status})
        failure.text = details or message
