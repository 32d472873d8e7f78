"""Directions of metrics: stated by the harness or the user, defined by the name, or assumed."""

import json
import shutil
from pathlib import Path

import pytest

from tests.command import Ran, vexport
from tests.scores.make import edit_results
from tests.scores.test_harnesses import FILES, write_lines, write_lm_eval
from tests.texts import assert_contains, breaks
from vexport.errors import InputError
from vexport.judge.accepting import accept_results
from vexport.judge.verdict import decide
from vexport.records import Verdict
from vexport.records.chosen_metric import parse_chosen_metric
from vexport.rules import baseline, margin, pairs
from vexport.scores.metrics import is_no_share, known_direction
from vexport.scores.readers.accepted import choice_of, read_accepted

DOCUMENTS = 300


def values(level: float) -> list[float]:
    """Return a score for each document, around a level."""
    return [level + (number % 9) / 200 for number in range(DOCUMENTS)]


def plain(file: Path, level: float, **fields: object) -> Path:
    rows = [
        {"task": "speech", "id": number, "score": value, **fields}
        for number, value in enumerate(values(level))
    ]
    return write_lines(file, rows)


def reviews(folder: Path, metric: str, level: float) -> Path:
    rows = [
        {
            "index": number,
            "messages": [],
            "sample_score": {"score": {"value": {metric: value}}, "group_id": number},
        }
        for number, value in enumerate(values(level))
    ]
    write_lines(folder / "reviews" / "m" / "speech.jsonl", rows)
    return folder


def verdict_of(baseline: Path, candidate: Path, **gate: str) -> Verdict:
    return decide(baseline, candidate, margin=None, alpha=0.05, gate=gate)


def is_assumed(verdict: Verdict) -> bool:
    (task,) = verdict.tasks
    return task.direction_assumed


@pytest.mark.parametrize("metric", ["Character-Error-Rate", "toxicity", "cer_free", "no loss"])
def test_unknown_name_is_assumed(metric: str, tmp_path: Path) -> None:
    sides = reviews(tmp_path / "a", metric, 0.2), reviews(tmp_path / "b", metric, 0.4)
    verdict = verdict_of(*sides)
    assert verdict.outcome == "PASS"
    assert is_assumed(verdict)
    assert any(f"direction of {metric} is assumed" in text for text in verdict.warnings)
    lower = verdict_of(*sides, speech=f"{metric}:lower")
    assert lower.outcome == "FAIL"
    assert not is_assumed(lower)
    assert lower.warnings == ()


@pytest.mark.parametrize(
    ("metric", "outcome"),
    [("Cer", "FAIL"), ("EDIT DISTANCE", "FAIL"), ("Error.Rate", "FAIL"), ("ExactMatch", "PASS")],
)
def test_names_are_compared_whole(metric: str, outcome: str, tmp_path: Path) -> None:
    sides = reviews(tmp_path / "a", metric, 0.2), reviews(tmp_path / "b", metric, 0.4)
    verdict = verdict_of(*sides)
    assert (verdict.outcome, is_assumed(verdict)) == (outcome, False)


def test_user_overrides_name(tmp_path: Path) -> None:
    sides = reviews(tmp_path / "a", "wer", 0.2), reviews(tmp_path / "b", "wer", 0.4)
    assert verdict_of(*sides, speech="wer:higher,none").outcome == "PASS"


def test_known_names() -> None:
    assert known_direction("Word Perplexity") is False
    assert known_direction("pass@1") is True
    assert known_direction("ter_free") is None
    assert is_no_share("Brier-Score")


def test_field_of_json_lines(tmp_path: Path) -> None:
    base = plain(tmp_path / "base.jsonl", 3.0, higher_is_better=False)
    worse = plain(tmp_path / "worse.jsonl", 3.4, higher_is_better=False)
    verdict = verdict_of(base, worse)
    assert (verdict.outcome, is_assumed(verdict)) == ("FAIL", False)


def test_one_side_states_direction(tmp_path: Path) -> None:
    stated = plain(tmp_path / "base.jsonl", 3.0, higher_is_better=False)
    silent = plain(tmp_path / "worse.jsonl", 3.4)
    assert verdict_of(stated, silent).outcome == "FAIL"
    assert verdict_of(silent, stated).outcome == "PASS"
    assert not is_assumed(verdict_of(silent, stated))


def test_contradictory_directions(tmp_path: Path) -> None:
    lower = plain(tmp_path / "lower.jsonl", 3.0, higher_is_better=False)
    higher = plain(tmp_path / "higher.jsonl", 3.4, higher_is_better=True)
    with breaks(pairs.OTHER_DIRECTION):
        verdict_of(lower, higher)
    with breaks(margin.DIRECTION, "score:higher", "score:lower"):
        verdict_of(lower, lower, speech="score:higher")
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(lower.read_text().replace("false", "true", 1))
    with pytest.raises(InputError, match="the same direction in all rows"):
        verdict_of(mixed, mixed)
    odd = plain(tmp_path / "odd.jsonl", 3.0, higher_is_better="no")
    with pytest.raises(InputError, match="a row without usable higher_is_better"):
        verdict_of(odd, odd)


@pytest.mark.parametrize("format_", ["text", "json", "markdown", "html", "junit", "github"])
def test_assumption_is_in_every_format(format_: str, tmp_path: Path) -> None:
    sides = plain(tmp_path / "base.jsonl", 3.0), plain(tmp_path / "new.jsonl", 3.4)
    ran = vexport("verdict", *sides, "--format", format_)
    assert_contains(ran.stdout, "direction assumed")


def test_gate_option(tmp_path: Path) -> None:
    sides = plain(tmp_path / "base.jsonl", 3.0), plain(tmp_path / "new.jsonl", 3.4)

    def run(gate: str) -> Ran:
        return vexport("verdict", *sides, "--gate", gate)

    assert run("score:lower").code == 1
    assert run("speech=score:lower,none").code == 1
    assert run("speech=score:higher").code == 0
    assert_contains(run("speech=:lower").stderr, "need [TASK=]METRIC")
    assert_contains(run("score:down").stderr, "score:down", "[margin/no-metric]")


@pytest.mark.parametrize(
    "metric",
    [
        {"metric_name": "em", "higher_is_better": False},
        {"metric_name": ["em", "qem"], "higher_is_better": {"em": False, "qem": True}},
    ],
)
def test_lighteval_states_direction(metric: dict[str, object], tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    shutil.copytree(FILES / "lighteval", tmp_path, dirs_exist_ok=True)
    base, new = tmp_path / "base", tmp_path / "new"
    silent = verdict_of(base, new)
    assert is_assumed(silent)
    (file,) = base.rglob("results_*.json")
    content = json.loads(file.read_text())
    content["config_tasks"] = {"sums|0": {"metrics": [metric]}}
    file.write_text(json.dumps(content))
    stated = verdict_of(base / "details", new)
    assert not is_assumed(stated)
    assert stated.tasks[0].difference == -silent.tasks[0].difference


def test_chosen_metric() -> None:
    assert parse_chosen_metric("pass@k:k=1,strict") == ("pass@k:k=1,strict", None)
    assert parse_chosen_metric("pass@k:k=1:lower,strict") == ("pass@k:k=1,strict", False)
    assert parse_chosen_metric("a,b:higher").label == "a,b"


def test_lm_eval_without_direction(tmp_path: Path) -> None:
    """lm-eval records null for a metric of Python code that states no direction."""
    scores = {(number, 0): int(number % 5 > 0) for number in range(DOCUMENTS)}
    folder = write_lm_eval(tmp_path / "run", scores)

    def rename(content: dict[str, object]) -> None:
        content["higher_is_better"] = {"sums": {"graded": None}}

    edit_results(folder, rename)
    (samples,) = folder.glob("samples_*.jsonl")
    samples.write_text(samples.read_text().replace("exact_match", "graded"))
    assert is_assumed(verdict_of(folder, folder))

    accept_results(folder, tmp_path / "accepted.json", {})
    assert read_accepted(tmp_path / "accepted.json").tasks["sums"].higher_is_better is None
    assert is_assumed(verdict_of(tmp_path / "accepted.json", folder))
    assert not is_assumed(verdict_of(tmp_path / "accepted.json", folder, sums="graded:lower"))

    accept_results(folder, tmp_path / "lower.json", {"sums": "graded:lower"})
    stored = read_accepted(tmp_path / "lower.json")
    assert choice_of(stored) == {"sums": "graded:lower,none"}
    with breaks(baseline.OTHER_SETTING, "sums=graded:lower,none"):
        verdict_of(tmp_path / "lower.json", folder, sums="graded:higher")
    content = json.loads((tmp_path / "lower.json").read_text())
    assert content["tasks"]["sums"]["higher_is_better"] is False
