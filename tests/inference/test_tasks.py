"""Tasks by name and by file. Their Python code does not run without trust."""

import re
from pathlib import Path

import pytest
import yaml

from tests.scores.make import SUMS, make_tasks
from vexport.engine.messages import SessionRequest
from vexport.errors import InputError
from vexport.inference.task_data import found_documents, load_tasks, tasks_as_data
from vexport.inference.tasks import read_tasks, task_files


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_relative_data_files_become_absolute(tmp_path: Path) -> None:
    sums, *_ = make_tasks(tmp_path / "tasks", 3)
    (task,) = read_tasks([sums]).write(tmp_path / "run")
    assert task == str(tmp_path / "run/sums/sums.yaml")
    config = yaml.safe_load(Path(task).read_text())
    assert config["dataset_kwargs"]["data_files"] == {
        "test": str(tmp_path / "tasks/additions.jsonl")
    }
    assert config["doc_to_text"] == "{{a}} + {{b}} ="


@pytest.mark.parametrize(
    "file", ["additions.jsonl", "./data/additions.jsonl", "tasks/additions.jsonl"]
)
def test_documents_next_to_the_yaml_are_found(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums, *_ = make_tasks(tmp_path / "tasks", 3)
    task = write(tmp_path / "tasks" / "sums.yaml", SUMS.replace("additions.jsonl", file))
    monkeypatch.chdir(tmp_path)
    (found,) = read_tasks([task]).write(tmp_path / "run")
    config = yaml.safe_load(Path(found).read_text())
    documents = tmp_path / "tasks" / "additions.jsonl"
    assert config["dataset_kwargs"]["data_files"]["test"] == str(documents)
    assert documents in task_files(Path(sums))


def test_documents_in_the_current_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval itself reads paths of documents from the current folder."""
    make_tasks(tmp_path / "data", 3)
    (tmp_path / "tasks").mkdir()
    task = write(
        tmp_path / "tasks" / "sums.yaml", SUMS.replace("additions.jsonl", "data/additions.jsonl")
    )
    monkeypatch.chdir(tmp_path)
    (found,) = read_tasks([task]).write(tmp_path / "run")
    config = yaml.safe_load(Path(found).read_text())
    documents = tmp_path / "data" / "additions.jsonl"
    assert config["dataset_kwargs"]["data_files"]["test"] == str(documents)


def test_missing_documents_are_reported_once(tmp_path: Path) -> None:
    files = "{train: gone.jsonl, test: gone.jsonl}"
    task = write(tmp_path / "sums.yaml", SUMS.replace("{test: additions.jsonl}", files))
    with pytest.raises(InputError) as caught:
        read_tasks([task]).write(tmp_path / "run")
    assert str(caught.value).count("gone.jsonl") == 1


def test_documents_of_tasks_by_name(tmp_path: Path) -> None:
    """Each task has the documents next to its own YAML file."""
    for name in ("first", "second"):
        folder = tmp_path / name
        make_tasks(folder, 3)
        write(folder / "sums.yaml", SUMS.replace("task: sums", f"task: {name}"))
        found = found_documents({"test": "./data/additions.jsonl"}, name, [tmp_path])
        assert found == {"test": str(folder / "additions.jsonl")}
    with pytest.raises(InputError) as caught:
        found_documents("additions.jsonl", "a group", [tmp_path])
    assert (caught.value.rule, caught.value.facts["count"]) == ("tasks/several-files", 2)
    with pytest.raises(InputError) as caught:
        found_documents("gone.jsonl", "first", [tmp_path])
    assert (caught.value.rule, caught.value.facts["file"]) == ("tasks/no-file", "gone.jsonl")


def test_include_keeps_relative_paths(tmp_path: Path) -> None:
    make_tasks(tmp_path / "base", 3)
    task = write(
        tmp_path / "other.yaml", "include: base/sums.yaml\ntask: other\ndoc_to_text: '{{a}}'\n"
    )
    (found,) = read_tasks([task]).write(tmp_path / "run")
    config = yaml.safe_load(Path(found).read_text())
    assert (config["task"], config["doc_to_text"]) == ("other", "{{a}}")
    assert config["dataset_kwargs"]["data_files"]["test"] == str(tmp_path / "base/additions.jsonl")


def test_python_in_task_is_refused(tmp_path: Path) -> None:
    *_, near = make_tasks(tmp_path / "tasks", 3)
    with pytest.raises(InputError) as caught:
        read_tasks([near]).write(tmp_path / "run")
    assert (caught.value.rule, caught.value.where) == ("tasks/code", f"{near}:10")
    assert caught.value.facts["name"] == "!function score.near"


def test_trusted_function_is_copied_with_module(tmp_path: Path) -> None:
    *_, near = make_tasks(tmp_path / "base", 3)
    read_tasks([near], trust_remote_code=True).write(tmp_path / "run")
    resolved = (tmp_path / "run/near/near.yaml").read_text()
    assert "process_results: !function 'score.near'" in resolved
    assert (tmp_path / "run/near/score.py").is_file()
    task = write(tmp_path / "other.yaml", "include: base/near.yaml\ntask: other\n")
    read_tasks([task], trust_remote_code=True).write(tmp_path / "run")
    assert (tmp_path / "run/other/score.py").is_file()


@pytest.mark.parametrize(
    ("text", "place", "rule", "fact"),
    [
        ("task: [", r"t\.yaml:[12]", "file/yaml", ""),
        ("task: &a [*a]\n", r"t\.yaml:1", "file/yaml", r"the alias \*a"),
        ("- task", r"t\.yaml", "file/json-object", "a list"),
        ("task: !!python/object/apply:os.getcwd []", r"t\.yaml:1", "file/yaml", r"os\.getcwd"),
        (SUMS.replace("additions", "missing"), r"t\.yaml", "tasks/no-file", r"missing\.jsonl"),
        (SUMS.replace("task: sums", "task: ../sums"), r"t\.yaml: task", "tasks/name", r"\.\./sums"),
        (
            SUMS.replace("test_split: test\n", ""),
            r"t\.yaml",
            "tasks/key",
            "test_split or validation_split",
        ),
        ("include: t.yaml\n" + SUMS, r"t\.yaml: include", "tasks/too-large", "includes"),
        ("group: all\ntask: [nowhere]\n", r"nowhere\.yaml", "file/missing", ""),
        ("group: all\ntask: []\n", r"t\.yaml", "tasks/key", "task"),
        ("group: ../all\ntask: [sums]\n", r"t\.yaml: group", "tasks/name", r"\.\./all"),
        ("group: all\ntask: [{task: sums}]\n", r"t\.yaml", "tasks/key", "dataset_path"),
        (
            SUMS.replace("generate_until", "loglikelihood").replace("exact_match", "acuracy"),
            r"t\.yaml: metric",
            "tasks/metric",
            "did you mean acc",
        ),
    ],
)
def test_broken_task_file_names_place(
    tmp_path: Path, text: str, place: str, rule: str, fact: str
) -> None:
    make_tasks(tmp_path, 3)
    with pytest.raises(InputError) as caught:
        read_tasks([write(tmp_path / "t.yaml", text)]).write(tmp_path / "run")
    assert caught.value.rule == rule
    assert re.search(f"{place}$", caught.value.where)
    assert re.search(fact, str(caught.value))


def test_task_names(tmp_path: Path) -> None:
    """A name is in lm-eval's registry or in an include path."""
    pytest.importorskip("lm_eval")
    names = ["arc_easy", "mmlu"]
    assert read_tasks(names).write(tmp_path) == tuple(names)
    with pytest.raises(InputError) as caught:
        read_tasks(["arc_eazy"]).write(tmp_path)
    assert (caught.value.rule, caught.value.where) == ("tasks/no-such-task", "task arc_eazy")
    assert "arc_easy" in str(caught.value.facts["remedy"])
    make_tasks(tmp_path / "tasks", 3)
    found = read_tasks(["sums"], include_paths=[tmp_path / "tasks"]).write(tmp_path / "run")
    assert found == ("sums",)


TOUCH = "open({mark!r}, 'w').close()\nimport evaluate\nclass Own(evaluate.Metric): pass\n"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that a metric writes when its module is imported.

    Tasks name it by path or by name.
    """
    make_tasks(tmp_path, 3)
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "it ran"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own.py").write_text(TOUCH.format(mark=str(mark)))
    return mark


def with_metric(name: str) -> str:
    return SUMS.replace("metric: exact_match", f"metric: {name}")


@pytest.mark.parametrize(
    "name", ["own/own.py", "./own", "own", "someone/metric", "{folder}/own/own.py"]
)
def test_metric_with_code_needs_trust(name: str, mark: Path) -> None:
    (mark.parent / "t.yaml").write_text(with_metric(name.format(folder=mark.parent)))
    (mark.parent / "all.yaml").write_text("group: all\ntask: [t]\n")
    for file in ("t.yaml", "all.yaml"):
        with pytest.raises(InputError) as caught:
            read_tasks([file]).write(mark.parent / "run")
        assert caught.value.rule == "tasks/code"
        assert read_tasks([file], trust_remote_code=True).write(mark.parent / "run")


def test_pickled_documents_are_refused(mark: Path) -> None:
    (mark.parent / "t.yaml").write_text(SUMS.replace("dataset_path: json", "dataset_path: pandas"))
    for trust in (False, True):
        with pytest.raises(InputError) as caught:
            read_tasks(["t.yaml"], trust_remote_code=trust).write(mark.parent / "run")
        assert caught.value.rule == "tasks/pickled"


def load_untrusted(folder: Path, name: str) -> None:
    """Load a task like a worker without trust: lm-eval reads the folder of tasks."""
    from lm_eval.tasks import TaskManager

    request = SessionRequest(checkpoint=folder, tasks=(name,), include_paths=(folder,))
    with tasks_as_data():
        load_tasks(
            request, TaskManager(include_path=[str(folder)], include_defaults=False), request.tasks
        )


def test_metric_in_task_folder_does_not_run(mark: Path) -> None:
    more = mark.parent / "more"
    more.mkdir()
    (more / "t.yaml").write_text(with_metric("own").replace("task: sums", "task: other"))
    with pytest.raises(InputError) as caught:
        load_untrusted(more, "other")
    assert (caught.value.rule, caught.value.facts["name"]) == ("tasks/code", "own")
    assert not mark.exists()


@pytest.mark.parametrize("through", ["near", "subject", "all", "tagged"])
def test_python_in_task_folder_needs_trust(through: str, tmp_path: Path) -> None:
    make_tasks(tmp_path, 3)
    (tmp_path / "subject.yaml").write_text("include: near.yaml\ntask: subject\n")
    (tmp_path / "all.yaml").write_text("group: all\ntask:\n  - near\n")
    (tmp_path / "tagged.yaml").write_text("include: subject.yaml\ntask: other\ntag: tagged\n")
    (task,) = read_tasks([through], include_paths=(tmp_path,)).write(tmp_path / "run")
    with pytest.raises(InputError) as caught:
        load_untrusted(tmp_path, task)
    assert caught.value.rule == "tasks/code"
    assert caught.value.facts["name"] == "!function score.near"
