"""Write JUnit XML with a test case for each gate, and workflow commands of GitHub Actions.

The commands list errors first, because GitHub shows only ten annotations per step. Text is escaped
as in actions/toolkit (packages/core/src/command.ts).
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from vexport.errors import visible
from vexport.records import CheckReport, DryLoadReport, Finding, LoadReport, Severity
from vexport.records.gates import STATIC_SCOPE, Gate, Status, checkpoint_gate, static_reason
from vexport.reports.checkpoints import with_load_names
from vexport.reports.findings import check_target, fold, kinds
from vexport.reports.formatting import outcome_line
from vexport.words import clip, plural

MAX_ANNOTATIONS = 10
_MAX_CHARACTERS = 2000
_Level = Literal["error", "warning", "notice"]
_LEVELS: Sequence[_Level] = ("error", "warning", "notice")
_OF_STATUS: Mapping[Status, _Level] = {
    "PASS": "notice",
    "FAIL": "error",
    "INCONCLUSIVE": "warning",
    "SKIPPED": "notice",
}
_OF_SEVERITY: Mapping[Severity, _Level] = {"error": "error", "warning": "warning", "info": "notice"}
# Maximum bytes that are searched for the line of a key. A config has a few kilobytes.
_MAX_BYTES = 1 << 20
# A place in a JSON file: `tokenizer.json:12`, `hf_quant_config.json.quantization`.
_IN_FILE = re.compile(r"(?P<file>.*\.json)[.:](?P<key>[\w.]+)")
Suite = tuple[str, Sequence[Gate]]


def junit(
    suites: Iterable[Suite],
    seconds: Mapping[str, float] | None = None,
    warnings: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return JUnit XML with a test suite for each name, and with a test case for each gate.

    `seconds` maps gates to the time they took. `warnings` maps suites to reasons to doubt them.
    """
    seconds, warnings, suites = seconds or {}, warnings or {}, list(suites)
    every = [gate for _, gates in suites for gate in gates]
    root = ElementTree.Element("testsuites", {"name": "vexport", **_totals(every, seconds)})
    for name, gates in suites:
        attributes = {"name": visible(name), **_totals(gates, seconds)}
        suite = ElementTree.SubElement(root, "testsuite", attributes)
        for gate in gates:
            time = f"{seconds.get(gate.name, 0.0):.3f}"
            attributes = {
                "classname": f"vexport.{visible(name)}",
                "name": visible(gate.name),
                "time": time,
            }
            _fill(ElementTree.SubElement(suite, "testcase", attributes), gate)
        if warnings.get(name):
            lines = [f"warning: {visible(warning)}" for warning in warnings[name]]
            ElementTree.SubElement(suite, "system-out").text = "\n".join(lines)
    ElementTree.indent(root)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        + ElementTree.tostring(root, encoding="unicode")
        + "\n"
    )


def _totals(gates: Sequence[Gate], seconds: Mapping[str, float]) -> dict[str, str]:
    return {
        "tests": str(len(gates)),
        "failures": str(sum(gate.status in ("FAIL", "INCONCLUSIVE") for gate in gates)),
        "errors": "0",
        "skipped": str(sum(gate.status == "SKIPPED" for gate in gates)),
        "time": f"{sum(seconds.values()):.3f}",
    }


def _fill(case: ElementTree.Element, gate: Gate) -> None:
    message = visible(gate.message)
    lines = (f"{kind.first.label}: {visible(str(kind.finding))}" for kind in kinds(gate.findings))
    details = "\n".join(lines) or message
    if gate.status == "SKIPPED":
        ElementTree.SubElement(case, "skipped", {"message": message})
    elif gate.status == "PASS":
        ElementTree.SubElement(case, "system-out").text = details
    else:
        ElementTree.SubElement(
            case, "failure", {"message": message, "type": gate.status}
        ).text = details


@dataclass(frozen=True, slots=True, kw_only=True)
class _Annotation:
    """A message with a file relative to the workspace and a line from 1.

    `file` is "" if unknown.
    """

    level: _Level
    title: str
    message: str
    file: str = ""
    line: int = 1

    def __str__(self) -> str:
        place = {"file": self.file, "line": str(self.line)} if self.file else {}
        properties = ",".join(
            f"{name}={_escaped(visible(value)).replace(':', '%3A').replace(',', '%2C')}"
            for name, value in {**place, "title": self.title}.items()
        )
        return (
            f"::{self.level} {properties}::{_escaped(visible(clip(self.message, _MAX_CHARACTERS)))}"
        )


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def github_gates(
    name: str,
    gates: Sequence[Gate],
    scenario: Path | None = None,
    warnings: Sequence[str] = (),
) -> str:
    """Return an annotation for the outcome, then for errors and warnings of the other gates.

    The last gate has the outcome, and `warnings` are reasons to doubt it. All annotations refer to
    the scenario's file if it is given.
    """
    *others, overall = gates
    line, _, sentence = overall.message.partition(": ")
    level = _OF_STATUS[overall.status]
    answer = _Annotation(level=level, title=f"vexport {line}: {name}", message=sentence)
    file = _in_workspace(scenario) if scenario else ""
    doubts = [_Annotation(level="warning", title=name, message=text) for text in warnings]
    notes = _gravest_first(note for gate in others for note in _of_gate(gate))
    return _lines(*(replace(note, file=file, line=1) for note in (answer, *doubts, *notes)))


def github_checkpoints(
    name: str, reports: Sequence[CheckReport | LoadReport | DryLoadReport]
) -> str:
    """Return annotations for the errors and warnings of the gate `name` on all checkpoints.

    If no gate has an error or a warning, the first annotation is a notice with PASS. There is also
    a notice for each part that a check did not judge. Notices on checkpoints that only the static
    rules have passed come first.
    """
    gates = [
        (report.checkpoint, checkpoint_gate(name, report)) for report in with_load_names(reports)
    ]
    unjudged = [
        _Annotation(
            level="notice",
            title=f"{name}: not judged",
            message=f"{report.checkpoint}: {each.brief}",
        )
        for report in reports
        if isinstance(report, CheckReport)
        for each in report.not_judged
    ]
    static = [
        _Annotation(
            level="notice",
            title=f"vexport {name} {outcome_line('PASS', '', STATIC_SCOPE)}",
            message=f"{report.checkpoint}: {reason}",
        )
        for report in reports
        if (reason := static_reason(report))
    ]
    ignored = [
        _Annotation(
            level="notice",
            title=f"{name}: {finding.rule} ignored",
            message=f"{report.checkpoint}: {finding}",
        )
        for report in reports
        if isinstance(report, CheckReport)
        for finding in report.ignored
    ]
    unjudged += ignored
    notes = [note for place, gate in gates for note in _of_gate(gate, place)]
    if not static and not notes and all(gate.status == "PASS" for _, gate in gates):
        checked = f"{plural(len(gates), 'checkpoint')} without an error or a warning"
        message = f"{checked}{check_target(reports[0])}"
        return _lines(
            _Annotation(level="notice", title=f"vexport {name} PASS", message=message), *unjudged
        )
    return _lines(*static, *_gravest_first((*notes, *unjudged)))


def _of_gate(gate: Gate, checkpoint: str = "") -> Iterator[_Annotation]:
    """Yield annotations for the gate's errors and warnings.

    If the gate did not pass and no finding is an error, the gate itself is yielded first.
    """
    prefix = f"{checkpoint}: " if checkpoint else ""
    if gate.status in ("FAIL", "INCONCLUSIVE") and not any(
        f.severity == "error" for f in gate.findings
    ):
        title = f"{gate.name} {gate.status}"
        yield _Annotation(level=_OF_STATUS[gate.status], title=title, message=prefix + gate.message)
    for kind in fold(gate.findings):
        if kind.first.severity != "info":
            level = _OF_SEVERITY[kind.first.severity]
            title = f"{gate.name}: {kind.first.rule or kind.first.check}"
            file, line = _place(checkpoint, kind.first)
            # A place that is a path already contains the checkpoint's folder.
            is_path = bool(checkpoint) and kind.first.where.startswith(checkpoint)
            message = str(kind.finding) if is_path else f"{prefix}{kind.finding}"
            yield _Annotation(level=level, title=title, message=message, file=file, line=line)


def _gravest_first(notes: Iterable[_Annotation]) -> list[_Annotation]:
    return sorted(notes, key=lambda note: _LEVELS.index(note.level))


def _lines(*annotations: _Annotation) -> str:
    """Return the first MAX_ANNOTATIONS annotations.

    A plain log line gives the number of the remaining annotations.
    """
    lines = [str(note) for note in annotations[:MAX_ANNOTATIONS]]
    if left_out := len(annotations) - len(lines):
        lines.append(f"{plural(left_out, 'more annotation')} left out; --format json has them all")
    return "".join(f"{line}\n" for line in lines)


def _place(checkpoint: str, finding: Finding) -> tuple[str, int]:
    """Return the file and line of a finding on `checkpoint`.

    The file is the first existing file of: the file in the finding, the index of the weights, the
    weight file, config.json. The file is "" if the checkpoint is not a folder in the workspace. The
    checkpoint's name may end in brackets that describe the load.
    """
    with suppress(OSError, ValueError):
        folders = (Path(name) for name in (checkpoint, checkpoint.rpartition(" (")[0]) if name)
        if root := next((folder for folder in folders if folder.is_dir()), None):
            name, _, key = finding.where.partition(": ")
            place = _IN_FILE.match(name)
            # A key or line may follow the name of a JSON file directly.
            if place is not None and not key:
                name, key = place["file"], place["key"]
            file = (
                _named_file(root, name)
                or _weights_file(root, finding.where)
                or root / "config.json"
            )
            return _in_workspace(file), int(key) if key.isdigit() else _line(file, key)
    return "", 1


def _in_workspace(file: Path) -> str:
    """Return a file relative to GITHUB_WORKSPACE, or "" outside of it.

    Without GITHUB_WORKSPACE, the current folder is used.
    """
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    absolute = file.absolute() if file.absolute().is_relative_to(workspace) else file.resolve()
    return absolute.relative_to(workspace).as_posix() if absolute.is_relative_to(workspace) else ""


def _named_file(root: Path, name: str) -> Path | None:
    """Return the file in a finding, or None if the checkpoint has no such file.

    `name` is absolute, or relative to the current folder or to the checkpoint's folder.
    """
    for path in (Path(name), root / name):
        with suppress(OSError, ValueError):
            if path.is_file() and path.resolve().is_relative_to(root.resolve()):
                return path
    return None


def _weights_file(root: Path, where: str) -> Path | None:
    """Return the index of the weights, or a weight file if there is no index.

    Returns None if `where` is not the name of a tensor or layer.
    """
    if "." not in where or "/" in where or " " in where.strip():
        return None
    files = (*root.glob("*.safetensors.index.json"), *sorted(root.glob("*.safetensors")))
    return next(iter(files), None)


def _line(file: Path, key: str) -> int:
    """Return the number of the line in a JSON file that has the last part of the key `key`.

    Returns 1 if the file is not JSON or has no such line.
    """
    if file.suffix != ".json" or not key:
        return 1
    quoted = json.dumps(key.split(" ")[0].rpartition(".")[2])
    try:
        with file.open("rb") as stream:
            lines = stream.read(_MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return 1
    return next((number for number, text in enumerate(lines, 1) if quoted in text), 1)
