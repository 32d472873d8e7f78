"""Reading folders of the real lm-eval, and errors for unusable folders."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scores.make import edit_results, edit_sample, results_file, samples_file
from vexport.errors import InputError
from vexport.judge.pairs import TaskPair, gated_tasks, pair_metrics
from vexport.judge.verdict import decide
from vexport.scores.readers.lm_eval import read_lm_eval
from vexport.scores.table import ScoreTable


def gates(baseline: ScoreTable, candidate: ScoreTable) -> list[TaskPair]:
    return list(gated_tasks(baseline, candidate, {}))


def test_answers_are_readable(lm_eval_runs: Path) -> None:
    """Prompts, targets and answers are read as text, for generation and for multiple choice."""
    results = read_lm_eval(lm_eval_runs / "baseline")
    assert set(results.tasks) == {"sums", "choices", "near"}
    generated, chosen = (results.tasks[name].rows["none", 25, 0] for name in ("sums", "choices"))
    assert (generated.prompt, generated.target, generated.shown_text) == ("5 + 1 =", "6", "6")
    assert (chosen.prompt, chosen.target, chosen.shown_text) == ("5 + 1 =", "6", "6")
    assert results.tasks["choices"].rows["none", 0, 0].shown_text == "none of them"
    # Exact match comes before acc.
    metrics = {p.task: p.metric for p in gates(results, results)}
    assert metrics == {"sums": "exact_match", "choices": "acc", "near": "nearness"}


def test_means_equal_lm_evals(lm_eval_runs: Path) -> None:
    results = read_lm_eval(lm_eval_runs / "worse")
    content = json.loads(results.file.read_text())["results"]
    pairs = [p for task in results.tasks.values() for p in pair_metrics(task, task)]
    names = {f"{p.task} {p.metric}" for p in pairs}
    assert names == {"sums exact_match", "choices acc", "choices acc_norm", "near nearness"}
    for p in pairs:
        assert p.candidate.mean() == pytest.approx(content[p.task][f"{p.metric},{p.filter}"])


def test_huge_numbers_are_read(copies: Path) -> None:
    """A number too large for a float is infinite. A long string of digits stays text."""
    edit_sample(copies / "twin", 0, exact_match=10**400)
    file = samples_file(copies / "twin", "choices")
    first, *others = file.read_text().splitlines()
    values = {"target": "9" * 5000, "filtered_resps": [["no number"], [10**400]]}
    file.write_text("\n".join([json.dumps(json.loads(first) | values), *others]) + "\n")
    tasks = read_lm_eval(copies / "twin").tasks
    assert tasks["sums"].rows["none", 0, 0].scores["exact_match"] == math.inf
    chosen = tasks["choices"].rows["none", 0, 0]
    assert (chosen.target, chosen.compared_text) == ("9" * 5000, "0")


def test_newest_run_is_read(copies: Path) -> None:
    folder = read_lm_eval(copies / "twin").file.parent
    for file in list(folder.iterdir()):
        stem, _, date = file.name.rpartition("_20")
        shutil.copy(file, folder / f"{stem}_19{date}")
    assert "_20" in read_lm_eval(copies / "twin").file.name


def make_grouped(content: dict[str, Any]) -> None:
    content["configs"]["more"] = content["configs"]["sums"]
    content |= {
        "group_subtasks": {"all": ["inner"], "inner": ["sums", "more"]},
        "groups": {"all": {}},
    }


def test_aggregated_group_is_one_task(copies: Path) -> None:
    for name in ("baseline", "twin"):
        sums = samples_file(copies / name)
        shutil.copy(sums, sums.with_name(sums.name.replace("sums", "more")))
        edit_results(copies / name, make_grouped)
    pairs = gates(read_lm_eval(copies / "baseline"), read_lm_eval(copies / "twin"))
    assert {p.task: len(p.gain) for p in pairs} == {"all": 800, "choices": 400, "near": 400}


Damage = Callable[[Path], object]


def rewrite(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda folder: edit_results(folder, change)


def replace_results(data: bytes) -> Damage:
    return lambda folder: results_file(folder).write_bytes(data)


def cut_short(folder: Path) -> None:
    file = samples_file(folder)
    first, second, third, *others = file.read_text().splitlines()
    file.write_text("\n".join([first, second, third + "{", *others]))


def link_samples_to_device(folder: Path) -> None:
    file = samples_file(folder)
    file.unlink()
    file.symlink_to("/dev/zero")


def drop_document(folder: Path) -> None:
    file = samples_file(folder)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


def change_question(key: str) -> Damage:
    return lambda folder: edit_sample(folder, 7, **{key: "0" * 64})


def add_second_model(folder: Path) -> None:
    shutil.copytree(results_file(folder).parent, folder / "other_model")


def rename_task(name: str) -> Damage:
    return rewrite(lambda content: content.update(configs={name: {}}))


DEEP = b"[" * 100_000
DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty file": (replace_results(b""), "broken JSON (Expecting value)"),
    "deep nesting": (replace_results(DEEP), "broken JSON"),
    "task name with folders": (
        rename_task("../../../etc/passwd"),
        "need a name without folders",
    ),
    "two models": (add_second_model, "results of 2 models"),
    "a device for samples": (link_samples_to_device, "got a pipe or a device"),
    "truncated samples": (cut_short, "broken JSON"),
    "score that is not finite": (
        lambda folder: edit_sample(folder, 2, exact_match=float("nan")),
        "need finite numbers",
    ),
    "score with an infinite third power": (
        lambda folder: edit_sample(folder, 2, exact_match=3e102),
        "need finite numbers up to 1e+50",
    ),
    "opposite direction": (
        rewrite(lambda content: content.update(higher_is_better={"sums": {"exact_match": False}})),
        "another higher_is_better",
    ),
    "missing document": (drop_document, "task sums: no document 399"),
    **{
        key: (change_question(key), f"task sums, document 7: got {key} 000000000000")
        for key in ("doc_hash", "prompt_hash", "target_hash")
    },
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_results_are_one_line(copies: Path, name: str) -> None:
    apply, message = DAMAGES[name]
    apply(copies / "twin")
    with pytest.raises(InputError) as caught:
        decide(copies / "baseline", copies / "twin", margin=0.02, alpha=0.05)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(copies) in str(caught.value)
