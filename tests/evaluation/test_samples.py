"""Read folders of the real lm-eval, and refuse unusable folders."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.make import edit_results, edit_sample, results_file, samples_file
from vexport.errors import InputError
from vexport.evaluation.pairs import TaskPair, gated_tasks, pair_metrics
from vexport.evaluation.results import Results, read_results
from vexport.evaluation.verdict import decide


def gates(baseline: Results, candidate: Results) -> list[TaskPair]:
    return list(gated_tasks(baseline, candidate, {}))


def test_answers_are_read_as_people_see_them(lm_eval_runs: Path) -> None:
    results = read_results(lm_eval_runs / "baseline")
    assert set(results.tasks) == {"sums", "choices", "near"}
    generated, chosen = (results.tasks[name].samples["none", 25, 0] for name in ("sums", "choices"))
    assert (generated.prompt, generated.target, generated.answer) == ("5 + 1 =", "6", "6")
    assert (chosen.prompt, chosen.target, chosen.answer) == ("5 + 1 =", "6", "6")
    assert results.tasks["choices"].samples["none", 0, 0].answer == "none of them"
    # Exact match comes before acc.
    metrics = {p.task: p.metric for p in gates(results, results)}
    assert metrics == {"sums": "exact_match", "choices": "acc", "near": "nearness"}


def test_scores_agree_with_lm_evals_own_means(lm_eval_runs: Path) -> None:
    results = read_results(lm_eval_runs / "worse")
    content = json.loads(results.file.read_text())["results"]
    pairs = [p for task in results.tasks.values() for p in pair_metrics(task, task)]
    names = {f"{p.task} {p.metric}" for p in pairs}
    assert names == {"sums exact_match", "choices acc", "choices acc_norm", "near nearness"}
    for p in pairs:
        assert p.candidate.mean() == pytest.approx(content[p.task][f"{p.metric},{p.filter}"])


def test_numbers_that_no_float_or_integer_holds_are_read(copies: Path) -> None:
    edit_sample(copies / "twin", 0, exact_match=10**400)
    file = samples_file(copies / "twin", "choices")
    first, *others = file.read_text().splitlines()
    values = {"target": "9" * 5000, "filtered_resps": [["no number"], [10**400]]}
    file.write_text("\n".join([json.dumps(json.loads(first) | values), *others]) + "\n")
    tasks = read_results(copies / "twin").tasks
    assert tasks["sums"].samples["none", 0, 0].scores["exact_match"] == math.inf
    chosen = tasks["choices"].samples["none", 0, 0]
    assert (chosen.target, chosen.compared) == ("9" * 5000, "0")


def test_the_newest_run_of_a_folder_counts(copies: Path) -> None:
    folder = read_results(copies / "twin").file.parent
    for file in list(folder.iterdir()):
        stem, _, date = file.name.rpartition("_20")
        shutil.copy(file, folder / f"{stem}_19{date}")
    assert "_20" in read_results(copies / "twin").file.name


def grouped(content: dict[str, Any]) -> None:
    content["configs"]["more"] = content["configs"]["sums"]
    content |= {
        "group_subtasks": {"all": ["inner"], "inner": ["sums", "more"]},
        "groups": {"all": {}},
    }


def test_a_group_with_an_aggregate_counts_as_one_task(copies: Path) -> None:
    for name in ("baseline", "twin"):
        sums = samples_file(copies / name)
        shutil.copy(sums, sums.with_name(sums.name.replace("sums", "more")))
        edit_results(copies / name, grouped)
    pairs = gates(read_results(copies / "baseline"), read_results(copies / "twin"))
    assert {p.task: len(p.gain) for p in pairs} == {"all": 800, "choices": 400, "near": 400}


Break = Callable[[Path], object]


def rewrite(change: Callable[[dict[str, Any]], object]) -> Break:
    return lambda folder: edit_results(folder, change)


def replace_results(data: bytes) -> Break:
    return lambda folder: results_file(folder).write_bytes(data)


def cut_short(folder: Path) -> None:
    file = samples_file(folder)
    first, second, third, *others = file.read_text().splitlines()
    file.write_text("\n".join([first, second, third + "{", *others]))


def endless_samples(folder: Path) -> None:
    file = samples_file(folder)
    file.unlink()
    file.symlink_to("/dev/zero")


def one_document_less(folder: Path) -> None:
    file = samples_file(folder)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


def another_question(key: str) -> Break:
    return lambda folder: edit_sample(folder, 7, **{key: "0" * 64})


def nobodys_results(folder: Path) -> None:
    shutil.copytree(results_file(folder).parent, folder / "other_model")


def another_tasks_name(name: str) -> Break:
    return rewrite(lambda content: content.update(configs={name: {}}))


DEEP = b"[" * 100_000
BREAKS: dict[str, tuple[Break, str]] = {
    "nothing in the file": (replace_results(b""), "need valid JSON"),
    "nested without end": (replace_results(DEEP), "broken JSON"),
    "a task that climbs": (
        another_tasks_name("../../../etc/passwd"),
        "need a name without folders",
    ),
    "two models": (nobodys_results, "results of 2 models"),
    "a device for samples": (endless_samples, "got a pipe or a device"),
    "samples cut short": (cut_short, "broken JSON"),
    "a score without a value": (
        lambda folder: edit_sample(folder, 2, exact_match=float("nan")),
        "need finite numbers",
    ),
    "the other direction": (
        rewrite(lambda content: content.update(higher_is_better={"sums": {"exact_match": False}})),
        "one meaning of the metric",
    ),
    "a document less": (one_document_less, "task sums: got no document 399"),
    "a task less": (rewrite(lambda content: content["configs"].pop("near")), "got no task near"),
    **{
        key: (another_question(key), f"task sums, document 7: got {key} 000000000000")
        for key in ("doc_hash", "prompt_hash", "target_hash")
    },
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_told_in_one_line(copies: Path, name: str) -> None:
    apply, message = BREAKS[name]
    apply(copies / "twin")
    with pytest.raises(InputError) as caught:
        decide(copies / "baseline", copies / "twin", margin=0.02, alpha=0.05)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(copies) in str(caught.value)
