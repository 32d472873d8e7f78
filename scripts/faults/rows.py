"""The rows of the tables: what is done to an engine, and how vexport has to say so."""

from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("start", "canaries", "log-probabilities", "evaluation")
SIZES = (0.25, 0.5, 1, 2)
CORE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """A fault of the plug-in: `words` is what the error has to say; without, the answer has to stand.

    `within` are the seconds from the fault to the end; `memory` is the limit of the kernel in bytes, `disk`
    what is filled.
    """

    fault: str
    words: str = ""
    within: float = 8.0
    command: str = "lean run"
    environment: Mapping[str, str] = field(default_factory=dict)
    phases: tuple[str, ...] = PHASES
    memory: int = 0
    disk: str = ""


HANG, MEMORY, SPACE = "timed out: not finished after 30 s", "out of memory", "no space"
CRASH = "crashed"
ENGINES: Mapping[str, EngineRow] = {
    "hangs: SIGSTOP": EngineRow(fault="SIGSTOP", words=HANG, within=75),
    "hangs: C code that holds Python's lock": EngineRow(fault="deadlock", words=HANG, within=75),
    "hangs: the core, a process of its own": EngineRow(
        fault="SIGSTOP", words=HANG, within=75, environment=CORE
    ),
    "dies: SIGKILL": EngineRow(fault="SIGKILL", words=MEMORY),
    "dies: SIGSEGV": EngineRow(fault="SIGSEGV", words=f"{CRASH}.*SIGSEGV"),
    "dies: SIGABRT": EngineRow(fault="SIGABRT", words=f"{CRASH}.*SIGABRT"),
    "dies: SIGBUS": EngineRow(fault="SIGBUS", words=f"{CRASH}.*SIGBUS"),
    "dies: SIGKILL of the core": EngineRow(fault="SIGKILL", words=f"{MEMORY}|{CRASH}", environment=CORE),
    "dies: SIGSEGV of the core": EngineRow(fault="SIGSEGV", words=CRASH, environment=CORE),
    # Raised while a model is loaded it is the refusal of that model.
    "raises an error": EngineRow(fault="error", words="crashed.*a kernel failed", phases=PHASES[1:]),
    "memory: an allocation fails": EngineRow(fault="too much", words=MEMORY),
    "memory: its address space is used up": EngineRow(fault="address space", words=MEMORY),
    "memory: the kernel kills it": EngineRow(fault="OOM killer", words=MEMORY, within=20, memory=4 << 30),
    "disk: that of the run directory is full": EngineRow(fault="fill", words=SPACE, disk="out"),
    "disk: that of TMPDIR is full": EngineRow(fault="fill", words=SPACE, disk="temporary"),
    "prints garbage without end, also into vexport's pipe, and leaves deaf children": EngineRow(
        fault="garbage+flood+progress+children"
    ),
}
# Rows of other commands: a session of theirs is the same, what is made of its end is not.
ENGINES = {
    **{f"`run`: {name}": row for name, row in ENGINES.items()},
    "`eval`: dies: SIGKILL": EngineRow(fault="SIGKILL", words=MEMORY, command="eval"),
    "`eval`: dies: SIGSEGV": EngineRow(fault="SIGSEGV", words=f"{CRASH}.*SIGSEGV", command="eval"),
    "`load`: dies: SIGKILL": EngineRow(fault="SIGKILL", words=MEMORY, command="load", phases=PHASES[:3]),
    "`load`: dies: SIGSEGV": EngineRow(
        fault="SIGSEGV", words=f"{CRASH}.*SIGSEGV", command="load", phases=PHASES[:3]
    ),
    "`load`: hangs when it has answered": EngineRow(fault="end", command="load"),
    "`compare`: dies: SIGSEGV": EngineRow(fault="SIGSEGV", words=f"{CRASH}.*SIGSEGV", command="compare"),
}
# Gigabytes that a command has, and the commands that get no more: `plan` imports no torch, the others do.
LITTLE = {
    f"`{name}` with {size} GB": (name, size)
    for name in ("plan", "quantize", "load", "eval")
    for size in SIZES
}
