"""Margins and gates that do not fit the tasks are refused before an engine starts."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.command import ROOT, vexport
from tests.scores.corpus_tasks import make_corpus_tasks
from tests.scores.make import make_group
from tests.texts import assert_contains, breaks
from vexport.engine.messages import SessionRequest
from vexport.inference.response_sources import EngineSource
from vexport.inference.task_data import load_tasks, loaded_metrics, task_manager, tasks_as_data
from vexport.inference.tasks import DEFAULT_METRICS, TaskMetrics, read_tasks
from vexport.judge.task_settings import require_valid_settings
from vexport.rules import margin as rules
from vexport.scenario import Evaluate

MODEL = ROOT / "scenarios" / "demo" / "model"
LABELS = {"f1": "", "mcc": "", "brier_score": ""}
ACC = {"acc": "mean", "acc_norm": "mean"}


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    return make_corpus_tasks(tmp_path / "tasks", 4)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_responses(*given: object) -> None:
        raise AssertionError("an engine starts")

    monkeypatch.setattr(EngineSource, "get_responses", get_responses)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--margin", "0.02"), ["pages", "--margin pages=1%", "[margin/kind]"]),
        (("--margin", "labels=0.02"), ["task labels", "0.02 for f1", "[margin/kind]"]),
        (("--margin", "labels=0.02", "--gate", "labels=mcc"), ["0.02 for mcc", "[margin/kind]"]),
        (("--margin", "last_word=0.02"), ["0.02 for perplexity", "[margin/kind]"]),
        (("--margin", "page=1%"), ["margin: got page", "[margin/no-task]"]),
        (("--gate", "page=bleu"), ["gate: got page", "[margin/no-task]"]),
        (("--gate", "pages=bleu"), ["gate of task pages: got bleu", "[margin/no-metric]"]),
        (("--gate", "exact_match"), ["gate: got exact_match", "[margin/no-metric]"]),
    ],
)
def test_eval_refuses_early(
    options: Sequence[str], parts: Sequence[str], corpus: list[str], tmp_path: Path
) -> None:
    tasks = [word for task in corpus for word in ("--task", task)]
    ran = vexport(
        "eval", MODEL, "--baseline", MODEL, *tasks, *options, "--output-dir", tmp_path / "run"
    )
    assert ran.code == 2
    assert_contains(ran.stderr, *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_named_task_is_refused_early(corpus: list[str], tmp_path: Path) -> None:
    """Only lm-eval knows the metrics of a task without a file. Its worker looks them up."""
    pytest.importorskip("lm_eval")
    named = ("--include-path", Path(corpus[0]).parent, "--task", "pages", "--margin", "0.02")
    ran = vexport(
        "eval", MODEL, "--baseline", MODEL, *named, "--output-dir", tmp_path / "run", "--quiet"
    )
    assert ran.code == 2
    assert "--margin pages=1%" in ran.stderr


def test_all_commands_refuse_early(corpus: list[str], tmp_path: Path) -> None:
    pages = next(task for task in corpus if "pages" in task)
    scenario = tmp_path / "scenario.yaml"
    content = {
        "name": "early",
        "source": str(MODEL),
        "rules": [{"match": "Linear", "scheme": "FP8_DYNAMIC"}],
        "evaluate": {"tasks": [pages], "margin": 0.02},
    }
    scenario.write_text(yaml.safe_dump(content))
    folder = ("--run-dir", tmp_path / "run")
    variants = ("--serve", "{}", "--serve", "max_num_seqs=2")
    for call in (
        ("run", scenario, *folder),
        ("compare", MODEL, "--schemes", "FP8_DYNAMIC", "--scenario", scenario, *folder),
        ("compare", MODEL, *variants, "--task", pages, "--margin", "0.02", *folder),
    ):
        ran = vexport(*call, "--quiet")
        assert ran.code == 2, call
        assert "--margin pages=1%" in ran.stderr
        assert not list(tmp_path.glob("run/**/session.json"))


def test_accepted_baseline_refuses_early(tmp_path: Path) -> None:
    def accepted(metric: str, score: float, scores: str) -> dict[str, object]:
        return {
            "metric": metric,
            "filter": "none",
            "higher_is_better": True,
            "documents": 4,
            "score": score,
            "scores": {"0-3": scores},
            "questions": {"0-3": "aaabbbcccddd"},
        }

    tasks = DEMO_TASKS
    file = tmp_path / "accepted.json"
    content = {
        "vexport_baseline": 1,
        "settings": {"tasks": tasks, "limit": 4},
        "fingerprint": {},
        "groups": {},
        "tasks": {
            "facts": accepted("exact_match", 0.75, "1011"),
            "addition": accepted("perplexity", -1.375, "-1.5 -2.5 -0.5 -1.0"),
        },
    }
    file.write_text(json.dumps(content))
    call = ("eval", MODEL, "--against", file, "--output-dir", tmp_path / "run", "--margin")
    for margin, parts in (
        ("0.02", ["--margin addition=1%", "[margin/kind]"]),
        ("facts=2%", ["margin of task facts", "2% for exact_match", "[margin/kind]"]),
        ("fact=0.02", ["margin: got fact", "[margin/no-task]"]),
    ):
        ran = vexport(*call, margin)
        assert ran.code == 2
        assert_contains(ran.stderr, *parts)
    assert not (tmp_path / "run").exists()


DEMO_TASKS = [
    str(ROOT / "scenarios" / "demo" / "tasks" / f"{name}.yaml") for name in ("facts", "addition")
]


@pytest.mark.parametrize(
    ("margin", "gate", "task"),
    [
        (0.02, {}, TaskMetrics(name="t", metrics=ACC)),
        ("2%", {}, TaskMetrics(name="t", metrics=LABELS)),
        ({"t": "2%", "*": 0.02}, {}, TaskMetrics(name="t", metrics=LABELS)),
        (0.02, {}, TaskMetrics(name="t", metrics={**LABELS, "rouge1": "mean"})),
        ("2%", {}, TaskMetrics(name="t", metrics={"rouge1": "mean"})),
        (0.02, {}, TaskMetrics(name="t", metrics={"f1": "mean", "em": "mean"})),
        (0.02, {"t": "score,first"}, TaskMetrics(name="t", metrics=ACC, has_code=True)),
        (None, {"*": "acc_norm,none"}, TaskMetrics(name="t", metrics=ACC)),
        (0.02, {}, TaskMetrics(name="t", metrics={})),
    ],
)
def test_possible_settings_are_not_refused(
    margin: float | str | dict[str, float | str] | None, gate: dict[str, str], task: TaskMetrics
) -> None:
    """The answers decide whether these margins and gates fit."""
    settings = Evaluate(tasks=("t",), margin=margin, gate=gate)
    require_valid_settings(settings, [task])
    require_valid_settings(settings, [])


@pytest.mark.parametrize(
    ("margin", "task"),
    [
        ("2%", TaskMetrics(name="t", metrics={**LABELS, **ACC})),
        (0.02, TaskMetrics(name="t", metrics={"score": "weighted_perplexity"}, has_code=True)),
        (0.02, TaskMetrics(name="t", metrics={"ter": "mean"})),
    ],
)
def test_certain_mistakes_are_refused(margin: float | str, task: TaskMetrics) -> None:
    with breaks(rules.KIND, "margin of task t"):
        require_valid_settings(Evaluate(tasks=("t",), margin=margin), [task])


def test_metrics_of_files_are_lm_evals(corpus: list[str], tmp_path: Path) -> None:
    """lm-eval finds the same metrics in the loaded tasks and groups."""
    registry = pytest.importorskip("lm_eval.api.registry")
    assert {name: [*metrics] for name, metrics in DEFAULT_METRICS.items()} == dict(
        registry.DEFAULT_METRIC_REGISTRY
    )
    group = Path(make_group(tmp_path / "group", 2, 3))
    apart = group.with_name("apart.yaml")
    content = yaml.safe_load(group.read_text())
    content.pop("aggregate_metric_list")
    content["group"] = "apart"
    apart.write_text(yaml.safe_dump(content))
    prepared = read_tasks([*corpus, str(group), str(apart)])
    specs = prepared.write(tmp_path / "resolved")
    request = SessionRequest(checkpoint=tmp_path, tasks=specs)
    with tasks_as_data():
        loaded = [*loaded_metrics(load_tasks(request, task_manager(request), specs))]
    found = prepared.metrics
    assert [task.name for task in found] == [task.name for task in loaded]
    assert [[*task.metrics] for task in found] == [[*task.metrics] for task in loaded]
    assert {task.name for task in found} >= {"pages", "subjects", "apart::subject0"}
