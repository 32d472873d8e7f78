"""Commands do not overwrite their inputs.

They end with exit code 2 and one line, and change no byte.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import click
import pytest

from tests.command import ALL_COMMANDS, vexport
from vexport.cli.options import DATA, FILES, OUTPUTS, SPECULATIVE

# Parameters that are not paths.
NO_PATHS = {
    *(
        "scheme",
        "observer",
        "input_observer",
        "ignore",
        "revision",
        "device",
        "dtype",
        "engine_args",
        "name",
        "ignore_rules",
        "others",  # the second model of `compare`, which is refused
    ),
    *(
        "model",
        "baseline_model",
        "chat_template",
        "ignore_rules",
        "gate",
        "gen_kwargs",
        "system_instruction",
    ),
    *("think_end_token", "tool_call_parser"),
    "log",  # a file or an address, which is only read
    "margin",
}

# The part of an accepted baseline that --accept reads before an engine starts.
BASELINE = '{"vexport_baseline": 1}'
SCENARIO = """
name: mine
source: model
rules: [{match: Linear, scheme: FP8, observer: memoryless_minmax}]
calibration: {data: data/rows.jsonl, samples: 2, seq_len: 16}
evaluate: {tasks: [tasks/sums.yaml], baseline: model}
"""
Tree = Mapping[str, bytes | str]


def tree(root: Path) -> Tree:
    """Return all entries below a folder: a file's bytes, a link's target, or "" for a folder."""
    entries: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            entries[name] = f"-> {path.readlink()}"
        else:
            entries[name] = path.read_bytes() if path.is_file() else ""
    return entries


@pytest.fixture
def home(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a user's folder the current folder.

    It contains a model, the same model in the layout of the hub's cache, data and a task.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama, tmp_path / "model")
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "main", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(llama, blobs)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text('{"input_ids": [5, 6, 7]}\n')
    (tmp_path / "data" / "accepted.json").write_text(BASELINE)
    (tmp_path / "data" / "config.json").write_text("{}")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text("task: sums\n")
    (tmp_path / "s.yaml").write_text(SCENARIO)
    for name in ("link", "other"):
        (tmp_path / name).symlink_to("model")
    (tmp_path / "up").symlink_to("data/..")
    return tmp_path


QUANTIZE = ("quantize", "--scheme", "FP8_DYNAMIC", "--overwrite")
CALIBRATION = ("--calibration", "data/rows.jsonl")
REPAIR = ("repair", "--overwrite")
EVAL = ("eval", "--task", "tasks/sums.yaml", "--overwrite")
RUN = ("run", "s.yaml", "--overwrite")
CASES = [
    # The source itself, by each of its names.
    (*QUANTIZE, "model", "model"),
    (*QUANTIZE, "model", "link"),
    (*REPAIR, "model", "model"),
    (*EVAL, "model", "--accept", "new.json", "--output-dir", "model"),
    (*RUN, "--run-dir", "model"),
    # A folder that contains an input.
    (*QUANTIZE, "model", "."),
    (*QUANTIZE, "model", "up"),
    (*QUANTIZE, "hub/snapshots/main", "hub/blobs"),
    (*QUANTIZE, "model", "data", *CALIBRATION),
    (*EVAL, "model", "--accept", "new.json", "--output-dir", "."),
    (*EVAL, "model", "--against", "data/accepted.json", "--output-dir", "data"),
    (*EVAL, "model", "--accept", "new.json", "--output-dir", "tasks"),
    (*RUN, "--run-dir", "."),
    (*RUN, "--run-dir", "data"),
    # A folder inside an input.
    (*QUANTIZE, "model", "model/out"),
    (*REPAIR, "model", "link/out"),
    (*EVAL, "model", "--accept", "new.json", "--output-dir", "model/eval"),
    (*RUN, "--run-dir", "model/run"),
    # An output file.
    (*EVAL, "model", "--against", "data/accepted.json", "--accept", "data/accepted.json"),
    (*EVAL, "model", "--against", "data/accepted.json", "--accept", "up/data/accepted.json"),
    (*EVAL, "model", "--accept", "out", "--output-dir", "out"),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_output_that_overlaps_input_is_refused(case: tuple[str, ...], home: Path) -> None:
    before = tree(home)
    ran = vexport(*case, "--quiet")
    assert ran.code == 2, ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert tree(home) == before
    assert "a separate path" in ran.stderr or "an accepted baseline" in ran.stderr


def test_outputs_with_similar_paths_are_accepted(home: Path) -> None:
    for out in (
        "model-FP8",
        "mode",
        "data/out",
        "runs/model",
        "hub/snapshots/out",
        "data/../tasks/model",
    ):
        ran = vexport("quantize", "model", out, "--scheme", "FP8_DYNAMIC", *CALIBRATION, "--quiet")
        assert ran.code == 0, ran.stderr
    assert vexport("check", "runs/model", "--quiet").code == 0


@pytest.mark.parametrize(
    "case",
    [
        ("check", "model", "-o", "model/config.json"),
        ("check", "hub/snapshots/main", "link", "-o", "other/model.safetensors"),
        ("plan", "model", "--scheme", "FP8_DYNAMIC", "-o", "link/config.json"),
        ("check", "model", "-o", "model/new.json"),
        ("check", "hub/snapshots/main", "-o", "hub/blobs/config.json"),
        ("check", "model", "-o", "hard.json"),
        ("check", "model", "-o", "hard-inside.json"),
        ("check", "model", "--digests", "sums.txt", "-o", "sums.txt"),
        ("check", "model", "--speculative", "eagle3=drafter", "-o", "drafter/config.json"),
        ("load", "model", "--dry", "-o", "model/load.json"),
        ("quantize", "model", "new", "--scheme", "FP8_DYNAMIC", "-o", "new/answer.json"),
        ("quantize", "model", "new", "--scheme", "FP8_DYNAMIC", "-o", "model/config.json"),
        ("quantize", "model", "new", "--recipe", "r.yaml", "-o", "r.yaml"),
        ("quantize", "model", "new", "--scheme", "W8A8", *CALIBRATION, "-o", "data/rows.jsonl"),
        (
            "repair",
            "model",
            "new",
            "--source",
            "hub/snapshots/main",
            "-o",
            "hub/snapshots/main/config.json",
        ),
        ("plan", "model", "-o", "model/config.json"),
        ("plan", "s.yaml", "-o", "s.yaml"),
        ("plan", "s.yaml", "-o", "data/rows.jsonl"),
        ("plan", "s.yaml", "-o", "model/config.json"),
        ("plan", "s.yaml", "-o", "tasks/sums.yaml"),
        ("plan", "s.yaml", "-o", "tasks/base.yaml"),
        ("plan", "s.yaml", "-o", "tasks/documents.jsonl"),
        ("plan", "s.yaml", "-o", "runs/mine/stages.json"),
        ("plan", "s.yaml", "--run-dir", "run", "-o", "run/sensitivity.json"),
        ("run", "s.yaml", "-o", "data/rows.jsonl"),
        ("run", "s.yaml", "-o", "runs/mine/report.json"),
        ("run", "s.yaml", "--run-dir", "run", "-o", "run/report.json"),
        ("compare", "model", "--schemes", "W8A8", "--scenario", "s.yaml", "-o", "data/rows.jsonl"),
        ("compare", "model", "--schemes", "W8A8", "-o", "runs/compare-model/W8A8/report.json"),
        ("report", "run", "-o", "run/report.json"),
        ("report", "run", "--format", "card", "-o", "run/new.md"),
        ("report", "run", "second", "-o", "run/stages.json"),
        ("verdict", "results", "run", "-o", "results/results_1.json"),
        ("verdict", "data/accepted.json", "data/accepted.json", "-o", "up/data/accepted.json"),
        (*EVAL, "model", "--accept", "new.json", "-o", "tasks/documents.jsonl"),
        (*EVAL, "model", "--accept", "new.json", "-o", "new.json"),
        (*EVAL, "results", "--against", "data/accepted.json", "-o", "results/results_1.json"),
        (
            "eval",
            "model",
            "--baseline",
            "hub/snapshots/main",
            "--text",
            "data",
            "-o",
            "data/new.json",
        ),
        (
            "eval",
            "http://x:1/v1",
            "--task",
            "a",
            "--accept",
            "b",
            "--tokenizer",
            "model",
            "-o",
            "model/x",
        ),
    ],
    ids=" ".join,
)
def test_answer_file_that_overlaps_input_is_refused(case: tuple[str, ...], home: Path) -> None:
    for name in ("run", "second", "results", "drafter", "runs/mine"):
        (home / name).mkdir(parents=True)
        (home / name / "config.json").write_text("{}")
    for name in (
        "run/report.json",
        "run/stages.json",
        "results/results_1.json",
        "tasks/documents.jsonl",
    ):
        (home / name).write_text("{}")
    (home / "sums.txt").write_text(f"{'0' * 64}  config.json\n")
    (home / "r.yaml").write_text("QuantizationModifier: {scheme: FP8_DYNAMIC}\n")
    (home / "tasks" / "base.yaml").write_text(
        "dataset_kwargs: {data_files: {test: documents.jsonl}}\n"
    )
    (home / "tasks" / "sums.yaml").write_text("task: sums\ninclude: base.yaml\n")
    (home / "hard.json").hardlink_to(home / "model" / "config.json")
    (home / "model" / "inside").mkdir()
    (home / "model" / "inside" / "file.json").write_text("{}")
    (home / "hard-inside.json").hardlink_to(home / "model" / "inside" / "file.json")
    before = tree(home)
    ran = vexport(*case, "--quiet")
    assert ran.code == 2
    assert "need a separate path" in ran.errors[0], ran.stderr
    assert tree(home) == before


def test_parameters_with_paths_are_known() -> None:
    """If a new option of a command names a path, it must be listed as an input or an output."""
    texts = {
        str(parameter.name)
        for command in ALL_COMMANDS.values()
        for parameter in command.params
        if parameter.type is click.STRING
    }
    known = {*DATA, *FILES, SPECULATIVE, *OUTPUTS}
    assert texts - known <= NO_PATHS


@pytest.mark.parametrize("case", ["source", "out", "data", "baseline", "run"])
def test_home_of_unknown_user_is_refused(case: str, home: Path) -> None:
    words = {
        "source": ("plan", "~nosuch/x"),
        "out": ("quantize", "model", "~nosuch/out", "--scheme", "FP8_DYNAMIC"),
        "data": (*QUANTIZE, "model", "out", "--calibration", "~nosuch/x"),
        "baseline": (*EVAL, "model", "--baseline", "~nosuch/x"),
        "run": ("report", "~nosuch/x"),
    }
    before = tree(home)
    ran = vexport(*words[case])
    assert ran.code == 2
    assert "~nosuch" in ran.errors[0]
    rule = "usage/no-user" if case in ("out", "data", "run") else "checkpoint/no-folder"
    assert rule in ran.errors[0]
    assert tree(home) == before


def test_tilde_in_existing_name(home: Path) -> None:
    shutil.copytree(home / "model", home / "~model")
    assert vexport("plan", "~model", "--scheme", "FP8_DYNAMIC").code == 0


def test_answer_is_written_to_pipe(home: Path) -> None:
    os.mkfifo(home / "pipe")
    with subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        assert vexport("plan", "model", "--scheme", "FP8_DYNAMIC", "-o", "pipe").code == 0
        assert "FP8_DYNAMIC" in str(reader.communicate()[0])
    assert (home / "pipe").is_fifo()
