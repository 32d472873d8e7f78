"""Workflow commands of GitHub Actions: at most ten annotations, the errors first.

The escapes are those of actions/toolkit (packages/core/src/command.ts); GitHub shows ten annotations a step.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vexport.errors.escaping import clip, visible
from vexport.records import (
    CheckReport,
    DryLoadReport,
    Finding,
    LoadReport,
    Outcome,
    Report,
    Severity,
    Verdict,
)
from vexport.reports.checkpoints import titled
from vexport.reports.folding import fold
from vexport.reports.formatting import plural
from vexport.reports.gates import Gate, Status, checkpoint_gate, judged_for, report_gates, verdict_gates
from vexport.reports.sentences import outcome_line, report_device, report_sentence

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


CONFIG = "config.json"
# What is looked through for the line of a key; a config is a few kilobytes.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLine:
    """A file, relative to the workspace with `/`, and a line from 1; 0 where no line is known."""

    file: str
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Annotation:
    level: _Level
    title: str
    message: str
    place: FileLine | None = None

    def __str__(self) -> str:
        file = {"file": self.place.file, "line": str(self.place.line or 1)} if self.place else {}
        properties = ",".join(
            f"{name}={_escape_data(visible(value)).replace(':', '%3A').replace(',', '%2C')}"
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
    """Every checkpoint's errors and warnings of the gate `name`, or one notice where there are none.

    What a check did not judge is a notice.
    """
    gates = [(report.checkpoint, checkpoint_gate(name, report)) for report in titled(reports)]
    unjudged = [
        _Annotation(level="notice", title=f"{name}: not judged", message=f"{report.checkpoint}: {each}")
        for report in reports
        if isinstance(report, CheckReport)
        for each in report.not_judged
    ]
    if all(gate.status == "PASS" and not gate.findings for _, gate in gates):
        message = f"{plural(len(gates), 'checkpoint')} without a finding{judged_for(reports[0])}"
        return _lines(_Annotation(level="notice", title=f"vexport {name} PASS", message=message), unjudged)
    return _lines(None, [*(note for place, gate in gates for note in _of_gate(gate, place)), *unjudged])


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
            yield _Annotation(
                level=_OF_SEVERITY[kind.first.severity],
                title=f"{gate.name}: {kind.first.check}",
                message=f"{prefix}{kind.finding}",
                place=place_of(place, kind.first),
            )


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


def place_of(checkpoint: str, finding: Finding) -> FileLine | None:
    """Return the place of a finding on `checkpoint`; None where that is no folder or lies outside the
    workspace.

    The file that the finding names, else the index of the weights or their file, else config.json.
    """
    root = _folder(checkpoint)
    if root is None:
        return None
    name, _, key = finding.where.partition(": ")
    file = _named(root, name) or _stored(root, finding.where) or root / CONFIG
    return in_workspace(file, _line(file, key))


def in_workspace(file: Path, line: int = 0) -> FileLine | None:
    """A file as GitHub names it; None outside GITHUB_WORKSPACE, or outside the current folder without one."""
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    absolute = file.absolute()
    if not absolute.is_relative_to(workspace):
        absolute = file.resolve()
    if not absolute.is_relative_to(workspace):
        return None
    return FileLine(file=absolute.relative_to(workspace).as_posix(), line=line)


def _folder(checkpoint: str) -> Path | None:
    """The folder, also of a name that says in brackets how the checkpoint was loaded."""
    for name in (checkpoint, checkpoint.rpartition(" (")[0]):
        try:
            if name and Path(name).is_dir():
                return Path(name)
        except (OSError, ValueError):
            continue
    return None


def _named(root: Path, name: str) -> Path | None:
    """The file of the checkpoint that a place begins with, as it is or relative to the folder."""
    for path in (Path(name), root / name):
        try:
            if path.is_file() and path.resolve().is_relative_to(root.resolve()):
                return path
        except (OSError, ValueError):
            continue
    return None


def _stored(root: Path, where: str) -> Path | None:
    """The index of the weights, or their only file, where `where` is the name of a tensor or layer."""
    if "." not in where or "/" in where or " " in where.strip():
        return None
    files = (*root.glob("*.safetensors.index.json"), *sorted(root.glob("*.safetensors")))
    return next(iter(files), None)


def _line(file: Path, key: str) -> int:
    """The line of the last key of the path `key` in a JSON file; 0 where there is none."""
    if file.suffix != ".json" or not key:
        return 0
    quoted = json.dumps(key.split(" ")[0].rpartition(".")[2])
    try:
        with file.open("rb") as stream:
            lines = stream.read(_MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return 0
    return next((number for number, text in enumerate(lines, 1) if quoted in text), 0)
