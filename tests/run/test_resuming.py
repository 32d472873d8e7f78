"""What an interrupted evaluation leaves for the next call."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from tests.quantize.test_streaming import write_model
from vexport.checkpoint.index import folder_digest
from vexport.errors import InputError
from vexport.run.directory import RunDirectory
from vexport.run.evaluating import RESULTS, EvalJob
from vexport.run.serving import CANDIDATE, EngineOptions, clear_session
from vexport.scenario import Evaluate
from vexport.scenario.serve import Serve


def job(folder: Path, *, overwrite: bool = False) -> EvalJob:
    options = EngineOptions(
        serve=Serve(), vllm_python=None, trust_remote_code=False, on_progress=lambda *step: None
    )
    settings = Evaluate(tasks=("gsm8k",))
    return EvalJob(
        checkpoints=("model",), settings=settings, folder=folder, options=options, overwrite=overwrite
    )


def test_an_evaluation_without_results_goes_on_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    assert not job(tmp_path / "new").is_unfinished
    RESULTS.begin(tmp_path)
    assert job(tmp_path).is_unfinished
    assert not job(tmp_path, overwrite=True).is_unfinished
    (tmp_path / CANDIDATE).mkdir()
    (tmp_path / CANDIDATE / "results_2026-01-01T00-00-00.000000.json").write_text("{}")
    assert not job(tmp_path).is_unfinished


def test_answers_outlive_an_unfinished_session(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "one.yaml").write_text("task: one\n")
    kept = {"answers-12_rank0.db", "answers-12_rank0.db-journal"}
    for name in ("vllm.log", *kept):
        (tmp_path / name).write_text("kept\n")
    clear_session(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept


def flip(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def edit_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0"}')


@pytest.mark.parametrize("change", [lambda model: flip(model / "model-1.safetensors"), edit_tokenizer])
def test_a_stage_knows_checkpoints_by_their_files(change: Callable[[Path], object], tmp_path: Path) -> None:
    """What it was made from, and what it has made."""
    source = write_model(tmp_path / "source", hidden=64, layers=1)
    made = copytree(source, tmp_path / "run" / "checkpoint")
    inputs = {"source": folder_digest(source)}
    RunDirectory(tmp_path / "run").finish("calibrate", inputs, 1.0)
    RunDirectory(tmp_path / "run").finish("quantize", inputs, 1.0, made)
    for file in (*source.iterdir(), *made.iterdir()):
        file.chmod(0o640)
    (source / "README.md").write_text("Read me.")
    assert RunDirectory(tmp_path / "run").is_done("quantize", inputs)
    change(made)
    with pytest.raises(InputError, match="files have changed since the run wrote them"):
        RunDirectory(tmp_path / "run").is_done("quantize", inputs)
    assert RunDirectory(tmp_path / "run").is_done("calibrate", inputs)
    change(source)
    with pytest.raises(InputError, match="the run began with another source"):
        RunDirectory(tmp_path / "run").is_done("calibrate", {"source": folder_digest(source)})
