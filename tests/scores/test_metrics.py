"""Metrics whose per-document values have another direction or unit than the aggregate."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.scores.make import edit_results, run_lm_eval, samples_file
from tests.texts import assert_raises, breaks
from vexport.errors import InputError
from vexport.judge.verdict import decide
from vexport.records import Verdict
from vexport.records.margin import MarginSetting
from vexport.reports import render_verdicts
from vexport.rules import margin as margin_rules
from vexport.scores.metrics import AGGREGATIONS, LOG_LIKELIHOODS, MEANS

LAST_WORD = """
task: last_word
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{a}} + {{b}} ="
doc_to_target: " {{sum}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
LOSS = 0.66


@pytest.fixture(scope="module")
def last_word(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with lm-eval's results `base` on a task like lambada."""
    folder = tmp_path_factory.mktemp("last_word")
    rows = [{"a": i % 10, "b": i // 10, "sum": i % 10 + i // 10} for i in range(60)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "last_word.yaml").write_text(LAST_WORD % (folder / "rows.jsonl"))
    run_lm_eval([str(folder / "last_word.yaml")], {folder / "base": ()})
    return folder


@pytest.fixture
def runs(last_word: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Write two runs. The second run loses LOSS nats in each document."""
    for name in ("base", "worse"):
        shutil.copytree(last_word / "base", tmp_path / name)
        _shift(tmp_path / name, -1.0 - (LOSS if name == "worse" else 0.0))
    return tmp_path / "base", tmp_path / "worse"


def _shift(folder: Path, log_likelihood: float, metric: str = "perplexity") -> None:
    """Set the log-likelihood of each document to about the given value, with a right answer."""
    file = samples_file(folder, "last_word")
    lines = []
    for number, line in enumerate(file.read_text().splitlines()):
        sample: dict[str, Any] = json.loads(line)
        value = log_likelihood - number % 7 / 100
        sample |= {metric: value, "acc": 1.0, "filtered_resps": [[str(value), "True"]]}
        sample["resps"] = [sample["filtered_resps"]]
        lines.append(json.dumps(sample))
    file.write_text("\n".join(lines) + "\n")


def _decide(runs: tuple[Path, Path], gate: str = "", margin: MarginSetting = None) -> Verdict:
    return decide(*runs, margin=margin, alpha=0.05, gate={"*": gate} if gate else {})


def test_aggregations_equal_lm_evals() -> None:
    metrics = pytest.importorskip("lm_eval.api.metrics")
    from lm_eval.api.registry import aggregation_registry, metric_agg_registry

    assert metrics
    for name, aggregation in AGGREGATIONS.items():
        if name != "acc_all":
            assert metric_agg_registry.get(name) is aggregation_registry.get(aggregation)
    assert set(AGGREGATIONS) == set(metric_agg_registry.keys())
    assert set(aggregation_registry.keys()) >= (MEANS | LOG_LIKELIHOODS)


def test_perplexity_decides(runs: tuple[Path, Path]) -> None:
    verdict = _decide(runs, "perplexity")
    (task,) = verdict.tasks
    assert (verdict.outcome, task.unit) == ("FAIL", "nats")
    assert task.difference == pytest.approx(-LOSS)
    assert task.candidate.value / task.baseline.value == pytest.approx(math.exp(LOSS))
    assert task.relative_margin == 0.01
    assert task.margin == pytest.approx(math.log(1.01))
    assert f"loses {LOSS:.4f} nats" in verdict.reason
    wider = decide(*runs, margin={"last_word": "95%"}, alpha=0.05, gate={"*": "perplexity"})
    assert wider.outcome == "PASS"


def test_no_points_for_perplexity(runs: tuple[Path, Path]) -> None:
    for margin in (0.02, {"last_word": 0.02}):
        with breaks(margin_rules.KIND, "perplexity", "--margin last_word=1%"):
            _decide(runs, "perplexity", margin)
    with breaks(margin_rules.KIND, "acc", "--margin last_word=0.02"):
        _decide(runs, "acc", "2%")
    with breaks(margin_rules.NO_TASK, "lastword", "last_word"):
        _decide(runs, "acc", {"lastword": 0.02})


def test_perplexity_is_shown_in_nats(runs: tuple[Path, Path]) -> None:
    verdict = _decide(runs)
    (task,) = verdict.tasks
    (perplexity,) = task.also
    assert (task.metric, task.unit) == ("acc", "share")
    assert (perplexity.unit, perplexity.higher_is_better) == ("nats", True)
    assert perplexity.outcome == "FAIL"
    assert perplexity.difference == pytest.approx(-LOSS)
    for format_ in ("text", "markdown", "html"):
        text = " ".join(render_verdicts([verdict], format_).split())
        assert "-0.660" in text
        assert "nats" in text
        assert "higher is" in text
        assert "-103" not in text  # as a percentage


def test_perplexity_alone(runs: tuple[Path, Path]) -> None:
    for run in runs:
        file = samples_file(run, "last_word")
        lines = [
            json.loads(line) | {"metrics": ["perplexity"]} for line in file.read_text().splitlines()
        ]
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [task.metric for task in _decide(runs).tasks] == ["perplexity"]


@pytest.mark.parametrize(
    ("aggregation", "aggregate"),
    [
        ("perplexity", 2.7),
        ("def agg(items):\n    return exp(-mean(items))", 2.7),
        ("mean", -1.0),
    ],
)
def test_renamed_log_likelihood_is_recognized(
    aggregation: str, aggregate: float, runs: tuple[Path, Path]
) -> None:
    """Metrics can have any name. lm-eval records an aggregation function as its source text."""

    def rename(content: dict[str, Any]) -> None:
        config = content["configs"]["last_word"]
        config["metric_list"][0] = {
            "metric": "ppl",
            "aggregation": aggregation,
            "higher_is_better": False,
        }
        content["higher_is_better"]["last_word"] = {"ppl": False, "acc": True}
        content["results"]["last_word"]["ppl,none"] = aggregate

    for run in runs:
        edit_results(run, rename)
        file = samples_file(run, "last_word")
        file.write_text(file.read_text().replace('"perplexity"', '"ppl"'))
    assert _decide(runs, "ppl").outcome == "FAIL"
    (other,) = _decide(runs).tasks[0].also
    assert other.unit == "nats"
    assert other.difference == pytest.approx(-LOSS)


def test_unknown_aggregation_cannot_decide(runs: tuple[Path, Path]) -> None:
    """The direction is unknown if values are no log-likelihoods and the aggregate is no mean."""

    def rename(content: dict[str, Any]) -> None:
        config = content["configs"]["last_word"]
        config["metric_list"][0] = {"metric": "score", "aggregation": "def agg(items): ..."}
        content["higher_is_better"]["last_word"] = {"score": True, "acc": True}
        content["results"]["last_word"]["score,none"] = 12.5

    for run in runs:
        edit_results(run, rename)
        _shift(run, 0.3, "score")
        file = samples_file(run, "last_word")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line |= {"metrics": ["score", "acc"], "score": 2 * line["score"]}
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with assert_raises(InputError, "got score", "not the mean"):
        _decide(runs, "score")
