"""Metrics of a whole corpus, against lm-eval's own aggregates and by simulation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.command import vexport
from tests.scores.corpus_tasks import make_corpus_tasks
from tests.scores.make import results_file, run_lm_eval, samples_file
from vexport.judge.corpus import bootstrap_bounds, compare_corpora
from vexport.judge.held_out import judge_limit
from vexport.judge.statistics import bca_interval
from vexport.judge.verdict import decide
from vexport.records import Comparison, TaskVerdict, Verdict
from vexport.reports import render_verdicts
from vexport.scores.aggregates import log_likelihood_table, tabulate
from vexport.scores.readers.lm_eval import read_lm_eval

pytestmark = pytest.mark.slow
DOCUMENTS = 120
Shown = TaskVerdict | Comparison


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of lm-eval: `base`, and `worse` with a loss on each third document."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("corpus")
    tasks = make_corpus_tasks(folder / "tasks", DOCUMENTS)
    wrong = {folder / "base": (), folder / "worse": tuple(range(0, DOCUMENTS, 3))}
    run_lm_eval(tasks, wrong, "tests.scores.translator")
    return folder


@pytest.fixture(scope="module")
def verdict(runs: Path) -> Verdict:
    """The verdict on `worse`."""
    return decide(runs / "base", runs / "worse", margin=None, alpha=0.05)


def comparisons(verdict: Verdict) -> list[Shown]:
    shown = list[Shown]()
    for task in verdict.tasks:
        shown += [task, *task.also]
    return shown


def aggregates(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(results_file(folder).read_text())["results"]
    return content


def test_values_are_lm_evals(runs: Path, verdict: Verdict) -> None:
    recorded = [aggregates(runs / name) for name in ("base", "worse")]
    found = comparisons(verdict)
    assert len(found) == 3 + 1 + 3 + 2 + 4
    for shown in found:
        for value, side in zip((shown.baseline, shown.candidate), recorded, strict=True):
            number = value if isinstance(value, float) else value.value
            assert number == pytest.approx(side[shown.task][f"{shown.metric},none"], rel=1e-12)


def test_values_stay_in_their_range(verdict: Verdict) -> None:
    kinds = next(task for task in verdict.tasks if task.task == "kinds")
    assert kinds.metric == "mcc"
    assert kinds.baseline.high <= 1


def test_losses_fail(verdict: Verdict) -> None:
    worse = {(shown.task, shown.metric): shown for shown in comparisons(verdict)}
    for (task, metric), shown in worse.items():
        if task == "last_word":  # wrong documents have higher log-likelihoods there
            assert shown.difference > 0
            continue
        assert shown.difference < 0, metric
        assert shown.low < shown.difference < shown.high
    assert {shown.outcome for shown in worse.values()} == {"PASS", "FAIL", "INCONCLUSIVE"}


def test_equal_answers(runs: Path) -> None:
    equal = decide(runs / "base", runs / "base", margin=None, alpha=0.05)
    same = {(shown.task, shown.metric): shown for shown in comparisons(equal)}
    assert all(shown.difference == 0 for shown in same.values())
    assert same["pages", "word_perplexity"].outcome == "PASS"
    assert same["translation", "bleu"].outcome == "PASS"
    # 120 documents without a change do not show that an F1 of 0.96 falls by less than 0.0096.
    assert same["labels", "f1"].outcome == "INCONCLUSIVE"


def test_units(verdict: Verdict) -> None:
    units = {(shown.task, shown.metric): shown.unit for shown in comparisons(verdict)}
    assert units["pages", "word_perplexity"] == "nats per word"
    assert units["pages", "byte_perplexity"] == "nats per byte"
    assert units["pages", "bits_per_byte"] == "bits per byte"
    assert {unit for (task, _), unit in units.items() if task == "translation"} == {"metric"}
    pages = next(task for task in verdict.tasks if task.task == "pages")
    ratio = pages.candidate.value / pages.baseline.value
    assert pages.difference == pytest.approx(-np.log(ratio), rel=1e-9)
    for format_ in ("text", "markdown", "html", "junit", "github"):
        text = " ".join(render_verdicts([verdict], format_).split())
        assert "nats per word" in text
        assert "1%" in text
        assert "points" not in text


def test_gate_and_margin_on_the_command_line(runs: Path) -> None:
    folders = ("verdict", str(runs / "base"), str(runs / "worse"), "--format", "json")
    gate = ("--gate", "pages=bits_per_byte")
    result = vexport(*folders, *gate, "--margin", "pages=50%", "--margin", "labels=2%")
    tasks = {task["task"]: task for task in json.loads(result.stdout)["tasks"]}
    pages = tasks["pages"]
    assert (pages["metric"], pages["outcome"]) == ("bits_per_byte", "PASS")
    assert pages["margin"] == pytest.approx(0.5 * pages["baseline"]["value"])
    assert (pages["relative_margin"], tasks["labels"]["relative_margin"]) == (0.5, 0.02)
    refused = vexport(*folders, "--margin", "0.02")
    assert refused.code == 2
    assert "--margin pages=1%" in refused.stderr
    assert vexport(*folders, "--margin", "pages=2%%").code == 2
    assert vexport(*folders, "--margin", "2%", "--margin", "1%").code == 2


def test_direction_agrees_with_text(runs: Path, verdict: Verdict) -> None:
    """The rise of the NLL per row and the word perplexity of the same rows get worse together."""
    old, new = (
        [row.values["word_perplexity"] for row in results.tasks["pages"].rows.values()]
        for results in (read_lm_eval(runs / name) for name in ("base", "worse"))
    )
    rises = [(a[0] - b[0]) / a[1] for a, b in zip(old, new, strict=True)]  # type: ignore[index,operator]
    limit = judge_limit("rise of the NLL", np.array(rises), np.log(1.01), 0.05)
    task = next(task for task in verdict.tasks if task.task == "pages")
    assert limit.outcome == task.outcome == "FAIL"
    assert np.sign(limit.value) == -np.sign(task.difference)


def test_function_in_python_is_not_lm_evals(runs: Path, tmp_path: Path) -> None:
    """A task's own aggregation under the name of lm-eval's metric gives another number."""
    values = aggregates(runs / "base")["labels"]
    content = json.loads(results_file(runs / "base").read_text())
    content["configs"]["labels"].pop("metric_list")
    content["results"]["labels"]["f1,none"] = values["f1,none"] / 2
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / results_file(runs / "base").name).write_text(json.dumps(content))
    for task in content["configs"]:
        file = samples_file(runs / "base", task)
        (folder / file.name).write_text(file.read_text())
    metrics = [
        shown.metric for shown in comparisons(decide(folder, folder, margin=None, alpha=0.05))
    ]
    assert "f1" not in metrics
    assert "mcc" in metrics


def test_bounds_are_the_wider_of_bca_and_student() -> None:
    """Both agree with scipy, up to the error of the resampling."""
    values = np.random.default_rng(3).gamma(1.0, 1.0, 300)
    table = log_likelihood_table(np.zeros(300), values, higher_is_better=True, is_perplexity=False)
    ours = compare_corpora(table).difference_interval(0.05)
    bca = bca_interval(values, 0.05)
    error = float(stats.sem(values))
    effective = 300 / stats.kurtosis(values, fisher=False)
    student = stats.t.isf(0.05, effective)
    skewed = student + stats.skew(values) / (6 * 300**0.5) * (1 + 2 * student**2)
    low = min(bca.low, values.mean() - student * error)
    high = max(bca.high, values.mean() + skewed * error)
    assert ours.low == pytest.approx(low, abs=0.06 * error)
    assert ours.high == pytest.approx(high, abs=0.06 * error)


def test_labels_have_no_uneven_influence() -> None:
    """A label is only correct or wrong: Student's bounds have the number of documents."""
    pairs: list[Any] = [[number % 2, number % 2] for number in range(40)]
    changed: list[Any] = [[number % 2, int(number % 7 == 0)] for number in range(40)]
    assert not tabulate("f1", "f1", pairs, changed).is_uneven
    assert tabulate("bleu", "bleu", [["a b", "a b"]] * 9, [["a b", "a c"]] * 9).is_uneven


def test_few_documents_are_not_enough() -> None:
    rows: list[Any] = [[-50.0 - index, 20] for index in range(3)]
    interval = compare_corpora(
        tabulate("weighted_perplexity", "word_perplexity", rows, [[a - 1, b] for a, b in rows])
    ).difference_interval(0.05)
    student = stats.t.isf(0.05, 2)
    assert interval.high - interval.low >= 0
    assert student > 2.9
    bounds = bootstrap_bounds(0.0, np.zeros(10), np.array([-1.0, 0.0, 1.0]), 0.05, is_uneven=False)
    assert bounds.high == pytest.approx(student * (2 / 3 * 2) ** 0.5)


def test_coverage() -> None:
    """Bounds of the perplexity's change cover the true change in 95 of 100 simulated corpora."""
    times, loss = 200, 0.01
    covered = 0
    for seed in range(times):
        old, new = _pages(np.random.default_rng(seed), loss)
        table = tabulate("weighted_perplexity", "word_perplexity", old, new)
        covered += compare_corpora(table).difference_interval(0.05).low <= -loss
    low, high = stats.binom.interval(0.998, times, 0.95)
    assert low <= covered <= high


def _pages(noise: np.random.Generator, loss: float) -> tuple[list[Any], list[Any]]:
    """Return 62 pages (as many as wikitext has) with log-likelihoods and numbers of words."""
    words = 1 + np.exp(noise.normal(7, 1, 62)).astype(int)
    before = -words * (3 + noise.normal(0, 0.4, 62))
    after = before - words * noise.normal(loss, 0.03, 62)
    return _weighted(before.tolist(), words.tolist()), _weighted(after.tolist(), words.tolist())


def _weighted(values: Sequence[float], words: Sequence[int]) -> list[Any]:
    return [[float(value), int(count)] for value, count in zip(values, words, strict=True)]
