"""Folders with several results files of lm-eval: all of their tasks are judged."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.command import vexport
from tests.texts import assert_contains
from vexport.errors import InputError
from vexport.judge.verdict import decide
from vexport.records import Verdict
from vexport.scores.readers.lm_eval import read_lm_eval

RIGHT = [1.0] * 200
LOST = [1.0] * 150 + [0.0] * 50


def write(folder: Path, task: str, scores: Sequence[float], *, day: int = 1, **other: str) -> None:
    """Write the files of one call of lm-eval, with one task of two choices."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = f"2026-11-{day:02d}T10-00-00.000000"
    metric = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    content = {
        "results": {task: {"acc,none": sum(scores) / len(scores)}},
        "configs": {task: {"output_type": "multiple_choice", "metric_list": [metric]}},
        "higher_is_better": {task: {"acc": True}},
        "n-samples": {task: {"original": 500, "effective": len(scores)}},
        "n-shot": {task: 0},
        "config": {"model": "vllm", "model_args": {"pretrained": "org/m", **other}},
        "lm_eval_version": "0.4.13",
    }
    (folder / f"results_{stamp}.json").write_text(json.dumps(content))
    rows = [
        {
            "doc_id": number,
            "target": "0",
            "arguments": {"gen_args_0": {"arg_0": f"{task} {number}", "arg_1": " a"}},
            "resps": [[["-1.0", "True"]]],
            "filtered_resps": [["-1.0", "True"], ["-2.0", "False"]],
            "filter": "none",
            "metrics": ["acc"],
            "doc_hash": f"{number}",
            "prompt_hash": f"{task}{number}",
            "target_hash": "0",
            "acc": score,
        }
        for number, score in enumerate(scores)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"samples_{task}_{stamp}.jsonl").write_text(text)


def judged(folder: Path, *tasks: str) -> Verdict:
    return decide(folder / "old", folder / "new", margin=0.05, alpha=0.05, tasks=tasks)


def test_every_call_is_judged(tmp_path: Path) -> None:
    """A loss in the oldest of three files is a loss."""
    for day, task in enumerate(("a", "b", "c"), 1):
        write(tmp_path / "old", task, RIGHT, day=day)
        write(tmp_path / "new", task, LOST if task == "a" else RIGHT, day=day)
    verdict = judged(tmp_path)
    assert {task.task: task.outcome for task in verdict.tasks} == {
        "a": "FAIL", "b": "PASS", "c": "PASS"
    }  # fmt: skip
    assert verdict.outcome == "FAIL"
    assert judged(tmp_path, "b", "c").outcome == "PASS"


def test_later_trial_is_named(tmp_path: Path) -> None:
    """A later file with fewer documents replaces the task, and a warning says so."""
    for side in ("old", "new"):
        write(tmp_path / side, "a", LOST if side == "new" else RIGHT)
        write(tmp_path / side, "a", RIGHT[:100], day=2)
    done = vexport("verdict", tmp_path / "old", tmp_path / "new", "--margin", "0.05")
    assert done.code == 0
    first = done.stdout.split("\n\n")[0]
    assert_contains(" ".join(first.split()), "a: judged on 100 of 200 documents")
    assert_contains(" ".join(first.split()), "results_2026-11-01T10-00-00.000000.json")


def test_repeated_task_is_read_from_its_newest_file(tmp_path: Path) -> None:
    write(tmp_path, "a", LOST)
    write(tmp_path, "b", RIGHT)
    write(tmp_path, "a", RIGHT, day=2)
    results = read_lm_eval(tmp_path)
    assert results.replaced == ()
    assert "11-02" in results.tasks["a"].file.name
    assert {sample.scores["acc"] for sample in results.tasks["a"].rows.values()} == {1.0}


def test_settings_are_compared_by_task(tmp_path: Path) -> None:
    for side in ("old", "new"):
        write(tmp_path / side, "a", RIGHT)
        arguments = {"truncation_side": "right"} if side == "new" else {}
        write(tmp_path / side, "b", RIGHT, day=2, **arguments)
    (warning,) = judged(tmp_path).warnings
    assert warning.startswith("b: truncation_side: left (default) in the baseline, right in")


@pytest.mark.parametrize("change", [{"pretrained": "org/other"}, {"revision": "v2"}])
def test_files_of_two_models_are_refused(tmp_path: Path, change: dict[str, str]) -> None:
    write(tmp_path, "a", RIGHT)
    write(tmp_path, "b", RIGHT, day=2, **change)
    with pytest.raises(InputError, match="results of 2 models") as caught:
        read_lm_eval(tmp_path)
    assert_contains(str(caught.value), *change.values())


@pytest.mark.parametrize("side", ["old", "new"])
def test_missing_documents_of_a_later_trial_are_found(side: str, tmp_path: Path) -> None:
    """The error names the older file that has the documents, and that file can be judged."""
    for folder in ("old", "new"):
        write(tmp_path / folder, "a", RIGHT)
    older = next((tmp_path / side).glob("results_*.json"))
    write(tmp_path / side, "a", RIGHT[:70], day=2)
    write(tmp_path / side, "a", RIGHT[:30], day=3)
    with pytest.raises(InputError) as caught:
        judged(tmp_path)
    assert_contains(str(caught.value), "170 missing in all", str(older))
    sides = {folder: tmp_path / folder for folder in ("old", "new")} | {side: older}
    assert decide(*sides.values(), margin=0.05, alpha=0.05).outcome == "PASS"


def test_slash_after_a_path_names_the_same_model(tmp_path: Path) -> None:
    for day, (task, slash) in enumerate((("a", ""), ("b", "/")), 1):
        write(tmp_path, task, RIGHT, day=day, pretrained=f"/data/small{slash}")
    assert [*read_lm_eval(tmp_path).tasks] == ["a", "b"]


def test_missing_task_is_named(tmp_path: Path) -> None:
    """A task that one side lacks prevents a PASS, but no FAIL."""
    for side, scores in (("old", RIGHT), ("new", RIGHT)):
        write(tmp_path / side, "shared", scores)
    write(tmp_path / "old", "gone", RIGHT, day=2)
    verdict = judged(tmp_path)
    assert verdict.outcome == "INCONCLUSIVE"
    assert_contains(verdict.reason, "the results have no task gone", "--task")
    assert judged(tmp_path, "shared").outcome == "PASS"
    write(tmp_path / "new", "added", RIGHT, day=2)
    assert_contains(judged(tmp_path).reason, "no task gone", "the baseline has no task added")
    write(tmp_path / "new", "shared", LOST, day=3)
    verdict = judged(tmp_path)
    assert verdict.outcome == "FAIL"
    assert_contains(verdict.reason, "no task gone")


def test_unknown_selection_is_refused(tmp_path: Path) -> None:
    for side in ("old", "new"):
        write(tmp_path / side, "a", RIGHT)
    done = vexport("verdict", tmp_path / "old", tmp_path / "new", "--task", "b")
    assert done.code == 2
    assert_contains(done.stderr, "--task", "no task or group b")


def test_unknown_name_beside_known_names_is_refused(tmp_path: Path) -> None:
    """A name of one side is a missing task. A name of neither side is an error with the nearest."""
    for side in ("old", "new"):
        write(tmp_path / side, "capitals", RIGHT)
    write(tmp_path / "old", "rivers", RIGHT, day=2)
    assert judged(tmp_path, "capitals").outcome == "PASS"
    assert judged(tmp_path, "capitals", "rivers").outcome == "INCONCLUSIVE"
    with pytest.raises(InputError) as caught:
        judged(tmp_path, "capitals", "rivets")
    assert_contains(str(caught.value), "--task", "no task or group rivets", "did you mean rivers?")


def test_plain_lines_are_selected(tmp_path: Path) -> None:
    for side, score in (("old", 1), ("new", 0)):
        rows = [
            {"task": task, "id": number, "score": score if task == "lost" else 1}
            for task in ("lost", "kept")
            for number in range(200)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{side}.jsonl").write_text(text)
    files = (tmp_path / "old.jsonl", tmp_path / "new.jsonl")
    outcomes = [
        decide(*files, margin=0.05, alpha=0.05, tasks=tasks).outcome for tasks in ((), ("kept",))
    ]
    assert outcomes == ["FAIL", "PASS"]
