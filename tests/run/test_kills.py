"""`run` and `eval` are ended three times in different stages.

Then they resume to the same report.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from tests.command import ROOT, vexport
from vexport.records import Json

DEMO = ROOT / "scenarios" / "demo"
TASK = DEMO / "tasks" / "addition.yaml"
LIMIT = 200
pytestmark = [pytest.mark.vllm, pytest.mark.slow]
# Program that runs a command. Its workers are forked from processes of this test session.
PROGRAM = """
import sys
from pathlib import Path
from tests.engine.warm import Warm
from vexport.engine import session
session.started_process_group = Warm(Path(sys.argv.pop(1))).started_process_group
from vexport.cli import main
main()
"""
# Keys of a report that have times as values, and times inside other values.
TIME_KEYS = re.compile(r"seconds|created")
TIMESTAMP = re.compile(r"\d{4}-\d{2}-\d{2}T[\d:.+-]+")
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}
Moment = tuple[signal.Signals, Callable[[Path], bool]]


def has_file(pattern: str) -> Callable[[Path], bool]:
    return lambda folder: any(folder.glob(pattern))


def has_content(pattern: str) -> Callable[[Path], bool]:
    return lambda folder: any(file.stat().st_size for file in folder.glob(pattern))


@pytest.fixture(scope="module")
def warm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the fixture `warm` in tests/conftest.py."""
    root = tmp_path_factory.getbasetemp()
    return (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "warm"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a scenario, and the folder of its run without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    scenario = folder / "small.yaml"
    content = {
        "name": "small",
        "source": str(DEMO / "model"),
        "rules": [{"match": "lm_head", "scheme": "keep"}, {"match": "Linear", "scheme": "W4A16"}],
        "evaluate": {"tasks": [str(TASK)], "limit": LIMIT},
    }
    scenario.write_text(yaml.safe_dump(content))
    ran = vexport("run", scenario, "--run-dir", folder / "run", "--quiet")
    assert ran.code in (0, 1, 3), ran.stderr
    return scenario, folder / "run"


def end_at(moment: Moment, folder: Path, warm_folder: Path, arguments: Sequence[object]) -> None:
    """Start a command and end it at a moment: when `is_reached(folder)` is true.

    Its engine ends too.
    """
    number, is_reached = moment
    command = [sys.executable, "-c", PROGRAM, str(warm_folder), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while not is_reached(folder):
            assert process.poll() is None, "the command ended before the signal"
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == CODES[number]


def without_times(value: Json) -> Json:
    """Return a report without times, and without names that contain times."""
    if isinstance(value, dict):
        return {
            key: without_times(each) for key, each in value.items() if not TIME_KEYS.search(key)
        }
    if isinstance(value, list):
        return [without_times(each) for each in value]
    return TIMESTAMP.sub("TIME", value) if isinstance(value, str) else value


def report_of(folder: Path, name: str) -> Json:
    """Return a report of a run, without times and without the run's path."""
    text = (folder / name).read_text().replace(str(folder), "RUN")
    return without_times(json.loads(text))


def test_run_ended_three_times(whole: tuple[Path, Path], warm_folder: Path, tmp_path: Path) -> None:
    scenario, reference = whole
    folder = tmp_path / "run"
    call = ("run", scenario, "--run-dir", folder, "--quiet")
    moments: list[Moment] = [
        (signal.SIGTERM, has_file(".checkpoint.partial/new/*.safetensors")),
        (signal.SIGKILL, has_content("eval/baseline/answers-*.jsonl")),
        (signal.SIGINT, has_content("eval/candidate/vllm.log")),
    ]
    for moment in moments:
        end_at(moment, folder, warm_folder, call)
        assert not (folder / "report.json").exists()
    ran = vexport(*call)
    assert ran.code in (0, 1, 3), ran.stderr
    for name in ("report.json", "plan.json", "check.json", "load.json"):
        assert report_of(folder, name) == report_of(reference, name), name
    for file in (reference / "checkpoint").iterdir():
        assert (folder / "checkpoint" / file.name).read_bytes() == file.read_bytes(), file.name


def test_evaluation_ended_three_times(
    whole: tuple[Path, Path], warm_folder: Path, tmp_path: Path
) -> None:
    reports = list[Json]()
    call = (
        "eval",
        whole[1] / "checkpoint",
        "--baseline",
        DEMO / "model",
        "--task",
        TASK,
        "--limit",
        LIMIT,
    )
    moments: list[Moment] = [
        (signal.SIGINT, has_content("baseline/vllm.log")),
        (signal.SIGKILL, has_content("baseline/answers-*.jsonl")),
        (signal.SIGTERM, has_content("candidate/answers-*.jsonl")),
    ]
    for folder, ends in ((tmp_path / "whole", []), (tmp_path / "ended", moments)):
        options = ("--output-dir", folder, "--format", "json", "--quiet")
        for moment in ends:
            end_at(moment, folder, warm_folder, (*call, *options))
        ran = vexport(*call, *options)
        assert ran.code in (0, 1, 3), ran.stderr
        text = ran.stdout.replace(str(folder), "FOLDER")
        reports.append(without_times(json.loads(text)))
        session = folder / "baseline" / "session.json"
        written = session.stat().st_mtime_ns
        assert vexport(*call, *options).code == ran.code
        assert session.stat().st_mtime_ns == written, "the session was written again"
    assert reports[0] == reports[1]
    first, second = (report_of(tmp_path / name, "report.json") for name in ("whole", "ended"))
    assert first == second
