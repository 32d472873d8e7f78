"""Calls vexport, disturbs it at a moment, and looks at what is left: run inside `isolated`."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from vexport.cli import main
from vexport.engine.forks import ADDRESS

ROOT = Path(__file__).resolve().parent.parent.parent
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
INTERRUPTED = "error: Interrupted"
INSIDE = "VEXPORT_FAULTS_ISOLATED"
# Small disks in memory, which nobody else sees: where disturbed commands write, their TMPDIR (short enough
# for vLLM's sockets), and shared memory.
WORK, TEMPORARY, SHARED_MEMORY = Path("/tmp/g"), Path("/tmp/f"), Path("/dev/shm")
_DISK_BYTES = 600 << 20
FILLER = "filler"
# A stage begins with `name ...` on stderr.
_BEGIN = re.compile(r"^(?P<stage>.+) \.\.\.$")
_LONGEST_SECONDS = 560.0
_POLL_SECONDS = 0.005
# What a killed vexport has started sees that its owner is gone, after an import that it may be in.
_ORPHANS_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A signal to vexport, `after` seconds into a stage, or after its start where the stage has no name."""

    stage: str
    number: signal.Signals
    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a call ended. `stages` has the seconds of each, `seconds` is from the strike to the end."""

    code: int
    stdout: str
    stderr: str
    stages: Mapping[str, float]
    struck: bool = False
    seconds: float = 0.0
    left: Sequence[str] = ()

    @property
    def errors(self) -> list[str]:
        """The lines of errors and tracebacks on stderr."""
        lines = self.stderr.splitlines()
        return [line for line in lines if line.startswith("error") or "Traceback" in line]


@dataclass(slots=True, kw_only=True)
class Place:
    """Where commands are called, with which limit on memory (a cgroup) and which environment.

    Calls are forks of this process, engines forks of one that has imported vLLM, as in one `vexport run`,
    unless each call `imports_anew`.
    """

    folder: Path
    memory: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    imports_anew: bool = False

    @property
    def note(self) -> Path:
        """Where the plug-in tells of its strikes."""
        return self.folder / "note"

    @property
    def strikes(self) -> list[tuple[str, float]]:
        """Phase and time of each strike of the plug-in in the last call."""
        lines = self.note.read_text().splitlines() if self.note.exists() else []
        return [(line.rpartition(" ")[0], float(line.rpartition(" ")[2])) for line in lines]

    def call(
        self,
        arguments: Sequence[object],
        *,
        fault: str = "",
        strike: Strike | None = None,
        watch: object = None,
    ) -> Ended:
        """`vexport ARGUMENTS...`, with a fault of the plug-in or struck by a signal."""
        self.note.unlink(missing_ok=True)
        before = set(processes())
        process, out, err = self._start(arguments, fault)
        watched = _Watched(process, err, strike)
        code = watched.wait()
        ended = time.monotonic()
        struck = watched.struck or max((moment for _, moment in self.strikes), default=0.0)
        time.sleep(0.1)
        if code == -signal.SIGKILL:
            deadline = time.monotonic() + _ORPHANS_SECONDS
            while processes().keys() - before and time.monotonic() < deadline:
                time.sleep(0.1)
        left = [*leftover_processes(before), *leftover_files(TEMPORARY), *leftover_memory()]
        result = Ended(
            code=code,
            stdout=out.read_text(errors="replace"),
            stderr=err.read_text(errors="replace"),
            stages=watched.seconds(ended),
            struck=bool(struck),
            seconds=ended - struck if struck else 0.0,
            left=left,
        )
        for name in leftover_memory():
            (SHARED_MEMORY / name).unlink()
        for name in leftover_files(TEMPORARY):  # logs that an error names among them
            path = TEMPORARY / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        return result

    def _start(self, arguments: Sequence[object], fault: str) -> tuple["Process", Path, Path]:
        out, err = self.folder / "stdout", self.folder / "stderr"
        environment = {
            **os.environ,
            "TMPDIR": str(TEMPORARY),
            "VEXPORT_FAULT_NOTE": str(self.note),
            "VEXPORT_FAULT": fault,
            **self.environment,
        }
        if self.imports_anew:
            environment.pop(ADDRESS, None)
        command = [sys.executable, "-m", "vexport", *map(str, arguments)]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            if not self.imports_anew:
                return (
                    _Fork(command[2:], environment, self.folder, (stdout.fileno(), stderr.fileno())),
                    out,
                    err,
                )
            if self.memory is not None:  # as `systemd-run -p MemoryMax` does
                command = ["sh", "-c", f'echo $$ > "{self.memory}/cgroup.procs"; exec "$@"', "sh", *command]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )
        return process, out, err


class Process(Protocol):
    """A call under way, as subprocess.Popen has it."""

    @property
    def pid(self) -> int:
        """Its number, and that of its group."""

    def poll(self) -> int | None:
        """Its exit code if it has ended, negative for a signal."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal."""


class _Fork:
    """`vexport ARGUMENTS...` in a fork of this process, which has imported what every command imports."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, streams: tuple[int, int]
    ) -> None:
        self._code: int | None = None
        sys.stderr.flush()
        if child := os.fork():
            self.pid = child
            return
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        tempfile.tempdir = None
        sys.argv = [*arguments]
        main()

    def poll(self) -> int | None:
        """Its exit code if it has ended, negative for a signal."""
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def send_signal(self, sig: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, sig)


class _Watched:
    """A call under way: the stages that it tells of, and the signal that it gets."""

    def __init__(self, process: Process, err: Path, strike: Strike | None) -> None:
        self._process, self._err, self._strike = process, err, strike
        self._began: list[tuple[str, float]] = []
        self._start = time.monotonic()
        self.struck = 0.0

    def wait(self) -> int:
        """Its exit code; -1000 where it had to be ended."""
        deadline = time.monotonic() + _LONGEST_SECONDS
        with self._err.open(encoding="utf-8", errors="replace") as lines:
            while (code := self._process.poll()) is None:
                for line in lines:
                    self._told(line.rstrip())
                if self._strike is not None and not self._strike.stage and not self.struck:
                    self._send(self._strike)
                if time.monotonic() > deadline:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    return -1000
                time.sleep(_POLL_SECONDS)
            for line in lines:
                self._told(line.rstrip())
        return code

    def _told(self, line: str) -> None:
        if (stage := _BEGIN.match(line)) is None:
            return
        self._began.append((stage["stage"], time.monotonic()))
        if self._strike is not None and stage["stage"] == self._strike.stage and not self.struck:
            self._send(self._strike)

    def _send(self, strike: Strike) -> None:
        time.sleep(strike.after)
        if self._process.poll() is None:
            self.struck = time.monotonic()
            self._process.send_signal(strike.number)

    def seconds(self, ended: float) -> Mapping[str, float]:
        """How long each stage took: until the next one began."""
        moments = [*(moment for _, moment in self._began), ended]
        lasts = {name: end - begin for (name, begin), end in zip(self._began, moments[1:], strict=True)}
        return {"": ended - self._start, **lasts}


def processes() -> dict[int, str]:
    """Every process that lives, with its command line."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                found[int(process.name)] = (
                    (process / "cmdline").read_text(errors="replace").replace("\0", " ")
                )
        except OSError:
            continue
    return found


def leftover_processes(before: set[int]) -> list[str]:
    """What runs now and did not before; it is ended."""
    left = {number: name for number, name in processes().items() if number not in before}
    for number in left:
        os.kill(number, signal.SIGKILL)
    return [f"process {name[:60]}" for name in left.values()]


def leftover_files(temporary: Path) -> list[str]:
    """What is in the TMPDIR, but for what torch keeps of compiling; vexport's folders are removed."""
    return sorted(
        path.name for path in temporary.iterdir() if not path.name.startswith(("torchinductor_", FILLER))
    )


def leftover_memory() -> list[str]:
    """Shared memory of nobody: /dev/shm is ours alone."""
    return sorted(path.name for path in SHARED_MEMORY.iterdir())


def isolated() -> None:
    """Go on in namespaces with processes and small disks that nobody else has."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if INSIDE in os.environ:
        return
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    unshare += [] if os.geteuid() == 0 else ["--map-root-user"]
    mounts = [
        f"mkdir -p {disk} && mount -t tmpfs -o size={_DISK_BYTES} faults {disk} && "
        for disk in (WORK, TEMPORARY, SHARED_MEMORY)
    ]
    inside = ["sh", "-c", f'{"".join(mounts)} "$@"; exit $?', "sh", sys.executable, *sys.argv]
    os.execvpe("unshare", [*unshare, *inside], {**os.environ, INSIDE: "1"})
