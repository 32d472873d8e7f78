"""Sends a signal to a command at a moment, and looks at what is left of it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
RESUME = "error: Interrupted. Run the same command again to resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """How a command ended: `seconds` from the signal to the end, the files that it left in its TMPDIR."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    left: Sequence[str]

    @property
    def errors(self) -> list[str]:
        return re.findall("^error.*|.*(?:Traceback|Exception).*", self.stderr, re.MULTILINE)


def strike(
    arguments: Sequence[object],
    number: signal.Signals,
    delay: float,
    *,
    folder: Path,
    until: str = "",
    times: int = 1,
) -> Struck:
    """Start `vexport ARGUMENTS...` in a folder and send the signal `delay` seconds after its handlers stand.

    With `until` after a line on stderr that begins so; it is sent `times` times.
    """
    temporary = Path(tempfile.mkdtemp(prefix="struck-"))
    process = subprocess.Popen(
        [sys.executable, "-m", "vexport", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    await_handlers(process)
    read = _read_until(process, until) if until else ""
    time.sleep(delay)
    sent = time.perf_counter()
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.01 if times > 1 else 0)
    stdout, stderr = process.communicate(timeout=60)
    seconds = time.perf_counter() - sent
    left = leftovers(temporary)
    shutil.rmtree(temporary)
    return Struck(code=process.returncode, stdout=stdout, stderr=read + stderr, seconds=seconds, left=left)


def await_handlers(process: "subprocess.Popen[str]") -> None:
    """Until then it is Python that starts, and none of vexport's code."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        (caught,) = (line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.002)


def _read_until(process: "subprocess.Popen[str]", beginning: str) -> str:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith(beginning):
            break
    return "".join(lines)


def leftovers(temporary: Path) -> list[str]:
    """Processes that have the folder as TMPDIR, and what is in it, but for what torch keeps of compiling."""
    mark = f"TMPDIR={temporary}".encode()
    left = [f"process {process}" for process in Path("/proc").glob("[0-9]*") if _begins(process, mark)]
    files = sorted(path.name for path in temporary.iterdir())
    return left + [name for name in files if not name.startswith("torchinductor_")]


def _begins(process: Path, mark: bytes) -> bool:
    try:
        return any(entry.startswith(mark) for entry in (process / "environ").read_bytes().split(b"\0"))
    except OSError:
        return False
