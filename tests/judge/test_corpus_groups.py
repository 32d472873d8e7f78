"""Groups of tasks with metrics of a whole corpus, against lm-eval's aggregates of groups."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from tests.scores.corpus_tasks import make_corpus_tasks
from tests.scores.make import results_file, run_lm_eval
from vexport.errors import InputError
from vexport.inference.tasks import read_tasks
from vexport.judge.pairs import TaskPair, gated_tasks
from vexport.judge.verdict import decide
from vexport.records import Comparison, TaskVerdict, Verdict
from vexport.reports import render_verdicts
from vexport.scores.readers.lm_eval import read_lm_eval

pytestmark = pytest.mark.slow
SIZES = (20, 60, 40)
MANY = 12
METRICS = {
    "pages": ("word_perplexity", "bits_per_byte"),
    "labels": ("f1", "mcc", "brier_score"),
    "translation": ("bleu", "ter"),
}


def make_corpus_group(folder: Path, kind: str, sizes: tuple[int, ...], name: str) -> str:
    """Write a group of tasks with different numbers of documents, and return its file."""
    members = []
    for number, documents in enumerate(sizes):
        files = make_corpus_tasks(folder / f"{name}{number}", documents)
        (file,) = (Path(each) for each in files if Path(each).stem == kind)
        text = file.read_text().replace(f"task: {kind}\n", f"task: {kind}{number}\n")
        member = folder / f"{name}-{kind}{number}.yaml"
        member.write_text(text)
        members.append(member.name)
    metrics = [
        {"metric": metric, "aggregation": "mean", "weight_by_size": True}
        for metric in METRICS[kind]
    ]
    group = folder / f"{name}.yaml"
    content = {"group": name, "task": members, "aggregate_metric_list": metrics}
    group.write_text(yaml.safe_dump(content))
    return str(group)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of lm-eval: `base`, and `worse` with a loss on each third document."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("groups")
    groups = [make_corpus_group(folder, kind, SIZES, f"{kind}_group") for kind in METRICS]
    groups.append(make_corpus_group(folder, "pages", (6,) * MANY, "many_group"))
    tasks = read_tasks(groups).write(folder / "resolved")
    wrong = {folder / "base": (), folder / "worse": tuple(range(0, max(SIZES), 3))}
    run_lm_eval(tasks, wrong, "tests.scores.translator")
    return folder


@pytest.fixture(scope="module")
def verdict(runs: Path) -> Verdict:
    return decide(runs / "base", runs / "worse", margin=None, alpha=0.05)


def content(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(results_file(folder).read_text())
    return loaded


def by_name(verdict: Verdict) -> dict[str, TaskVerdict]:
    return {task.task: task for task in verdict.tasks}


def test_group_counts_as_one_task(verdict: Verdict) -> None:
    groups = by_name(verdict)
    assert set(groups) == {f"{kind}_group" for kind in METRICS} | {"many_group"}
    assert [
        groups[name].metric for name in ("pages_group", "labels_group", "translation_group")
    ] == [
        "word_perplexity",
        "f1",
        "bleu",
    ]
    for kind in METRICS:
        group = groups[f"{kind}_group"]
        assert group.documents == sum(SIZES)
        assert group.clusters is None
        assert group.outcome == "FAIL"
        members = [each for each in group.also if each.task != group.task]
        assert [each.documents for each in members] == [*SIZES]
    assert groups["many_group"].clusters == MANY


def test_values_are_lm_evals(runs: Path, verdict: Verdict) -> None:
    recorded = [content(runs / name)["groups"] for name in ("base", "worse")]
    checked = set()
    for group in verdict.tasks:
        comparisons: list[TaskVerdict | Comparison] = [group, *group.also]
        for shown in comparisons:
            recorded_as = f"{shown.metric},none"
            is_perplexity = shown.metric == "word_perplexity"
            if is_perplexity or recorded_as not in recorded[0].get(shown.task, {}):
                continue
            checked.add(shown.metric)
            for value, side in zip((shown.baseline, shown.candidate), recorded, strict=True):
                number = value if isinstance(value, float) else value.value
                expected = side[shown.task][recorded_as]
                assert number == pytest.approx(expected, rel=1e-9)
    assert checked >= {"bits_per_byte", "f1", "mcc", "brier_score", "bleu", "ter"}


def test_perplexity_is_the_geometric_mean(runs: Path, verdict: Verdict) -> None:
    group = by_name(verdict)["pages_group"]
    logs = []
    for name in ("base", "worse"):
        results = content(runs / name)["results"]
        tasks = [each for each in results if each.startswith("pages_group::")]
        values = [results[each]["word_perplexity,none"] for each in tasks]
        logs.append(np.average(np.log(values), weights=SIZES))
    assert group.baseline.value == pytest.approx(math.exp(logs[0]), rel=1e-9)
    assert group.candidate.value == pytest.approx(math.exp(logs[1]), rel=1e-9)
    assert group.difference == pytest.approx(logs[0] - logs[1], rel=1e-9)
    assert group.baseline.low < group.baseline.value < group.baseline.high
    assert group.unit == "nats per word"
    assert group.margin == pytest.approx(math.log(1.01))


def test_interval_has_the_standard_error_of_the_tasks(runs: Path, verdict: Verdict) -> None:
    """Documents are drawn within tasks, so the variances of the tasks' differences add up."""
    old, new = (read_lm_eval(runs / name) for name in ("base", "worse"))
    pairs = {pair.task: pair for pair in gated_tasks(old, new, {})}
    for kind in METRICS:
        name = f"{kind}_group"
        parts = [pair for pair in pairs[name].informational if pair.task != name]
        variances = [_variance(part) for part in parts]
        shares = np.array(SIZES) / sum(SIZES)
        error = math.sqrt(float((shares**2 * variances).sum()))
        task = by_name(verdict)[name]
        width = task.high - task.low
        # The bounds are wider if few documents have most of the influence.
        narrow = 2 * stats.norm.isf(0.05) * error
        assert 0.8 * narrow <= width <= 1.35 * narrow


def _variance(pair: TaskPair) -> float:
    """Return the jackknife's variance of a task's difference."""
    assert pair.corpus is not None
    differences = pair.corpus.jackknife[1] - pair.corpus.jackknife[0]
    count = len(differences)
    return float((count - 1) / count * ((differences - differences.mean()) ** 2).sum())


def test_margins_are_given_by_group(runs: Path) -> None:
    folders = runs / "base", runs / "worse"
    lenient = decide(*folders, margin={"pages_group": "50%"}, alpha=0.05)
    assert by_name(lenient)["pages_group"].outcome == "PASS"
    for margin in ({"pages_group::pages0": "1%"}, {"pages_group": 0.02}):
        with pytest.raises(InputError, match="pages_group"):
            decide(*folders, margin=margin, alpha=0.05)


def test_equal_answers_pass(runs: Path) -> None:
    equal = by_name(decide(runs / "base", runs / "base", margin=None, alpha=0.05))
    assert all(task.difference == 0 for task in equal.values())
    assert equal["pages_group"].outcome == equal["translation_group"].outcome == "PASS"


def test_reports_show_perplexities(verdict: Verdict) -> None:
    group = by_name(verdict)["pages_group"]
    assert group.baseline.value > 1
    for format_ in ("text", "markdown", "html"):
        text = render_verdicts([verdict], format_).replace("\\", "")
        assert "pages_group" in text
        assert f"{group.baseline.value:.3g}"[:3] in text
