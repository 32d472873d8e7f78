"""Several sampled answers per document. Each interval counts documents, not answers."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.command import vexport
from tests.scores.make import samples_file
from tests.texts import assert_contains
from vexport.inference.added_keys import SEED
from vexport.judge.statistics import clustered_tango, seeds_to_settle
from vexport.judge.verdict import decide
from vexport.records import Verdict
from vexport.reports.accuracy import accuracy_tiles
from vexport.scores.aggregates import Scores

MARGIN, ALPHA, SEEDS, TRIALS = 0.05, 0.05, 4, 1000
GRID = np.linspace(0, 1, 10001)


@cache
def quantiles(correlation: float, mean: float) -> Scores:
    size = (1 - correlation) / correlation
    found: Scores = stats.beta.ppf(GRID, mean * size, (1 - mean) * size)
    return found


def gains(
    documents: int, correlation: float, right: float, loss: float, rng: np.random.Generator
) -> Scores:
    """Draw the gains between two models on the same documents (beta-binomial).

    A document is equally difficult for both models.
    """
    difficulty = rng.random(documents)
    shares = [
        np.interp(difficulty, GRID, quantiles(correlation, mean)) for mean in (right, right - loss)
    ]
    baseline, candidate = (rng.random((documents, SEEDS)) < share[:, None] for share in shares)
    gain: Scores = (candidate.astype(float) - baseline).reshape(-1)
    return gain


@pytest.mark.parametrize(("documents", "right", "correlation"), [(50, 0.9, 0.9), (200, 0.6, 0.2)])
def test_false_alarms_stay_below_alpha(documents: int, right: float, correlation: float) -> None:
    """Simulate a loss that equals the margin, and no loss."""
    rng, clusters = np.random.default_rng(3), np.repeat(np.arange(documents), SEEDS)
    passed, failed, failed_without_loss = 0, 0, 0
    for _ in range(TRIALS):
        at_margin, equal = (
            clustered_tango(gains(documents, correlation, right, loss, rng), clusters, ALPHA, SEEDS)
            for loss in (MARGIN, 0.0)
        )
        passed += at_margin.low > -MARGIN
        failed += at_margin.high < -MARGIN
        failed_without_loss += equal.high < -MARGIN
    # A rate of alpha exceeds this count by chance in one of a thousand such tests.
    most = stats.binom.isf(0.001, TRIALS, ALPHA)
    assert max(passed, failed) <= most
    assert failed_without_loss <= TRIALS * ALPHA / 5


def test_identical_samples_add_nothing() -> None:
    """Four equal answers to a document give the interval of one answer."""
    lost = np.repeat([-1.0] * 6 + [1.0] * 2 + [0.0] * 92, SEEDS)
    clusters = np.repeat(np.arange(100), SEEDS)
    many = clustered_tango(lost, clusters, ALPHA, SEEDS)
    single = clustered_tango(lost[::SEEDS], clusters[::SEEDS], ALPHA)
    assert many == pytest.approx(single, abs=0.002)
    # If no answer changes, more samples do not narrow the interval: it depends on the documents.
    quiet = clustered_tango(np.zeros(400), clusters, ALPHA, SEEDS)
    assert quiet == pytest.approx(clustered_tango(np.zeros(100), np.arange(100), ALPHA), abs=1e-3)
    assert seeds_to_settle(100, 4, design=1.0, needed=200) == 8
    assert seeds_to_settle(100, 4, design=4.0, needed=200) is None
    assert seeds_to_settle(100, 4, design=1.75, needed=150) == 18  # 100 * 18 / (1 + 17 * .25)


def with_seeds(folder: Path, out: Path, flips: int) -> Path:
    """Write a run with two sampled answers per document.

    In the second sample, `flips` documents are wrong, beginning with number 100.
    """
    shutil.copytree(folder, out)
    file = samples_file(out)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    again = [{**row, SEED: 1} for row in rows]
    for row in again[100 : 100 + flips]:
        row["exact_match"] = 0.0
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows + again))
    return out


def sums_of(verdict: Verdict) -> tuple[int, int, float, int]:
    (task,) = (task for task in verdict.tasks if task.task == "sums")
    return task.documents, task.seeds, task.difference, task.changes.right_to_wrong


def test_verdict_of_sampled_answers(lm_eval_runs: Path, tmp_path: Path) -> None:
    baseline = with_seeds(lm_eval_runs / "baseline", tmp_path / "baseline", 0)
    candidate = with_seeds(lm_eval_runs / "twin", tmp_path / "candidate", 8)
    verdict = decide(baseline, candidate, margin=0.02, alpha=0.05)
    assert sums_of(verdict) == (400, 2, -0.01, 8)
    assert "clustered by document" in verdict.method
    tasks = tuple(task for task in verdict.tasks if task.task == "sums")
    assert accuracy_tiles(replace(verdict, tasks=tasks))[1].unit == "of 800"
    ran = vexport("verdict", lm_eval_runs / "baseline", candidate)
    assert ran.code == 2
    assert_contains(ran.stderr, "response 1 to document 0", "[pairs/missing-documents]")


def test_seeds_need_a_temperature(tmp_path: Path) -> None:
    ran = vexport("eval", tmp_path, "--baseline", tmp_path, "--task", "gsm8k", "--seeds", "4")
    assert (ran.code, "need temperature in gen_kwargs" in ran.stderr) == (2, True)
