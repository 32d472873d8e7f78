"""Groups of tasks: lm-eval's results, the metric that decides, and clustered documents."""

import json
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.scores.make import edit_results, make_group, run_lm_eval
from tests.texts import assert_contains, breaks
from vexport.inference.tasks import read_tasks
from vexport.judge.pairs import TaskPair, gated_tasks, pool
from vexport.judge.statistics import (
    bootstrap_interval,
    clustered_tango,
    design_effect,
    tango_interval,
)
from vexport.judge.verdict import decide
from vexport.rules import margin
from vexport.rules.book import Rule
from vexport.scores.aggregates import Scores
from vexport.scores.readers.lm_eval import read_lm_eval

pytestmark = pytest.mark.slow
SUBJECTS, DOCUMENTS = 12, 30
THREE_SUBJECTS: dict[str, object] = {f"subjects::subject{number}": {} for number in range(3)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two runs of a group of 12 subjects with 30 documents each.

    `baseline` answers one document of each subject wrong, `worse` five.
    """
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("group")
    (group,) = read_tasks([make_group(folder / "tasks", SUBJECTS, DOCUMENTS)]).write(
        folder / "resolved"
    )
    run_lm_eval([group], {folder / "baseline": [0], folder / "worse": range(5)})
    return folder


def test_group_is_clustered_by_subject(runs: Path) -> None:
    verdict = decide(runs / "baseline", runs / "worse", margin=0.02, alpha=0.05)
    (task,) = verdict.tasks
    assert (task.task, task.metric, task.documents, task.clusters) == (
        "subjects",
        "acc",
        360,
        SUBJECTS,
    )
    assert (task.outcome, task.changes.right_to_wrong) == ("FAIL", 48)
    assert_contains(verdict.method, "Tango's score interval", "clustered by task")
    aggregate = json.loads(read_lm_eval(runs / "worse").file.read_text())["groups"]["subjects"][
        "acc,none"
    ]
    assert task.candidate.value == pytest.approx(aggregate)
    names = [(metric.task, metric.metric) for metric in task.also]
    assert names[0] == ("subjects", "acc_norm")
    assert set(names[1:]) == {(f"subjects::subject{number}", "acc") for number in range(SUBJECTS)}
    assert sum(metric.documents for metric in task.also[1:]) == task.documents


def test_few_subjects_are_not_clustered(runs: Path, tmp_path: Path) -> None:
    """Three subjects are too few to estimate the variance between subjects."""
    for name in ("baseline", "worse"):
        shutil.copytree(runs / name, tmp_path / name)
        edit_results(tmp_path / name, lambda content: content.update(configs=THREE_SUBJECTS))
    (task,) = decide(tmp_path / "baseline", tmp_path / "worse", margin=0.02, alpha=0.05).tasks
    assert (task.documents, task.clusters) == (3 * DOCUMENTS, None)
    assert task.low == pytest.approx(tango_interval(0, 12, 90, 0.05).low)


@pytest.mark.parametrize("choice", [{"subjects": "acc_norm"}, {"*": "acc_norm,none"}])
def test_gate_chooses_metric(runs: Path, choice: dict[str, str]) -> None:
    results = read_lm_eval(runs / "baseline")
    (gated,) = gated_tasks(results, results, choice)
    assert gated.label == "acc_norm,none"
    assert gated.informational[0].label == "acc,none"


@pytest.mark.parametrize(
    ("choice", "rule", "parts"),
    [
        ({"subjects": "f1"}, margin.NO_METRIC, ["subjects", "f1", "acc,none", "acc_norm,none"]),
        ({"*": "f1"}, margin.NO_METRIC, ["f1"]),
        ({"subject1": "acc"}, margin.NO_TASK, ["subject1", "subjects"]),
    ],
)
def test_unknown_gate_is_refused(
    runs: Path, choice: dict[str, str], rule: Rule, parts: list[str]
) -> None:
    with breaks(rule, *parts):
        decide(runs / "baseline", runs / "worse", margin=0.02, alpha=0.05, gate=choice)


def paired(gain: Scores, clusters: np.ndarray[tuple[int], np.dtype[np.intp]] | None) -> TaskPair:
    score = partial(TaskPair, task="t", metric="m", filter="none", sign=1, documents=())
    return score(baseline=np.zeros(len(gain)), candidate=gain, clusters=clusters)


def test_pool_keeps_clusters() -> None:
    joined = pool("all", [paired(np.zeros(4), np.array([0, 0, 1, 1])), paired(np.ones(3), None)])
    assert joined.clusters is not None
    assert joined.clusters.tolist() == [0, 0, 1, 1, 2, 3, 4]


def test_design_effect_is_sandwich_ratio() -> None:
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(20), 30)
    gain = rng.choice([-1.0, 0, 1], 600, p=[0.1, 0.85, 0.05]) + (clusters % 4 == 0) * -0.5
    residual_sums = [float((gain[clusters == k] - gain.mean()).sum()) for k in range(20)]
    sandwich = 20 / 19 * math.fsum(value**2 for value in residual_sums) / 600**2
    assert design_effect(gain, clusters) == pytest.approx(sandwich / (gain.var() / 600))
    assert design_effect(gain, rng.permutation(clusters)) < 2


def draw_losses(
    rng: np.random.Generator, sizes: Sequence[int], loss: float, spread: float
) -> Scores:
    """Draw losses of clustered documents.

    The clusters' rates are beta-distributed with mean `loss`.
    """
    rates = rng.beta(loss / spread, (1 - loss) / spread, len(sizes))
    return np.concatenate(
        [-(rng.random(size) < rate).astype(float) for size, rate in zip(sizes, rates, strict=True)]
    )


def test_clustered_bounds_keep_error_rate() -> None:
    """Simulate 2000 times 40 subjects of different sizes, at a true loss that equals the margin.

    Clustered bounds miss at most 5 %, plus 3 standard errors (1.5 points). Plain bounds miss much
    more often.
    """
    rng = np.random.default_rng(1)
    sizes = rng.integers(30, 120, 40).tolist()
    clusters = np.repeat(np.arange(40), sizes)
    wrong = plain_wrong = 0
    for _ in range(2000):
        gain = draw_losses(rng, sizes, 0.05, 0.02)
        wrong += clustered_tango(gain, clusters, 0.05).low > -0.05
        plain_wrong += tango_interval(0, int(-gain.sum()), len(gain), 0.05).low > -0.05
    assert wrong / 2000 < 0.05 + 0.015
    assert plain_wrong / 2000 > 0.10


def test_cluster_bootstrap_agrees_with_student() -> None:
    rng = np.random.default_rng(2)
    clusters = np.repeat(np.arange(60), 20)
    values = rng.normal(0, 0.05, 60)[clusters] + rng.normal(0, 0.05, 1200)
    means = values.reshape(60, 20).mean(1)
    spread = float(stats.t.isf(0.05, 59)) * means.std(ddof=1) / math.sqrt(60)
    low, high = bootstrap_interval(values, 0.05, span=1, clusters=clusters)
    assert (low, high) == pytest.approx((means.mean() - spread, means.mean() + spread), abs=1.5e-3)
    low, high = bootstrap_interval(np.full(50, 0.25), 0.05, span=1, clusters=np.arange(50) // 5)
    quiet = tango_interval(0, 0, 50, 0.05)
    assert (low, high) == pytest.approx((0.25 + quiet.low, 0.25 + quiet.high))
