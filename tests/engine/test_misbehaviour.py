"""The real vLLM, disturbed from outside in each phase: one error, in bounded time, and nothing is left."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copy
from types import SimpleNamespace

import pytest

from tests.engine.test_vllm import processes_of
from tests.packaging.environment import ROOT
from vexport.engine import process as process_module
from vexport.engine.forks import ADDRESS
from vexport.engine.messages import FailureKind
from vexport.engine.session import EngineFault
from vexport.engine.shared_memory import segments_of
from vexport.run import serving
from vexport.run.serving import EngineOptions, Questions, Served, serve_model
from vexport.scenario import Evaluate
from vexport.scenario.serve import Serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
MODEL, TASK = ROOT / "scenarios" / "demo" / "model", ROOT / "scenarios" / "demo" / "tasks" / "addition.yaml"
PHASES = ("load", "canaries", "logprobs", "addition")
SOON = 15.0
# Several batches of answers, and how long each is where they have to outlast a kill: a core is ahead of the
# client, which needs it no more when all have come.
MANY, TOKENS = 800, 400
GARBAGE = b'\x00\xff{"a":\n[1,2,3]\n["x"]\n' + b"[" * 100_000 + b"\nnull\n"


@dataclass(slots=True, kw_only=True)
class Disturber:
    """Does something to the processes of a session when a phase begins."""

    log: Path
    phase: str
    disturb: Callable[..., None]
    at: float = 0.0
    core: int = 0
    seen: set[str] = field(default_factory=set)
    segments: set[str] = field(default_factory=set)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Told of progress by the session."""
        name = stage.removeprefix("test: ")
        if name == self.phase and name not in self.seen:
            threading.Thread(target=self._strike).start()
        elif self.phase not in self.seen and self.disturb is kill_core:
            worker = worker_of(self.log)
            self.core = self.core or next(cores_of(worker), 0)
            self.segments |= segments_of(worker)
        self.seen.add(name)

    def _strike(self) -> None:
        if self.core:  # it was found in an earlier phase: this one may be short
            self.at = time.monotonic()
            os.kill(self.core, signal.SIGKILL)
            return
        worker = worker_of(self.log)
        while not (cores := [*cores_of(worker)]) and self.disturb is kill_core:
            time.sleep(0.01)
        self.segments |= segments_of(worker)
        self.at = time.monotonic()
        self.disturb(worker, *cores)


def worker_of(log: Path) -> int:
    """The process that leads the session's group."""
    numbers = [int(process.name) for process in processes_of(log)]
    # Of a test run that was started with setsid, this process leads a group too.
    return next(number for number in numbers if os.getpgid(number) == number != os.getpid())


def cores_of(worker: int) -> Iterator[int]:
    """The engine core, where it is a process of its own."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"EngineCor" in (process / "comm").read_bytes() and os.getpgid(int(process.name)) == worker:
                yield int(process.name)


def kill_core(worker: int, core: int) -> None:
    """As the kernel does where memory ends."""
    os.kill(core, signal.SIGKILL)


def crash_worker(worker: int, *core: int) -> None:
    """A bug in a kernel."""
    os.kill(worker, signal.SIGSEGV)


def kill_worker(worker: int, *core: int) -> None:
    """As the kernel does where memory ends."""
    os.kill(worker, signal.SIGKILL)


def freeze_worker(worker: int, *core: int) -> None:
    """A deadlock."""
    os.kill(worker, signal.SIGSTOP)


def serve(log: Path, disturber: Callable[[str, int, int], None], task: Path = TASK) -> Served:
    options = EngineOptions(
        serve=Serve(timeout=900), vllm_python=None, trust_remote_code=False, on_progress=disturber
    )
    questions = Questions(evaluate=Evaluate(tasks=(str(task),), limit=MANY))
    return serve_model("test", MODEL, log.parent, options, questions)


def long_task(folder: Path) -> Path:
    """The task with answers that do not end early."""
    text = TASK.read_text().replace("max_gen_toks: 8", f"max_gen_toks: {TOKENS}\n  min_tokens: {TOKENS}")
    copy(TASK.with_suffix(".jsonl"), folder)
    (folder / TASK.name).write_text(text)
    return folder / TASK.name


# What is done, in which phase, and how the error names it. A run with VEXPORT_EVERY_FAULT does all.
FAULTS: dict[Callable[..., None], tuple[FailureKind, ...]] = {
    # vLLM may name the core's end before it knows the signal
    kill_core: ("out of memory", "crashed"),
    freeze_worker: ("timed out",),
    crash_worker: ("crashed",),
    kill_worker: ("out of memory",),
}
SAMPLE = [(kill_worker, "load"), (freeze_worker, "canaries"), (crash_worker, "addition")]
EVERY = [(fault, phase) for fault in FAULTS for phase in PHASES]
CASES = EVERY if os.environ.get("VEXPORT_EVERY_FAULT") else SAMPLE


@pytest.mark.parametrize(("fault", "phase"), CASES)
def test_a_disturbed_engine_is_one_error(
    fault: Callable[..., None], phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "vllm.log"
    disturber = Disturber(log=log, phase=phase, disturb=fault)
    if fault is kill_core:  # on the CPU it is a process only where that is asked for
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        monkeypatch.delenv(ADDRESS, raising=False)
    if fault is freeze_worker:  # the clock is put forward instead of waiting for the timeout
        later = SimpleNamespace(
            monotonic=lambda: time.monotonic() + (900 if disturber.at else 0), sleep=time.sleep
        )
        monkeypatch.setattr(process_module, "time", later)
    with pytest.raises(EngineFault) as caught:
        serve(log, disturber, long_task(tmp_path) if fault is kill_core else TASK)
    print(f"{caught.value} after {time.monotonic() - disturber.at:.1f} s")
    assert time.monotonic() - disturber.at < SOON
    assert caught.value.exit_code == 4
    assert caught.value.failure.kind in FAULTS[fault]
    assert "\n" not in str(caught.value)
    assert_nothing_left(log, disturber)


def test_garbage_and_stray_children_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no progress is passed over, in every phase; a child that left the group ends as well."""
    monkeypatch.setattr(serving, "TASKS_WORKER", "tests.engine.straying")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    log = tmp_path / "vllm.log"

    def scribble(worker: int, *core: int) -> None:
        for pipe in Path(f"/proc/{worker}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed while we looked
                if str(pipe.readlink()).startswith("pipe:") and os.access(pipe, os.W_OK):
                    with pipe.open("wb", buffering=0) as stream:
                        stream.write(GARBAGE)
        with log.open("ab") as stream:
            stream.write(GARBAGE)

    disturbers = [Disturber(log=log, phase=phase, disturb=scribble) for phase in PHASES]

    def tell(stage: str, done: int, total: int) -> None:
        for disturber in disturbers:
            disturber(stage, done, total)

    served = serve(log, tell)
    assert served.result.failure is None
    assert served.result.tasks
    assert [disturber.phase for disturber in disturbers if not disturber.at] == []
    for disturber in disturbers:
        assert_nothing_left(log, disturber)


def assert_nothing_left(log: Path, disturber: Disturber) -> None:
    assert processes_of(log) == []
    assert [name for name in disturber.segments if (Path("/dev/shm") / name).exists()] == []
