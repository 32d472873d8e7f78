"""Time and memory of a command; run as a script, the seconds of one command of vexport without its imports.

    .venv/bin/python scripts/bench/measure.py quantize MODEL OUT --scheme W4A16 ...

The last line of stdout is then `{"seconds": ..., "cpu": ...}`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PEER = ROOT / ".venv-peer" / "bin" / "python"
OWN = (sys.executable, __file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Seconds and processor seconds of a process, its largest resident set in MB, its stdout."""

    seconds: float
    cpu: float
    megabytes: float
    text: str

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON in the last line of stdout."""
        return dict(json.loads(self.text.splitlines()[-1]))


def timed(*command: object) -> Ran:
    """Run a command that must succeed, after a sync."""
    os.sync()
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        with ThreadPoolExecutor(1) as other:
            peak = other.submit(largest_resident, process.pid)
            text = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{command[0]}: exit {process.returncode}\n{log.read().decode()[-2000:]}")
    seconds, cpu = time.perf_counter() - start, usage.ru_utime + usage.ru_stime
    return Ran(seconds=seconds, cpu=cpu, megabytes=peak.result(), text=text)


def largest_resident(pid: int) -> float:
    """The largest resident set of a process, MB, once it has ended; that of wait4 counts its parent's too."""
    found = 0.0
    while True:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        peak = [float(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")]
        if not peak:
            return found
        found = max(found, *peak)
        time.sleep(0.005)


def run_own(arguments: Sequence[str]) -> None:
    import vexport.quantize.job  # noqa: F401
    from vexport.cli.entry import cli

    if "--calibration" in arguments:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    start, cpu = time.perf_counter(), time.process_time()
    cli.main(list(arguments), standalone_mode=False)
    print(json.dumps({"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}))


if __name__ == "__main__":
    run_own(sys.argv[1:])
