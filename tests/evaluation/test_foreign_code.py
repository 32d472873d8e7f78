"""Task files of other people: nothing in them runs unless that was allowed, and reading them ends."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evaluation.make import SUMS, make_tasks
from vexport.engine.messages import SessionRequest
from vexport.errors import InputError
from vexport.evaluation import lm_eval_environment
from vexport.evaluation.lm_eval_runner import load_tasks
from vexport.evaluation.task_data_worker import fetch
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
    with lm_eval_environment.tasks_as_data(), pytest.raises(InputError, match="metric own: Python"):
        load_tasks(asked, manager, asked.tasks)
    assert not mark.exists()


TEMPLATES = {
    "{{{{ cycler.__init__.__globals__.os.mkdir('{mark}') }}}}": "SecurityError",
    "{{% for a in range(9999) %}}{{% for b in range(9999) %}}{{% endfor %}}{{% endfor %}}": "not finished",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_are_data_also_where_documents_are_fetched(
    template: str, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL has the task built once before any engine starts."""
    monkeypatch.setattr(lm_eval_environment, "TEMPLATE_SECONDS", 0.2)
    text = SUMS.replace("{{a}} + {{b}} =", template.format(mark=mark))
    text = text.replace("additions.jsonl", (mark.parent / "additions.jsonl").as_uri())
    (mark.parent / "t.yaml").write_text(text)
    (task,) = resolve_tasks(["t.yaml"], folder=mark.parent / "run")
    (problem,) = fetch(request(mark.parent, task.spec), lambda *progress: None)
    assert TEMPLATES[template] in str(problem)
    assert not mark.exists()


def diamonds(folder: Path) -> None:
    """2^40 ways to the last file."""
    for level in range(40):
        (folder / f"d{level}.yaml").write_text(f"include: [d{level + 1}.yaml, d{level + 1}.yaml]\n")
    (folder / "d40.yaml").write_text("task: 5\n")


def chain(folder: Path) -> None:
    for level in range(2000):
        (folder / f"d{level}.yaml").write_text(f"include: d{level + 1}.yaml\n")


def text(content: str) -> Callable[[Path], None]:
    return lambda folder: None if (folder / "d0.yaml").write_text(content) else None


ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(60))
ENDLESS: dict[str, tuple[Callable[[Path], None], str]] = {
    "includes that double": (diamonds, "got no key dataset_path"),
    "a chain of includes": (chain, "need at most 50 levels"),
    "a device": (text("include: /dev/zero\n"), "/dev/zero: got no file"),
    "a large file": (text("#" * (1 << 23)), "4 MB"),
    "a NUL": (text('include: "a\\0b"\n'), "no usable path"),
    "aliases that double": (text(ALIASES), "aliases that stand for more than"),
    "an alias of itself": (text("a: &a [*a]\n"), "an alias inside what it stands for"),
    "nested without end": (text("a: " + "[" * 2_000), "broken YAML"),
    "all files of the machine": (text(SUMS.replace("additions.jsonl", "/**/x/**")), "got no file"),
    "no pattern": (text(SUMS.replace("additions.jsonl", "a**b")), "got no file"),
    "a device for documents": (text(SUMS.replace("additions.jsonl", "/dev/zero")), "got no file /dev/zero"),
    "answers without end": (text(f"{SUMS}repeats: 1000000000\n"), "repeats: got 1000000000"),
}


@pytest.mark.parametrize("how", ENDLESS)
def test_reading_a_task_ends(how: str, tmp_path: Path) -> None:
    write, message = ENDLESS[how]
    make_tasks(tmp_path, 3)
    write(tmp_path)
    with pytest.raises(InputError) as caught:
        resolve_tasks([str(tmp_path / "d0.yaml")], folder=tmp_path / "run")
    assert message in str(caught.value)
