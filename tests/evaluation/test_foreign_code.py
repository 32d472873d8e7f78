"""Task files of other people: nothing in them runs unless that was allowed, and reading them ends."""

from pathlib import Path

import pytest

from tests.evaluation.make import SUMS, make_tasks
from vexport.engine.messages import SessionRequest
from vexport.errors import InputError
from vexport.evaluation.task_data import load_tasks, tasks_as_data
from vexport.evaluation.tasks import resolve_tasks

TOUCH = "open({mark!r}, 'w').close()\nimport evaluate\nclass Own(evaluate.Metric): pass\n"
METRIC = "metric_list: [{{metric: {name}, aggregation: mean, higher_is_better: true}}]\n"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a metric here makes when it is imported, by its path and by its name."""
    make_tasks(tmp_path, 3)
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "it ran"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own.py").write_text(TOUCH.format(mark=str(mark)))
    return mark


def with_metric(name: str) -> str:
    plain = "\n".join(line for line in SUMS.splitlines() if "metric" not in line)
    assert "metric" in SUMS
    return f"{plain}\n{METRIC.format(name=name)}"


@pytest.mark.parametrize("name", ["own/own.py", "./own", "own", "someone/metric", "{folder}/own/own.py"])
def test_a_metric_that_is_a_program_needs_the_flag(name: str, mark: Path) -> None:
    (mark.parent / "t.yaml").write_text(with_metric(name.format(folder=mark.parent)))
    (mark.parent / "all.yaml").write_text("group: all\ntask: [t]\n")
    for file in ("t.yaml", "all.yaml"):
        with pytest.raises(InputError, match=r"Python that would be run; add --trust-remote-code"):
            resolve_tasks([file], folder=mark.parent / "run")
        assert resolve_tasks([file], folder=mark.parent / "run", trust_remote_code=True)


def test_pickled_documents_are_refused(mark: Path) -> None:
    assert "dataset_path: json" in SUMS
    (mark.parent / "t.yaml").write_text(SUMS.replace("dataset_path: json", "dataset_path: pandas"))
    for trust in (False, True):
        with pytest.raises(InputError, match="got pickled documents, need data that run nothing"):
            resolve_tasks(["t.yaml"], folder=mark.parent / "run", trust_remote_code=trust)


def request(folder: Path, task: str) -> SessionRequest:
    return SessionRequest(checkpoint=folder, name="x", tasks=(task,), include_paths=(folder / "more",))


def test_nor_does_one_of_a_folder_of_tasks(mark: Path) -> None:
    """lm-eval reads such a folder itself."""
    from lm_eval.tasks import TaskManager

    more = mark.parent / "more"
    more.mkdir()
    (more / "t.yaml").write_text(with_metric("own").replace("task: sums", "task: other"))
    asked = request(mark.parent, "other")
    manager = TaskManager(include_path=[str(more)], include_defaults=False)
    with tasks_as_data(), pytest.raises(InputError, match="metric own: Python"):
        load_tasks(asked, manager, asked.tasks)
    assert not mark.exists()
