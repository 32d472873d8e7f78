"""Results without samples: an unpaired test, what it costs, and its error rates."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from vexport.errors import InputError
from vexport.evaluation.results import read_results
from vexport.evaluation.unpaired import UnpairedTask, join_unpaired
from vexport.evaluation.verdict import decide
from vexport.types import Verdict


@pytest.fixture
def bare(lm_eval_runs: Path, tmp_path: Path) -> Path:
    """Copies of the runs with the results alone, as lm-eval leaves them without --log_samples."""
    for name in ("baseline", "twin", "worse"):
        shutil.copytree(lm_eval_runs / name, tmp_path / name)
        for file in (tmp_path / name).rglob("samples_*.jsonl"):
            file.unlink()
    return tmp_path


def edit(folder: Path, task: str, **values: object) -> None:
    file = read_results(folder).file
    content = json.loads(file.read_text())
    content["results"][task] |= {name.replace("__", ","): value for name, value in values.items()}
    file.write_text(json.dumps(content))


def only(folder: Path, task: str) -> None:
    file = read_results(folder).file
    content = json.loads(file.read_text())
    content["configs"] = {task: content["configs"][task]}
    file.write_text(json.dumps(content))


def compare(folder: Path, name: str = "worse") -> Verdict:
    return decide(folder / "baseline", folder / name, margin=0.02, alpha=0.05)


def test_means_alone_give_newcombes_interval_and_a_warning(bare: Path) -> None:
    for name in ("baseline", "worse"):
        only(bare / name, "sums")
    verdict = compare(bare)
    (task,) = verdict.tasks
    assert (task.baseline.value, task.candidate.value, task.documents) == (0.9875, 0.8575, 400)
    # R, PropCIs::diffscoreci's neighbour DescTools::BinomDiffCI(343, 400, 395, 400, 0.9, "score").
    low1, high1, low2, high2 = (
        getattr(stats.binomtest(k, 400).proportion_ci(0.9, method="wilson"), end)
        for k in (395, 343)
        for end in ("low", "high")
    )
    assert task.low == pytest.approx(-0.13 - math.hypot(0.8575 - low2, high1 - 0.9875))
    assert task.high == pytest.approx(-0.13 + math.hypot(high2 - 0.8575, 0.9875 - low1))
    assert (task.outcome, task.flip_rate, task.mcnemar_p, task.flips) == ("FAIL", None, None, ())
    assert "unpaired Newcombe interval" in verdict.method
    (warning,) = verdict.warnings
    assert "needs 2.7 times the documents that pairs need where 5% of the answers change" in warning


def test_one_side_without_samples_is_enough_to_lose_the_pairs(lm_eval_runs: Path, bare: Path) -> None:
    edit(bare / "worse", "near", nearness_stderr__none=0.01)
    verdict = decide(lm_eval_runs / "baseline", bare / "worse", margin=0.25, alpha=0.05)
    assert {task.flip_rate for task in verdict.tasks} == {None}
    near = verdict.tasks[-1]
    assert near.low < near.difference < near.high


def test_a_standard_error_makes_any_metric_comparable(bare: Path) -> None:
    for name, value in (("baseline", 61.0), ("worse", 60.0)):
        only(bare / name, "near")
        edit(bare / name, "near", nearness__none=value, nearness_stderr__none=0.5)
    (task,) = compare(bare).tasks
    spread = 1.6448536 * math.hypot(0.5, 0.5)
    assert (task.low, task.high) == pytest.approx((-1 - spread, -1 + spread))
    assert (task.outcome, task.documents_needed) == ("INCONCLUSIVE", 1288)  # 400 (2.4865 * .7071 / .98)^2


def test_a_mean_without_a_standard_error_is_refused_unless_it_is_a_share(bare: Path) -> None:
    with pytest.raises(InputError, match="task near: got no samples, and no mean with a standard error"):
        compare(bare)


def test_groups_weigh_their_tasks_by_documents() -> None:
    def task(name: str, documents: int, means: tuple[float, float]) -> UnpairedTask:
        return UnpairedTask(
            task=name,
            metric="acc",
            filter="none",
            sign=1,
            documents=(documents, documents),
            means=means,
            variances=(means[0] * (1 - means[0]), means[1] * (1 - means[1])),
            binary=True,
        )

    joined = join_unpaired("all", [task("a", 300, (0.5, 0.4)), task("b", 100, (0.9, 0.9))])
    assert joined.documents == (400, 400)
    assert joined.means == pytest.approx((0.6, 0.525))


@pytest.mark.parametrize("mean", [0.75, 0.97])
def test_unpaired_bounds_err_as_promised(mean: float) -> None:
    """4000 draws of 800 documents a side, true loss 2 points: 5 % within 4 standard errors (1.4 points)."""
    rng = np.random.default_rng(3)
    counts = rng.binomial(800, [mean, mean - 0.02], (4000, 2)) / 800
    bounds = [
        UnpairedTask(
            task="t",
            metric="acc",
            filter="none",
            sign=1,
            documents=(800, 800),
            means=(float(old), float(new)),
            variances=(old * (1 - old), new * (1 - new)),
            binary=True,
        ).interval(0.05)
        for old, new in counts
    ]
    assert np.mean([bound.low > -0.02 for bound in bounds]) == pytest.approx(0.05, abs=0.014)
    assert np.mean([bound.high < -0.02 for bound in bounds]) == pytest.approx(0.05, abs=0.014)
