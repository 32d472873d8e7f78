"""Workflow commands of GitHub Actions: at most ten annotations, the errors first.

The escapes are those of actions/toolkit (packages/core/src/command.ts); GitHub shows ten annotations a step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vexport.errors.escaping import clip, visible
from vexport.reports.checkpoints import titled
from vexport.reports.folding import fold
from vexport.reports.formatting import plural
from vexport.reports.gates import Gate, Status, checkpoint_gate, judged_for, report_gates, verdict_gates
from vexport.reports.places import Place, in_workspace, place_of
from vexport.reports.sentences import outcome_line, report_device, report_sentence
from vexport.types import CheckReport, DryLoadReport, Finding, LoadReport, Outcome, Report, Severity, Verdict

MAX_ANNOTATIONS = 10
_MAX_CHARACTERS = 2000
_Level = Literal["error", "warning", "notice"]
_RANK: Mapping[_Level, int] = {"error": 0, "warning": 1, "notice": 2}
_OF_STATUS: Mapping[Status, _Level] = {
    "PASS": "notice",
    "FAIL": "error",
    "INCONCLUSIVE": "warning",
    "SKIPPED": "notice",
}
_OF_SEVERITY: Mapping[Severity, _Level] = {"error": "error", "warning": "warning", "info": "notice"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Annotation:
    level: _Level
    title: str
    message: str
    place: Place | None = None

    def __str__(self) -> str:
        file = {"file": self.place.file, "line": str(self.place.line or 1)} if self.place else {}
        properties = ",".join(
            f"{name}={_escape_property(visible(value))}"
            for name, value in {**file, "title": self.title}.items()
        )
        return f"::{self.level} {properties}::{_escape_data(visible(clip(self.message, _MAX_CHARACTERS)))}"


def report(report: Report, scenario: Path | None = None) -> str:
    """The answer, then errors and warnings of every gate; at the scenario, where it is known."""
    *gates, _ = report_gates(report)
    place = in_workspace(scenario) if scenario else None
    answer = _answer(report.name, report.outcome, report_device(report), report_sentence(report))
    notes = (replace(note, place=place) for gate in gates for note in _of_gate(gate))
    return _lines(replace(answer, place=place), notes)


def verdict(verdict: Verdict) -> str:
    """The answer, then every task that did not pass."""
    *tasks, _ = verdict_gates(verdict)
    answer = _answer("accuracy", verdict.outcome, verdict.device, verdict.reason)
    return _lines(answer, (note for gate in tasks for note in _of_gate(gate)))


def checkpoints(name: str, reports: Sequence[CheckReport | LoadReport | DryLoadReport]) -> str:
    """Every checkpoint's errors and warnings of the gate `name`, or one notice where there are none."""
    gates = [(report.checkpoint, checkpoint_gate(name, report)) for report in titled(reports)]
    if all(gate.status == "PASS" and not gate.findings for _, gate in gates):
        message = f"{plural(len(gates), 'checkpoint')} without a finding{judged_for(reports[0])}"
        return _lines(_Annotation(level="notice", title=f"vexport {name} PASS", message=message), ())
    return _lines(None, (note for place, gate in gates for note in _of_gate(gate, place)))


def _answer(name: str, outcome: Outcome, device: str, sentence: str) -> _Annotation:
    title = f"vexport {outcome_line(outcome, device)}: {name}"
    return _Annotation(level=_OF_STATUS[outcome], title=title, message=sentence)


def _of_gate(gate: Gate, place: str = "") -> Iterator[_Annotation]:
    """Its findings but the notes; without an error among them, the gate itself where it did not pass."""
    prefix = f"{place}: " if place else ""
    if gate.status in ("FAIL", "INCONCLUSIVE") and not any(f.severity == "error" for f in gate.findings):
        yield _Annotation(
            level=_OF_STATUS[gate.status], title=f"{gate.name} {gate.status}", message=prefix + gate.message
        )
    for kind in fold(gate.findings):
        if kind.first.severity != "info":
            note = _of_finding(gate.name, prefix, kind.finding)
            yield replace(note, place=place_of(place, kind.first))


def _of_finding(gate: str, prefix: str, finding: Finding) -> _Annotation:
    title = f"{gate}: {finding.check}"
    return _Annotation(level=_OF_SEVERITY[finding.severity], title=title, message=f"{prefix}{finding}")


def _lines(answer: _Annotation | None, notes: Iterable[_Annotation]) -> str:
    """The answer and the gravest notes; the rest is counted in a plain line of the log."""
    ordered = sorted(notes, key=lambda note: _RANK[note.level])
    annotations = [answer, *ordered] if answer else ordered
    lines = [str(note) for note in annotations[:MAX_ANNOTATIONS]]
    left_out = len(annotations) - len(lines)
    if left_out:
        lines.append(f"{plural(left_out, 'more annotation')} left out; --format json has them all")
    return "".join(f"{line}\n" for line in lines)


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")
