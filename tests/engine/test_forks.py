"""Workers that are forks of one process: like new processes but for the imports; nothing of them is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.engine.test_process import gone
from vexport.engine.forks import ADDRESS, Server, forked, shared_imports
from vexport.engine.process import Leader, run_group, spawned
from vexport.engine.session import NO_EMULATION, worker_environment
from vexport.types import silent

# Writes who runs it to the file that it is given, then does as the second argument says.
WORKER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
imported = 0

def preload():
    global imported
    imported += 1
    if "VEXPORT_NO_PRELOAD" in os.environ:
        raise ImportError

def main(arguments):
    file, what = arguments
    child = subprocess.Popen(["sleep", "60"]).pid if what == "sleep" else 0
    variable = os.environ.get("VEXPORT_SEEN")
    seen = [os.getpid(), os.getpgid(0), os.getppid(), imported, sys.argv, variable, child]
    Path(file + ".new").write_text(json.dumps(seen))
    os.rename(file + ".new", file)
    print("hello")
    if what == "sleep":
        from vexport.engine.worker import end_with_parent
        end_with_parent()
        time.sleep(60)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return 7

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """One in which `a_worker` is a module; no server is there yet."""
    monkeypatch.delenv(ADDRESS, raising=False)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "a_worker.py").write_text(WORKER)
    repository = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path / "modules"), repository))}


@pytest.fixture
def shared(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """A server with that environment."""
    with shared_imports({"engines": environment}):
        assert ADDRESS in os.environ
        yield environment


def work(folder: Path, environment: dict[str, str], what: str = "end", timeout: float = 30) -> int:
    """Run `a_worker` and return its exit code."""
    arguments = [str(folder / "seen"), what]
    otherwise = spawned([sys.executable, "-m", "a_worker", *arguments])
    return run_group(
        forked("a_worker", arguments, otherwise, timeout),
        environment=environment,
        log=folder / "log",
        timeout=timeout,
        on_progress=silent,
    )


def seen(folder: Path) -> list[object]:
    """[own number, group, parent, preloads, argv, $VEXPORT_SEEN, child] of the last worker."""
    read: list[object] = json.loads((folder / "seen").read_text())
    return read


def test_each_is_a_fork_that_leads_its_group(tmp_path: Path, shared: dict[str, str]) -> None:
    parents = set()
    for number in range(2):
        assert work(tmp_path, {**shared, "VEXPORT_SEEN": str(number)}) == 7
        pid, group, parent, preloads, argv, variable, _ = seen(tmp_path)
        assert (pid, preloads, variable) == (group, number + 1, str(number))
        assert argv == ["a_worker", str(tmp_path / "seen"), "end"]
        assert (tmp_path / "log").read_text() == "hello\n"
        parents.add(parent)
    assert len(parents) == 1
    assert os.getpid() not in parents


def test_a_signal_is_its_exit_code_and_the_server_lives_on(tmp_path: Path, shared: dict[str, str]) -> None:
    assert work(tmp_path, shared, "die") == -signal.SIGKILL
    assert work(tmp_path, shared) == 7
    assert seen(tmp_path)[2] != os.getpid()


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "HF_HOME"])
def test_another_environment_is_another_process(
    tmp_path: Path, shared: dict[str, str], variable: str
) -> None:
    assert work(tmp_path, {**shared, variable: "3"}) == 7
    assert seen(tmp_path)[2] == os.getpid()


def test_where_imports_fail_a_new_process_says_so(tmp_path: Path, environment: dict[str, str]) -> None:
    with shared_imports({"engines": {**environment, "VEXPORT_NO_PRELOAD": "1"}}):
        assert work(tmp_path, environment) == 7
        assert seen(tmp_path)[2] == os.getpid()


def test_a_late_one_is_ended_with_its_children(tmp_path: Path, shared: dict[str, str]) -> None:
    with pytest.raises(TimeoutError):
        work(tmp_path, shared, "sleep", timeout=3)
    pid, child = seen(tmp_path)[0], seen(tmp_path)[-1]
    assert isinstance(pid, int)
    assert isinstance(child, int)
    assert gone(pid)
    assert gone(child)
    assert work(tmp_path, shared) == 7


def test_an_owner_that_is_killed_leaves_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    script = (
        "import os; from pathlib import Path; from tests.engine.test_forks import work, shared_imports\n"
        "with shared_imports({'engines': os.environ}): "
        f"work(Path({str(tmp_path)!r}), dict(os.environ), 'sleep')"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], env={**environment, "TMPDIR": str(tmp_path)})
    while not (tmp_path / "seen").exists():
        assert owner.poll() is None
        time.sleep(0.05)
    owner.kill()
    owner.wait()
    pid, _, server, *_, child = seen(tmp_path)
    assert server != owner.pid
    for number in (pid, server, child):
        assert isinstance(number, int)
        assert gone(number)
    assert not list(tmp_path.glob("vexport-engines-*"))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("module", "server"),
    [
        ("vexport.engine.worker", "engines"),
        ("vexport.engine.arguments_worker", "engines"),
        ("vexport.evaluation.worker", "engines"),
        ("vexport.evaluation.task_data_worker", "engines"),
        ("vexport.engine.dry.worker", "dry"),
    ],
)
def test_every_worker_can_be_a_fork(module: str, server: Server, tmp_path: Path) -> None:
    """No preload fails: where one does, a new process does the work, and only time tells."""
    request = str(tmp_path / "request.json")

    def new_process(environment: Mapping[str, str], log: int, progress: int) -> Leader:
        raise AssertionError(module)

    run_group(
        forked(module, [request, str(tmp_path / "result.json")], new_process, 300, server),
        environment=worker_environment() | (NO_EMULATION if server == "dry" else {}),
        log=tmp_path / "log",
        timeout=300,
        on_progress=silent,
    )
    assert f"InputError: {request}: got no such file" in (tmp_path / "log").read_text()
