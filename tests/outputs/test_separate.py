"""No command writes over, around or into what it reads: exit code 2, one line, every byte as it was."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.command import vexport

# An accepted baseline as far as --accept looks before an engine starts.
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
    """Every entry below a folder: a file's bytes, where a link points, nothing for a folder."""
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
    """A person's folder, the current one: a model, the same as the hub's cache keeps it, data and a task."""
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
    # the source itself, by each of its names
    (*QUANTIZE, "model", "model"),
    (*QUANTIZE, "model", "link"),
    (*REPAIR, "model", "model"),
    (*EVAL, "model", "--accept", "new.json", "--output-dir", "model"),
    (*RUN, "--run-dir", "model"),
    # a folder that holds it
    (*QUANTIZE, "model", "."),
    (*QUANTIZE, "model", "up"),
    (*QUANTIZE, "hub/snapshots/main", "hub/blobs"),
    (*QUANTIZE, "model", "data", *CALIBRATION),
    (*EVAL, "model", "--accept", "new.json", "--output-dir", "."),
    (*EVAL, "model", "--against", "data/accepted.json", "--output-dir", "data"),
    (*EVAL, "model", "--accept", "new.json", "--output-dir", "tasks"),
    (*RUN, "--run-dir", "."),
    (*RUN, "--run-dir", "data"),
    # a folder inside it
    (*QUANTIZE, "model", "model/out"),
    (*REPAIR, "model", "link/out"),
    (*EVAL, "model", "--accept", "new.json", "--output-dir", "model/eval"),
    (*RUN, "--run-dir", "model/run"),
    # an output file
    (*EVAL, "model", "--against", "data/accepted.json", "--accept", "data/accepted.json"),
    (*EVAL, "model", "--against", "data/accepted.json", "--accept", "up/data/accepted.json"),
    (*EVAL, "model", "--accept", "out", "--output-dir", "out"),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_an_output_that_overlaps_an_input_is_refused(case: tuple[str, ...], home: Path) -> None:
    before = tree(home)
    ran = vexport(*case, "--quiet")
    assert ran.code == 2, ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert tree(home) == before
    assert "a separate path" in ran.stderr or "an accepted baseline" in ran.stderr


def test_apart_is_what_shares_a_parent_a_name_or_its_beginning(home: Path) -> None:
    for out in ("model-FP8", "mode", "data/out", "runs/model", "hub/snapshots/out", "data/../tasks/model"):
        ran = vexport("quantize", "model", out, "--scheme", "FP8_DYNAMIC", *CALIBRATION, "--quiet")
        assert ran.code == 0, ran.stderr
    assert vexport("check", "runs/model", "--quiet").code == 0


@pytest.mark.parametrize(
    "case",
    [
        ("check", "model", "-o", "model/config.json"),
        ("check", "hub/snapshots/main", "link", "-o", "other/model.safetensors"),
        ("plan", "model", "--scheme", "FP8_DYNAMIC", "-o", "link/config.json"),
        ("verdict", "data/accepted.json", "data/accepted.json", "-o", "up/data/accepted.json"),
    ],
    ids=" ".join,
)
def test_an_answer_is_not_written_over_an_input(case: tuple[str, ...], home: Path) -> None:
    before = tree(home)
    assert vexport(*case, "--quiet").code == 2
    assert tree(home) == before
