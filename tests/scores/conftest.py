"""Output folders of the real lm-eval, made once per session."""

import shutil
from pathlib import Path

import pytest

from tests.scores.make import make_tasks, run_lm_eval
from vexport.inference.tasks import read_tasks

DOCUMENTS = 400


@pytest.fixture(scope="session")
def lm_eval_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with four runs of the same 400 additions.

    `baseline` answers 5 documents wrong, `twin` is its copy, `doubtful` answers 11 wrong, and
    `worse` 57.
    """
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("runs")
    tasks = read_tasks(make_tasks(folder / "tasks", DOCUMENTS), trust_remote_code=True).write(
        folder / "resolved"
    )
    wrong = {"baseline": range(5), "doubtful": range(1, 12), "worse": range(3, 60)}
    run_lm_eval(tasks, {folder / name: list(ids) for name, ids in wrong.items()})
    shutil.copytree(folder / "baseline", folder / "twin")
    return folder


@pytest.fixture
def copies(lm_eval_runs: Path, tmp_path: Path) -> Path:
    """Return a folder with copies of `baseline` and `twin` that a test may change."""
    for name in ("baseline", "twin"):
        shutil.copytree(lm_eval_runs / name, tmp_path / name)
    return tmp_path
