"""Measure time and memory of a command.

As a script, it runs a vexport command and prints its seconds without imports:

    .venv/bin/python scripts/bench/measure.py quantize MODEL OUT --scheme W4A16 ...

The last line of stdout is then `{"seconds": ..., "cpu": ...}`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = ROOT / "scenarios" / "demo"
PEER = ROOT / ".venv-peer" / "bin" / "python"
OWN = (sys.executable, __file__)


@dataclass(slots=True, kw_only=True)
class Ran:
    """Time, memory and stdout of a process.

    `seconds` is the wall time, `cpu` the processor time in seconds. `megabytes` is the largest
    resident set.
    """

    seconds: float = 0
    cpu: float = 0
    megabytes: float = 0
    text: str = ""

    @property
    def answer(self) -> Any:
        """Return the JSON in the last line of stdout."""
        return json.loads(self.text.splitlines()[-1])

    def watch(self, pid: int) -> None:
        """Follow the resident set of a process until it ends.

        wait4 would also count the memory of the parent process.
        """
        while peak := resident_mb("VmHWM", pid):
            self.megabytes = max(self.megabytes, peak)
            time.sleep(0.005)


def timed(*command: object) -> Ran:
    """Run a command that must succeed, after a sync."""
    os.sync()
    ran, start = Ran(), time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        watch = Thread(target=ran.watch, args=(process.pid,))
        watch.start()
        ran.text = process.stdout.read().decode()
        watch.join()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(
                f"{command[0]}: exit {process.returncode}\n{log.read().decode()[-2000:]}"
            )
    ran.seconds, ran.cpu = time.perf_counter() - start, usage.ru_utime + usage.ru_stime
    return ran


def resident_mb(line: str, pid: int | str = "self") -> float:
    """Return the resident memory of a process in MB: VmRSS now, VmHWM at its peak.

    It is 0 if the process has ended.
    """
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(
        (int(each.split()[1]) * 1024 / 1e6 for each in lines if each.startswith(f"{line}:")), 0.0
    )


def spent(call: Callable[[], object]) -> dict[str, float]:
    """Return the seconds and processor seconds of a call."""
    start, cpu = time.perf_counter(), time.process_time()
    call()
    return {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def random_llama(folder: Path, **sizes: object) -> Path:
    """Return a Llama of random bf16 weights with the demo's tokenizer.

    It is written unless it exists.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, dtype=torch.bfloat16)).to(torch.bfloat16)
        model.save_pretrained(folder)
        for file in (DEMO / "model").glob("tokenizer*"):
            shutil.copyfile(file, folder / file.name)
    return folder


def main(arguments: list[str]) -> None:
    import vexport.quantize.job  # noqa: F401
    from vexport.cli.entry import cli

    if "--calibration" in arguments:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    print(json.dumps(spent(partial(cli.main, arguments, standalone_mode=False))))


if __name__ == "__main__":
    main(sys.argv[1:])
