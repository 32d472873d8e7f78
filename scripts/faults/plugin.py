"""A plug-in of vLLM that breaks the engine it is loaded into: what a kernel, a driver or a library can do.

`scripts/faults/run.py` installs it for the commands it starts. $VEXPORT_FAULT is `fault@phase`, or
`fault+fault@any` for several in all phases. A strike is a line in $VEXPORT_FAULT_NOTE, with the time.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import SamplingParams

# Steps of the engine in a phase before the fault: some answers are given then, and others under way.
STEPS = {"start": 0, "canaries": 20, "log-probabilities": 1, "evaluation": 30}
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
GARBAGE = bytes(range(256)) + b"\x1b[2J\x1b]0;title\x07\x1b[31m\r" + b'\n["load", 1, 1]\n[[[\nnull\n'
_HELD: list[bytearray] = []
_FLOODED: set[str] = set()
_SEEN: Counter[str] = Counter()


def register() -> None:
    """Called by vLLM in every process of an engine."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    phase = ["start"]
    load, execute = CPUModelRunner.load_model, GPUModelRunner.execute_model

    def load_model(self: object, *arguments: object, **options: object) -> object:
        strike("start")
        return load(self, *arguments, **options)

    def execute_model(self: object, scheduled: object, *arguments: object, **options: object) -> object:
        for new in scheduled.scheduled_new_reqs:  # type: ignore[attr-defined]
            phase[0] = phase_of(new.sampling_params)
        strike(phase[0])
        return execute(self, scheduled, *arguments, **options)

    if not hasattr(CPUModelRunner, "is_broken"):
        CPUModelRunner.is_broken = True
        CPUModelRunner.load_model, GPUModelRunner.execute_model = load_model, execute_model


def phase_of(sampling: "SamplingParams") -> str:
    """The phase that asks like this (vexport/engine/generate.py); timing is an evaluation too."""
    prompt = sampling.prompt_logprobs
    if prompt is not None and (prompt < 0 or prompt > 20):
        return "log-probabilities"
    return "canaries" if sampling.ignore_eos and sampling.logprobs is not None else "evaluation"


def strike(phase: str) -> None:
    """Do what is asked for, once in a phase, when the phase has gone on for some steps."""
    fault, _, wanted = os.environ.get("VEXPORT_FAULT", "").partition("@")
    _SEEN[phase] += 1
    if not fault or wanted not in (phase, "any") or _SEEN[phase] != STEPS[phase] + 1:
        return
    with Path(os.environ["VEXPORT_FAULT_NOTE"]).open("a") as note:
        note.write(f"{phase} {time.monotonic()}\n")
    for name in fault.split("+"):
        FAULTS[name]()


def kill(number: signal.Signals) -> Callable[[], None]:
    """A signal to this process, as the kernel sends it."""

    def strike() -> None:
        os.kill(os.getpid(), number)

    return strike


def deadlock() -> None:
    """C code that waits for ever and holds Python's lock."""
    ctypes.PyDLL(None).sleep(3600)


def hang_at_the_end() -> None:
    """A thread, a device or another process that never answers when the engine is torn down."""
    from vllm.v1.engine.core_client import InprocClient

    InprocClient.shutdown = lambda self: deadlock()


def ask_too_much() -> None:
    """More than any machine has."""
    import torch

    torch.empty(1 << 60)


def use_up() -> None:
    """Take all that the limit on this process's address space leaves, and go on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    size = 16 << 20
    while size > 1 << 12:
        try:
            _HELD.append(bytearray(size))
        except MemoryError:
            size //= 2


def use_up_machine() -> None:
    """Take memory until the kernel ends a process of the group."""
    while True:
        block = bytearray(64 << 20)
        block[::4096] = b"x" * len(block[::4096])
        _HELD.append(block)


def scribble() -> None:
    """What no log should have, and a line that is longer than any buffer."""
    for stream in (1, 2):
        os.write(stream, GARBAGE)
    for _ in range(300):
        os.write(1, b"\x1b[1mx" * 200_000)
    os.write(1, b"\n")


def flood() -> None:
    """Lines without end, from now on."""

    def write() -> None:
        while True:
            os.write(1, b"WARNING the same line again and again\n" * 1000)
            time.sleep(0.002)

    threading.Thread(target=write, daemon=True).start()


def flood_progress() -> None:
    """Garbage without end in every pipe that this process can write to, from now on."""

    def write(descriptor: int) -> None:
        while True:
            os.write(descriptor, GARBAGE + b'["\\u001b[2J ' + b"x" * 100 + b'", 0, 3]\n')
            time.sleep(0.0005)

    for link in list(Path("/proc/self/fd").iterdir()):
        pipe = str(link.readlink()) if link.exists() else ""
        if int(link.name) > 2 and pipe.startswith("pipe:") and pipe not in _FLOODED:
            _FLOODED.add(pipe)
            descriptor = os.open(link, os.O_WRONLY)
            threading.Thread(target=write, args=(descriptor,), daemon=True).start()


def leave_children() -> None:
    """Processes that left the group and listen to nothing: with this environment, and without any."""
    environments: tuple[dict[str, str] | None, ...] = (None, {})
    for environment in environments:
        subprocess.Popen([sys.executable, "-c", DEAF], start_new_session=True, env=environment)


def fill() -> None:
    """The disk of $VEXPORT_FAULT_DISK has no room any more."""
    with Path(os.environ["VEXPORT_FAULT_DISK"]).open("wb", buffering=0) as filler, suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    filler.write(bytes(size))


def raise_error() -> None:
    """A bug of the engine."""
    raise RuntimeError("a kernel failed: \x1b[31mnot a number\x1b[0m")


FAULTS: dict[str, Callable[[], None]] = {
    "SIGSTOP": kill(signal.SIGSTOP),
    "deadlock": deadlock,
    "end": hang_at_the_end,
    "SIGKILL": kill(signal.SIGKILL),
    "SIGSEGV": kill(signal.SIGSEGV),
    "SIGABRT": kill(signal.SIGABRT),
    "SIGBUS": kill(signal.SIGBUS),
    "error": raise_error,
    "too much": ask_too_much,
    "address space": use_up,
    "OOM killer": use_up_machine,
    "garbage": scribble,
    "flood": flood,
    "progress": flood_progress,
    "fill": fill,
    "children": leave_children,
}
