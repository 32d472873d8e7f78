#!/usr/bin/env python
"""Disturb the real vLLM and every command that takes long, in each phase; write what came of it down.

    scripts/faults/run.py FOLDER                    # everything: an hour on two cores
    scripts/faults/run.py FOLDER --only SIGKILL     # rows whose name matches
    scripts/faults/run.py FOLDER --list             # the names of the rows

The engine is broken by a plug-in (`plugin.py`), commands by signals. The cells of a command are a chain: the
same call is disturbed in one phase after the other and goes on each time where it was; at last it goes on
undisturbed, and has to end with the result of a call that was never disturbed and with no answer asked twice.
Cells that held are not run again and stay as they are in the page. FOLDER keeps the undisturbed results and
the chains. It needs Linux with namespaces, and for the out-of-memory killer cgroups that this user may make.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

sys.path.extend(map(str, Path(__file__).resolve().parents[:2]))

from calling import CODES, FILLER, INTERRUPTED, ROOT, TEMPORARY, WORK, Ended, Place, Strike, isolated
from commands import COMMANDS, LEAN, TIMEOUT, fresh, write_lean
from page import LOST, MISSING, is_held, write_cells
from results import differences, kept_answers
from rows import ENGINES, HANG, LITTLE, PHASES, EngineRow

from vexport.engine.session import engines_share_imports
from vexport.types import Json

_SOON = 3.3  # three seconds, and what it takes to see it
SIGNALS = {
    f"`{name}`: {number.name}": (name, number)
    for name in COMMANDS
    if name not in ("plan", "lean run")
    for number in CODES
}
# A signal at any moment of a call, imports included; by then its handlers stand.
_FINISHED = re.compile("--overwrite")
_ANYWHERE, _HANDLERS_SECONDS = 2, 0.4
_ONCE = "compile kernels"  # a stage of the first call alone
_EMPTY_SECONDS = 10
_CGROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_LIMITS = "memory.limit_in_bytes", "memory.max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """What a call comes to: its result, its exit code, and the seconds of its stages."""

    result: Json
    code: int
    stages: Mapping[str, float]


class Laboratory:
    """A folder with what was measured, and the commands to disturb."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.place = Place(folder=self.folder)
        self.problems: list[str] = []
        plugin = self.folder / "plugin"
        metadata = plugin / "faults-1.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("plugin.py"), plugin / "vllm_faults.py")
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 1\n")
        os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{plugin}"
        (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nfaults = vllm_faults:register\n")

    def undisturbed(self, name: str) -> Undisturbed:
        """What the command comes to when nothing disturbs it; measured once."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            command, folder = COMMANDS[name], self.folder / "undisturbed" / name
            fresh(folder, command)
            ended = self.place.call(command.arguments(folder))
            if ended.errors or ended.left:
                print(f"{name}, undisturbed: exit {ended.code} {ended.errors} {ended.left}", file=sys.stderr)
            result = self._result(name, folder, ended)
            stages = dict(ended.stages)
            file.write_text(json.dumps({"result": result, "code": ended.code, "stages": stages}))
        found = json.loads(file.read_text())
        return Undisturbed(result=found["result"], code=found["code"], stages=found["stages"])

    def _result(self, name: str, folder: Path, ended: Ended) -> Json:
        text = json.dumps(COMMANDS[name].result(folder, ended))
        text = text.replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT")
        result: Json = json.loads(text)
        return result

    @contextmanager
    def limits(self, row: EngineRow, folder: Path) -> Iterator[None]:
        """A limit on memory for the calls inside the block, and afterwards room again on a full disk."""
        disk = {"out": folder, "temporary": TEMPORARY, "": None}[row.disk]
        if disk is not None:
            self.place.environment["VEXPORT_FAULT_DISK"] = str(disk / FILLER)
        try:
            with memory_group(row.memory) as group:
                self.place.memory = group
                yield
        finally:
            self.place.memory = None
            if disk is not None:
                (disk / FILLER).unlink(missing_ok=True)

    def _wrong_error(self, ended: Ended, row: EngineRow) -> Iterator[str]:
        """What is wrong with how a call met a fault."""
        if ended.code != 4:
            yield f"exit code {ended.code}"
        if len(ended.errors) != 1 or not re.search(row.words, ended.errors[0]):
            yield f"{len(ended.errors)} lines of errors: {' / '.join(ended.errors) or ended.stderr[-300:]}"
        if ended.seconds > row.within:
            yield f"{ended.seconds:.1f} s from the fault to the end"
        told = "".join(f"{ended.stdout}{ended.stderr}".split())  # names may be broken over two lines
        named = [name for name in ended.left if name in told]
        if left := [name for name in ended.left if name not in named]:
            yield f"left {left}"
        for name in named:  # logs of `load`, which the error or the answer names
            shutil.rmtree(TEMPORARY / name, ignore_errors=True)

    def _wrong_end(self, name: str, folder: Path, ended: Ended, expected: Undisturbed) -> Iterator[str]:
        """What is wrong with the call that is not disturbed any more."""
        if ended.code != expected.code:
            yield f"exit code {ended.code}, undisturbed {expected.code}: {ended.stderr[-300:]}"
            return
        yield from differences(expected.result, self._result(name, folder, ended), "result")
        for file, keys in kept_answers(folder).items():
            if len(set(keys)) < len(keys):
                yield f"{file}: {len(keys) - len(set(keys))} answers asked twice"
        if ended.errors or ended.left:
            yield f"{ended.errors} left {ended.left}"

    def _cell(self, name: str, ended: Ended, wrong: Sequence[str], word: str = "") -> str:
        for line in ended.errors:
            print(f"  {name}: exit {ended.code} after {ended.seconds:.1f} s: {line}", file=sys.stderr)
        if "Traceback" in ended.stderr:
            print(ended.stderr[-3000:], file=sys.stderr)
        for problem in wrong:
            self.problems.append(f"{name}: {problem}")
            print(f"  LOST {name}: {problem}", file=sys.stderr, flush=True)
        if wrong:
            return LOST
        return word or f"{ended.seconds:.1f} s"

    def signal_row(self, name: str, number: signal.Signals) -> tuple[str, str]:
        """How many stages a signal met, the longest time to the end; and what came of it at last."""
        expected = self.undisturbed(name)
        command, folder = COMMANDS[name], WORK / name
        fresh(folder, command)
        dice = random.Random(f"{name} {number}")
        seconds: list[float] = []
        lost = 0
        self.place.imports_anew = name in ("eval", "load")
        anywhere = [("", expected.stages[""])] * _ANYWHERE
        named = [stage for stage in expected.stages.items() if not stage[0].startswith(_ONCE)]
        for stage, lasts in (*anywhere, *named):
            earliest = 0.0 if stage else _HANDLERS_SECONDS
            after = earliest + dice.uniform(0, 0.8 * max(0, lasts - earliest))
            for attempt in range(3):  # where the call ends before the moment, begin again and sooner
                strike = Strike(stage=stage, number=number, after=after / 4**attempt)
                before = kept_answers(folder)
                ended = self.place.call(command.arguments(folder), strike=strike)
                if ended.struck:
                    break
                fresh(folder, command)
            wrong = [*_wrong_interruption(ended, number), *_lost_answers(before, kept_answers(folder))]
            self._cell(f"`{name}`, {number.name} in {stage!r} after {strike.after:.2f} s", ended, wrong)
            lost += bool(wrong)
            seconds.append(ended.seconds)
        ended = self.place.call(command.arguments(folder))
        if ended.code == 2 and _FINISHED.search(ended.stderr):  # the last signal came after the work was done
            ended = replace(ended, code=expected.code, stderr="")
        wrong = list(self._wrong_end(name, folder, ended, expected))
        self.place.imports_anew = False
        then = self._cell(f"`{name}` after {number.name}, at last", ended, wrong, "the same")
        return f"{len(seconds) - lost} of {len(seconds)}, {max(seconds):.1f} s", then

    def struck(self, name: str, row: EngineRow, phase: str) -> str:
        """The cell of a fault in a phase; the next call goes on where this one was."""
        command, folder = COMMANDS[row.command], self.disturbed(row.command, row.disk)
        if not folder.exists():
            fresh(folder, command)
        self.place.environment = dict(row.environment)
        self.place.imports_anew = bool(row.memory or row.environment)
        before = kept_answers(folder)
        if row.words == HANG:
            (folder / "scenario.yaml").write_text(LEAN.replace("TIMEOUT", str(TIMEOUT)))
        with self.limits(row, folder):
            ended = self.place.call(command.arguments(folder), fault=f"{row.fault}@{phase}")
        if row.words == HANG:
            write_lean(folder)
        if not ended.struck:
            print(f"  {name}, {phase}: the chain is past it; remove {folder}", file=sys.stderr)
            return MISSING
        wrong = [*self._wrong_error(ended, row), *_lost_answers(before, kept_answers(folder))]
        return self._cell(f"{name}, {phase}", ended, wrong)

    def disturbed(self, name: str, disk: str = "") -> Path:
        """Where a command is disturbed; what fills the disk of the results has a small one for that."""
        return (WORK if disk == "out" else self.folder / "disturbed") / name

    def at_last(self, name: str, disk: str = "") -> str:
        """What the call that was disturbed comes to when it goes on undisturbed."""
        folder = self.disturbed(name, disk)
        ended = self.place.call(COMMANDS[name].arguments(folder))
        wrong = list(self._wrong_end(name, folder, ended, self.undisturbed(name)))
        if not wrong:
            shutil.rmtree(folder)
        return self._cell(f"{name}, at last", ended, wrong, "the same")

    def unharmed(self, name: str, row: EngineRow) -> dict[str, str]:
        """A cell for each phase of a call that ends as ever though its engines have a fault in each."""
        expected = self.undisturbed(row.command)
        command, folder = COMMANDS[row.command], self.folder / "disturbed" / f"{row.command}, {row.fault}"
        fresh(folder, command)
        ended = self.place.call(command.arguments(folder), fault=f"{row.fault}@any")
        struck = [phase for phase, _ in self.place.strikes]
        cell = self._cell(name, ended, list(self._wrong_end(row.command, folder, ended, expected)), "held")
        return {phase: f"{cell}, {struck.count(phase)}x" for phase in PHASES if phase in struck}

    def little_row(self, title: str, name: str, gigabytes: float) -> dict[str, str]:
        """What a command with little memory says, and what the same call comes to with enough."""
        expected = self.undisturbed(name)
        command, folder = COMMANDS[name], WORK / name
        fresh(folder, command)
        self.place.imports_anew = True
        with memory_group(int(gigabytes * 2**30)) as self.place.memory:
            ended = self.place.call(command.arguments(folder))
        self.place.imports_anew, self.place.memory = False, None
        enough = ended.code == expected.code
        killed = ended.code == -signal.SIGKILL
        if enough or killed:  # who is killed leaves its folders, and no process
            left = [name for name in ended.left if enough or name.startswith("process")]
            wrong = [f"left {left}"] if left else []
        else:
            wrong = list(self._wrong_error(replace(ended, struck=True), EngineRow(fault="", words="memory")))
        cell = self._cell(
            title, ended, wrong, "enough" if enough else "killed by the kernel" if killed else "exit code 4"
        )
        if enough:
            return {"memory": cell, "then": MISSING}
        ended = self.place.call(command.arguments(folder))
        then = self._cell(
            f"{title}, at last", ended, list(self._wrong_end(name, folder, ended, expected)), "the same"
        )
        return {"memory": cell, "then": then}


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """A memory cgroup with a limit, as `systemd-run -p MemoryMax` makes one; None without a limit."""
    if not limit:
        yield None
        return
    root, name = next(
        (root, name) for root, name in zip(_CGROUPS, _LIMITS, strict=True) if (root / "cgroup.procs").exists()
    )
    group = root / f"vexport-faults-{os.getpid()}-{limit}"
    group.mkdir(exist_ok=True)  # of a call that was killed
    try:
        (group / name).write_text(str(limit))
        yield group
    finally:
        deadline = time.monotonic() + _EMPTY_SECONDS  # the kernel takes a while for what it has killed
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.rmdir()


def _wrong_interruption(ended: Ended, number: signal.Signals) -> Iterator[str]:
    """What is wrong with how a call met a signal."""
    if not ended.struck:
        yield "not struck"
        return
    if ended.code != CODES[number] and ended.errors:
        yield f"exit code {ended.code}"
    if ended.code == CODES[number] and (
        len(ended.errors) != 1 or not ended.errors[0].startswith(INTERRUPTED)
    ):
        yield f"{len(ended.errors)} lines of errors: {' / '.join(ended.errors) or ended.stderr[-300:]}"
    if ended.seconds > _SOON:
        yield f"{ended.seconds:.1f} s from the signal to the end"
    if ended.left:
        yield f"left {ended.left}"


def _lost_answers(before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> Iterator[str]:
    """Answers that a session had kept and that are gone."""
    for file, keys in before.items():
        if gone := set(keys) - set(after.get(file, [])):
            yield f"{file}: {len(gone)} of {len(keys)} answers are gone"


def main() -> int:
    """1 where a row does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="rows whose name matches")
    parser.add_argument("--phase", action="append", help="of these phases of an engine; repeatable")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    given = parser.parse_args()
    if given.list:
        print("\n".join([*ENGINES, *SIGNALS, *LITTLE]))
        return 0
    isolated()
    laboratory = Laboratory(given.folder)
    import vexport.cli.entry
    import vexport.run.comparing
    import vexport.run.evaluating
    import vexport.run.loading  # noqa: F401

    with engines_share_imports():
        _engines(laboratory, given.only, given.phase or PHASES)
        _commands(laboratory, given.only)
    print("\n".join(laboratory.problems) or "everything held", file=sys.stderr)
    return 1 if laboratory.problems else 0


def _engines(laboratory: Laboratory, only: str, phases: Sequence[str]) -> None:
    """Measure and write down the cells of engines whose row matches."""
    chosen = {title: row for title, row in ENGINES.items() if re.search(only, title)}
    for title, row in chosen.items():
        if not row.words and not is_held("engine", title, 0):
            write_cells("engine", title, laboratory.unharmed(title, row), PHASES)
    for phase, (title, row) in product(phases, chosen.items()):
        if row.words and phase in row.phases and not is_held("engine", title, PHASES.index(phase)):
            write_cells("engine", title, {phase: laboratory.struck(title, row, phase)}, PHASES)
    for row in chosen.values():
        if row.disk == "out" and laboratory.disturbed(row.command, row.disk).exists():
            laboratory.at_last(row.command, row.disk)
    for name in sorted({row.command for row in ENGINES.values()}):
        if re.search(only, title := f"`{name.removeprefix('lean ')}`: then undisturbed"):
            write_cells("engine", title, {PHASES[-1]: laboratory.at_last(name)}, PHASES)


def _commands(laboratory: Laboratory, only: str) -> None:
    """Measure and write down the rows of signals and of little memory that match."""
    for title, (name, number) in SIGNALS.items():
        if re.search(only, title) and not is_held("signals", title, 1):
            stages, then = laboratory.signal_row(name, number)
            write_cells("signals", title, {"stages": stages, "then": then}, ("stages", "then"))
    for title, (name, gigabytes) in LITTLE.items():
        if re.search(only, title) and not is_held("memory", title, 0):
            cells = laboratory.little_row(title, name, gigabytes)
            write_cells("memory", title, cells, ("memory", "then"))


if __name__ == "__main__":
    sys.exit(main())
