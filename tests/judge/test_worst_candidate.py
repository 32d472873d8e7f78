"""A PASS that could not have been a FAIL is no PASS."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.scores.test_harnesses import write_lines, write_lm_eval
from tests.texts import assert_contains
from vexport.errors import InputError
from vexport.judge.accepted_settings import with_accepted_settings
from vexport.judge.accepting import accept_results
from vexport.judge.corpus import compare_corpora
from vexport.judge.pairs import TaskPair
from vexport.judge.task_verdict import compare_task
from vexport.judge.verdict import decide, tasks_without_loss
from vexport.judge.worst_candidate import with_worst_candidate
from vexport.records import Json, TaskVerdict, Verdict
from vexport.records.margin import Margins, MarginSetting
from vexport.scenario import Serve
from vexport.scores.aggregates import tabulate
from vexport.scores.readers.accepted import read_accepted
from vexport.scores.table import Row


def sample(number: int, options: int = 0) -> Row:
    return Row(
        doc_id=number,
        filter="none",
        hashes=("", "", ""),
        prompt="",
        target="",
        shown_text="",
        compared_text=None,
        scores={},
        options=options,
    )


def pair_of(
    baseline: Sequence[float], candidate: Sequence[float], *, options: int = 0, sign: int = 1
) -> TaskPair:
    samples = [sample(number, options) for number in range(len(baseline))]
    return TaskPair(
        task="held",
        metric="graded",
        filter="none",
        sign=sign,
        documents=tuple((one, one) for one in samples),
        baseline=np.array(baseline, dtype=np.float64),
        candidate=np.array(candidate, dtype=np.float64),
    )


def judged(pair: TaskPair, margin: MarginSetting = 0.02) -> TaskVerdict:
    return compare_task(pair, margins=Margins.read(margin), alpha=0.05, fail_alpha=0.05)


def obstacle_of(task: TaskVerdict) -> str:
    assert task.obstacle is not None
    return task.obstacle.text


def corpus_pair(aggregation: str, values: Sequence[Json]) -> TaskPair:
    """Pair a model with itself on a metric of the whole corpus."""
    table = tabulate(aggregation, aggregation, values, values)
    corpus = compare_corpora(table)
    pair = pair_of(corpus.influence[0].tolist(), corpus.influence[1].tolist())
    return replace(
        pair,
        metric=aggregation,
        sign=1 if table.higher_is_better else -1,
        own_unit=table.unit,
        corpus=corpus,
    )


def test_nothing_to_lose() -> None:
    """Two of 500 responses are correct. The margin is larger than the whole score."""
    scores = [1.0, 1.0, *[0.0] * 498]
    found = judged(pair_of(scores, [0.0] * 500))
    assert found.outcome == "INCONCLUSIVE"
    assert_contains(obstacle_of(found), "0.4%", "worst candidate loses only 0.4 points")


def test_error_rate_near_its_limit() -> None:
    """Lower is better, and the worst value is 1."""
    rates = [0.99, 1.0, 1.0, 0.98] * 100
    assert judged(pair_of(rates, rates, sign=-1)).outcome == "INCONCLUSIVE"
    low = [0.1, 0.2, 0.0, 0.15] * 100
    assert judged(pair_of(low, low, sign=-1)).outcome == "PASS"


@pytest.mark.parametrize(("right", "outcome"), [(0.5, "INCONCLUSIVE"), (0.65, "PASS")])
def test_guessing(right: float, outcome: str) -> None:
    """A model that guesses is right in half of the documents with two options."""
    scores = [float(number % 100 < 100 * right) for number in range(1000)]
    pair = pair_of(scores, scores, options=2)
    found = judged(pair)
    assert found.outcome == outcome
    worst = with_worst_candidate(pair)
    assert worst is not None
    assert worst.candidate_value == 0.5
    if outcome == "INCONCLUSIVE":
        assert_contains(obstacle_of(found), "guessing 50%", "likely cause")


@pytest.mark.parametrize(
    ("right", "options", "margin", "cause"),
    [
        (160, 0, 0.85, "likely cause is the margin"),
        (170, 2, 0.4, "likely cause is the margin"),
        (1, 0, 0.05, "likely cause is that there are too few documents"),
        (0, 0, 0.05, "a task that is too hard"),
    ],
)
def test_cause_depends_on_the_score(right: int, options: int, margin: float, cause: str) -> None:
    """A task that the baseline does well is not too hard."""
    scores = [float(number < right) for number in range(1 if right == 1 else 200)]
    found = judged(pair_of(scores, scores, options=options), margin)
    assert found.outcome == "INCONCLUSIVE"
    assert_contains(obstacle_of(found), cause)
    assert ("too hard" in obstacle_of(found)) == ("too hard" in cause)


def test_documents_that_would_show_a_loss() -> None:
    """The score is above the margin, but its lower bound is not."""
    scores = [float(number % 40 == 0) for number in range(300)]
    found = judged(pair_of(scores, scores))
    assert found.outcome == "INCONCLUSIVE"
    assert_contains(obstacle_of(found), "documents or a margin below", "would show a loss")
    more = [float(number % 40 == 0) for number in range(9000)]
    assert judged(pair_of(more, more)).outcome == "PASS"
    margin = float(obstacle_of(found).split("margin below ")[1].split()[0]) / 100
    worst = judged(pair_of(scores, [0.0] * 300), margin=margin)
    assert worst.outcome == "FAIL"


def test_unbounded_metrics() -> None:
    ratings = [7.5, 3.25, 9.0, 4.5] * 50
    pair = pair_of(ratings, ratings)
    assert with_worst_candidate(pair) is None
    assert judged(pair, "1%").obstacle is None


def test_informative_corpus_metrics() -> None:
    right = [[number % 2, number % 2] for number in range(400)]
    values: dict[str, list[Json]] = {
        "f1": [
            [gold, chosen if number % 9 else 1 - chosen]
            for number, (gold, chosen) in enumerate(right)
        ],
        "matthews_corrcoef": [[gold, chosen] for gold, chosen in right],
        "brier_score": [[gold, [0.9 - 0.8 * gold, 0.1 + 0.8 * gold]] for gold, _ in right],
        "bleu": [["the cat sees a dog", "the cat sees a dog"]] * 400,
    }
    for aggregation, stored in values.items():
        if aggregation == "bleu":
            pytest.importorskip("sacrebleu")
        pair = corpus_pair(aggregation, stored)
        worst = with_worst_candidate(pair)
        assert worst is not None
        assert judged(pair, "1%").obstacle is None, aggregation
        expected = {"brier_score": 2.0}.get(aggregation, 0.0)
        assert worst.candidate_value == pytest.approx(expected), aggregation


def test_corpus_metric_of_a_model_without_skill() -> None:
    """The labels are independent of the correct labels, so the correlation is about 0."""
    draw = np.random.default_rng(3).integers(0, 2, size=(300, 2)).tolist()
    draw = [[gold, chosen] for gold, chosen in draw]
    found = judged(corpus_pair("matthews_corrcoef", draw), "99%")
    assert found.outcome == "INCONCLUSIVE"
    assert found.obstacle is not None


def refusals(folder: Path, *, targets: Sequence[str], answer: str, right: int) -> Path:
    """Write results of lm-eval in which all responses are the same."""
    scores = {(number, 0): int(number % 10 < right) for number in range(200)}
    written = write_lm_eval(folder, scores)
    (file,) = written.glob("samples_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for number, row in enumerate(rows):
        given = answer if number % 20 else f"{number}"
        row |= {"target": targets[number % len(targets)]}
        row |= {"resps": [[given]], "filtered_resps": [given]}
    write_lines(file, rows)
    return written


def test_same_response_to_every_document(tmp_path: Path) -> None:
    run = refusals(tmp_path / "a", targets=["yes", "no", "yes"], answer="yes", right=7)
    (warning,) = decide(run, run, margin=0.05, alpha=0.05).warnings
    assert_contains(warning, "sums: both models give the same response ('yes')", "90%")


def test_same_response_to_uniform_targets(tmp_path: Path) -> None:
    run = refusals(tmp_path / "a", targets=["yes"], answer="yes", right=10)
    assert decide(run, run, margin=0.05, alpha=0.05).warnings == ()
    other = refusals(tmp_path / "b", targets=["yes"], answer="no", right=10)
    assert decide(run, other, margin=0.05, alpha=0.05).warnings == ()


def weak(folder: Path, right: int) -> Path:
    """Write results in which `right` of 500 responses are correct."""
    scores = {(number, 0): int(number < right) for number in range(500)}
    return write_lm_eval(folder, scores)


def test_acceptance_of_a_weak_baseline(tmp_path: Path) -> None:
    file = tmp_path / "accepted.json"
    accept_results(weak(tmp_path / "a", 4), file, {})
    (described,) = tasks_without_loss(file, tmp_path / "a", 0.05)
    assert_contains(described, "sums cannot show a loss", "0.8%")
    accept_results(weak(tmp_path / "b", 300), tmp_path / "good.json", {})
    assert [*tasks_without_loss(tmp_path / "good.json", tmp_path / "b", 0.05)] == []


def test_margin_is_stored(tmp_path: Path) -> None:
    run, file = weak(tmp_path / "a", 300), tmp_path / "accepted.json"
    assert accept_results(run, tmp_path / "default.json", {}).margin == 0.02
    accept_results(run, file, {}, {"tasks": ["sums"]}, margin={"sums": 0.07})
    assert read_accepted(file).margin == 0.07

    def against(margin: float | None) -> Verdict:
        return decide(file, run, margin=margin, alpha=0.05)

    assert (against(None).tasks[0].margin, against(None).warnings) == (0.07, ())
    assert against(0.07).warnings == ()
    wider = against(0.1)
    assert wider.tasks[0].margin == 0.1
    assert wider.warnings == ("sums: margin 0.1, and the baseline was accepted with 0.07",)


def test_stored_margin_is_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, file = weak(tmp_path / "a", 300), tmp_path / "accepted.json"
    (tmp_path / "sums.yaml").write_text("task: sums\n")
    accept_results(run, file, {}, {"tasks": ["./sums.yaml"]}, margin=0.07)
    filled = with_accepted_settings({}, Serve(), file, command="eval")
    assert (filled.keys["margin"], filled.filled["margin"]) == (0.07, 0.07)
    given = with_accepted_settings({"margin": 0.1}, Serve(), file, command="eval")
    assert given.keys["margin"] == 0.1
    assert "margin" not in given.filled


@pytest.mark.parametrize("margin", [2, "a lot", {"sums": -1}])
def test_damaged_margin(margin: Json, tmp_path: Path) -> None:
    file = tmp_path / "accepted.json"
    accept_results(weak(tmp_path / "a", 300), file, {})
    content = json.loads(file.read_text())
    content["margin"] = margin
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"accepted\.json: margin: .* need a loss from 0"):
        read_accepted(file)
