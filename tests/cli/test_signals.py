"""SIGINT, SIGTERM and SIGHUP at any moment of every command: one line, an exit code, soon, nothing left."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.striking import CODES, FINISHED, INTERRUPTED, RESUME, Struck, strike
from tests.packaging.environment import ROOT
from tests.packaging.test_commands import CALLS, folder
from tests.quantize.test_streaming import write_model

__all__ = ["folder"]
# Three, and what a busy machine adds.
SOON = 6.0
THREADS = "current_thread = main_thread = lambda: None\n"
# Calls that start a vLLM: the signal comes before its engine stands.
MODEL, TASK = ROOT / "scenarios" / "demo" / "model", ROOT / "scenarios" / "demo" / "tasks" / "addition.yaml"
EVAL = ("eval", MODEL, "--baseline", MODEL, "--task", TASK, "--limit", "20")
ENGINE = ("run", "load", "eval")
ANY_COMMAND = pytest.mark.fault("a signal to any command: one line, exit code 130 or 143, nothing left")
SWALLOWED = pytest.mark.fault(
    "a signal that Python or an import swallows: raised again, or ended after 2.5 s"
)


def line_of(name: object) -> str:
    """The one line of a command that was interrupted: only some go on where they were."""
    return RESUME if name in ("compare", "eval", "quantize", "run") else INTERRUPTED


def assert_interrupted(struck: Struck, number: signal.Signals, name: object = "quantize") -> None:
    """One line and the code of the signal, or the command was quicker than the signal."""
    assert struck.left == []
    if struck.errors or struck.code in CODES.values():
        assert (struck.code, struck.errors) in [
            (CODES[number], [line]) for line in (line_of(name), FINISHED)
        ], struck
        assert struck.seconds < SOON


@pytest.mark.parametrize(
    ("name", "arguments"),
    [(name, arguments) for name, calls in CALLS.items() for arguments, _ in calls if name not in ENGINE],
)
@ANY_COMMAND
def test_a_signal_ends_every_command(
    name: str, arguments: Sequence[object], folder: Path, tmp_path: Path
) -> None:
    """While it imports, or in the middle, by turns; every command has a call by another test."""
    moments = random.Random(f"{name} {arguments}")
    number, latest = moments.choice(list(CODES)), moments.choice((0.0, 0.2, 0.8))
    struck = strike((name, *arguments), number, moments.uniform(0, latest), folder=folder)
    assert_interrupted(struck, number, name)


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@ANY_COMMAND
def test_a_signal_at_any_moment_is_one_line(number: signal.Signals, tmp_path: Path) -> None:
    """Before the first byte, in the middle; the same command then completes."""
    source = write_model(tmp_path / "source", hidden=1024, layers=4)
    command = ("quantize", source, tmp_path / "out", "--scheme", "W8A8", "--quiet")
    moments = random.Random(int(number))
    for delay in (0.0, moments.uniform(0, 0.3), moments.uniform(0.3, 1.5)):
        struck = strike(command, number, delay, folder=tmp_path)
        assert_interrupted(struck, number)
    if not (tmp_path / "out").exists():
        again = [sys.executable, "-m", "vexport", *map(str, command)]
        assert subprocess.run(again, capture_output=True, timeout=60, check=False).returncode == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@ANY_COMMAND
def test_many_signals_are_as_one(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", hidden=1024, layers=4)
    command = ("quantize", source, tmp_path / "out", "--scheme", "W8A8")
    struck = strike(command, signal.SIGINT, 0, folder=tmp_path, times=5)
    assert_interrupted(struck, signal.SIGINT)
    assert (struck.code, struck.errors) == (130, [RESUME])


@pytest.mark.parametrize(
    "module", ["os.kill(os.getpid(), 2)", f"{THREADS}Thread = lambda **options: os.kill(os.getpid(), 2)"]
)
@ANY_COMMAND
def test_a_signal_before_the_handlers_stand_is_one_line(tmp_path: Path, module: str) -> None:
    """In the first import of all and after it, by a module of a name which comes before Python's own."""
    (tmp_path / "threading.py").write_text(f"import os\n{module}\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from vexport.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (130, f"{INTERRUPTED}\n")


# What Python does with an exception there is to print and forget it.
DEAF = {
    "destructor": "class Busy:\n    def __del__(self):\n        work()\nBusy()",
    "callback": "import ctypes\nctypes.CFUNCTYPE(None)(work)()",
    "import": "try:\n    work()\nexcept BaseException:\n    pass",
}


@pytest.mark.parametrize("code", DEAF.values(), ids=DEAF)
@SWALLOWED
def test_an_exception_that_is_lost_comes_again(code: str) -> None:
    """Sooner than the process is ended by force, and without Python's report of it."""
    ran = _with_handlers(
        "import time\n"
        "def work():\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        f"{code}\n"
        "for _ in range(600):\n"
        "    time.sleep(0.1)\n",
        signal.SIGTERM,
    )
    assert ran == (143, INTERRUPTED)


@SWALLOWED
def test_a_module_that_is_being_made_is_not_broken_off() -> None:
    """C++ that makes a module aborts the process where an exception meets it: it comes after the module."""
    module = (
        "import os, time\n"
        "print('ready', flush=True)\n"
        "end = time.monotonic() + 0.5\n"
        "try:\n"
        "    while time.monotonic() < end:\n"
        "        pass\n"
        "except BaseException:\n"
        "    os._exit(9)\n"
    )
    assert _with_handlers(f"import time\nexec({module!r})\ntime.sleep(60)", signal.SIGTERM) == (
        143,
        INTERRUPTED,
    )


@SWALLOWED
def test_what_hears_nothing_ends_all_the_same() -> None:
    """Python code waits for what runs in C, or cleans up without an end: the process is ended."""
    ran = _with_handlers(
        "import ctypes, time\n"
        "print('ready', flush=True)\n"
        "try:\n"
        "    time.sleep(60)\n"
        "finally:\n"
        "    ctypes.PyDLL(None).sleep(1)\n"
        "    while True:\n"
        "        ctypes.CDLL(None).usleep(999_999)\n",
        signal.SIGTERM,
    )
    assert ran == (143, INTERRUPTED)


@SWALLOWED
def test_a_signal_between_the_command_and_its_end_is_one_line() -> None:
    """The first instruction after the command has returned gets it."""
    main = (
        "import os, signal, sys\n"
        "from vexport.cli import interrupts, entry\n"
        "entry.run_command = lambda interrupted: 0\n"
        "def trace(frame, event, argument):\n"
        "    if frame.f_code.co_name == 'finish':\n"
        "        sys.settrace(None)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return trace\n"
        "sys.settrace(trace)\n"
        "interrupts.run_to_exit()\n"
    )
    ran = subprocess.run([sys.executable, "-c", main], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr.splitlines()) == (143, [FINISHED])


def _with_handlers(code: str, number: signal.Signals) -> tuple[int, str]:
    """The exit code and the stderr of code that a signal meets when it has said `ready`."""
    body = "\n".join(f"    {line}" for line in code.splitlines())
    main = (
        "import sys\n"
        "from vexport.cli import interrupts, entry\n"
        f"def command(interrupted):\n{body}\n"
        "entry.run_command = command\n"
        "interrupts.run_to_exit()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", main], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=SOON + 4)
    return process.returncode, stderr.strip()


@pytest.mark.parametrize(
    "arguments", [("load", MODEL), ("load", "--dry", MODEL), EVAL], ids=["load", "dry", "eval"]
)
@pytest.mark.fault("a signal while vLLM is imported: its processes and folders go too")
def test_a_signal_while_vllm_is_imported(arguments: Sequence[object], tmp_path: Path) -> None:
    """The worker, what it has started and its folders go too."""
    moments = random.Random(str(arguments))
    number = moments.choice(list(CODES))
    struck = strike(arguments, number, moments.uniform(1, 4), folder=tmp_path)
    assert_interrupted(struck, number, arguments[0])
    assert struck.errors == [line_of(arguments[0])], struck


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "stage", "number"),
    [
        (("load", MODEL), "load model: canaries", signal.SIGHUP),
        (EVAL, "baseline: addition", signal.SIGINT),
    ],
)
@pytest.mark.fault("a signal while vLLM works: its processes and folders go too")
def test_a_signal_while_vllm_works(
    arguments: Sequence[object], stage: str, number: signal.Signals, tmp_path: Path
) -> None:
    struck = strike(arguments, number, 0.02, folder=tmp_path, until=f"{stage} ...")
    assert_interrupted(struck, number, arguments[0])
    assert struck.errors == [line_of(arguments[0])]
