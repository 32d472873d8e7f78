"""Accepted baselines.

The file is small and readable in a diff. Documents are paired, and changes that may affect scores
are named.
"""

import difflib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.reports.sample import engine
from tests.scores.make import edit_results, edit_sample, samples_file
from tests.texts import assert_contains, assert_raises
from vexport.errors import InputError
from vexport.inference.fingerprint import engine_fingerprint, write_fingerprint
from vexport.judge.accepting import accept_results, lost_answers
from vexport.judge.lost import count_answers
from vexport.judge.verdict import decide
from vexport.rules.verdict import LOST_RESPONSES
from vexport.scores.endings import LETTERS, Ending, State, letter_of
from vexport.scores.readers.accepted import choice_of, read_accepted
from vexport.scores.readers.lm_eval import read_lm_eval
from vexport.scores.settings import changed_names, changes


@pytest.fixture
def accepted(lm_eval_runs: Path, tmp_path: Path) -> Path:
    accept_results(lm_eval_runs / "baseline", tmp_path / "accepted.json", {})
    return tmp_path / "accepted.json"


@pytest.mark.parametrize("name", ["doubtful", "worse"])
def test_accepted_baseline_gives_same_verdict(
    lm_eval_runs: Path, accepted: Path, name: str
) -> None:
    """The accepted file gives the same numbers as the baseline's folder."""
    full = decide(lm_eval_runs / "baseline", lm_eval_runs / name, margin=0.02, alpha=0.05)
    kept = decide(accepted, lm_eval_runs / name, margin=0.02, alpha=0.05)
    assert kept.reason == full.reason
    by_name = sorted(full.tasks, key=lambda task: task.task)
    for accepted_task, full_task in zip(kept.tasks, by_name, strict=True):
        for name in ("difference", "low", "high", "baseline", "candidate", "recovery"):
            assert getattr(accepted_task, name) == getattr(full_task, name), name
        assert accepted_task.changes.changed_wrong is None
        ids = [flip.doc_id for flip in accepted_task.changes.flips]
        assert ids == [flip.doc_id for flip in full_task.changes.flips]


def test_changed_answer_is_one_diff_line(
    lm_eval_runs: Path, accepted: Path, tmp_path: Path
) -> None:
    old = accepted.read_text()
    assert len(old) < 15 * 3 * 400  # three tasks of 400 documents; the scores of `near` are graded
    shutil.copytree(lm_eval_runs / "baseline", tmp_path / "changed")
    edit_sample(tmp_path / "changed", 250, exact_match=0.0)
    accept_results(tmp_path / "changed", accepted, {})
    diff = [line for line in difflib.ndiff(old.splitlines(), accepted.read_text().splitlines())]
    assert (
        sum(line.startswith("- ") for line in diff) == 2
    )  # the task's score, and the line of documents 200-299
    (removed,) = [line for line in diff if line.startswith("- ") and "200-299" in line]
    (added,) = [line for line in diff if line.startswith("+ ") and "200-299" in line]
    assert (
        sum(
            old_letter != new_letter
            for old_letter, new_letter in zip(removed[2:], added[2:], strict=True)
        )
        == 1
    )


def cut_answers(folder: Path, number: int) -> None:
    """Replace the first `number` answers of `sums` by wrong answers that were cut."""
    for line in range(number):
        edit_sample(
            folder, line, exact_match=0.0, finish_reason=[["length"]], resps=[["I will now"]]
        )
    filtered = json.loads(samples_file(folder).read_text().splitlines()[0])["filtered_resps"]
    assert len(filtered) == 1
    for line in range(number):
        edit_sample(folder, line, filtered_resps=["I will now"])


def test_baseline_cut_answers_are_counted(copies: Path, tmp_path: Path) -> None:
    file = tmp_path / "accepted.json"
    cut_answers(copies / "baseline", 80)
    cut_answers(copies / "twin", 120)
    accepted = accept_results(copies / "baseline", file, {})
    assert_contains(lost_answers(accepted, alpha=0.05)[0], "sums", "cut", "20%")
    endings = read_accepted(file).tasks["sums"].endings
    assert endings == {"0-99": "c" * 80 + "." * 20}
    assert read_accepted(file).tasks["choices"].endings is None
    sides = decide(file, copies / "twin", margin=0.02, alpha=0.05)
    folders = decide(copies / "baseline", copies / "twin", margin=0.02, alpha=0.05)
    (sums,) = (task for task in sides.tasks if task.task == "sums")
    (full,) = (task for task in folders.tasks if task.task == "sums")
    assert sums.obstacle is not None
    assert sums.obstacle.rule == LOST_RESPONSES.id
    assert (sums.answers, sums.obstacle) == (full.answers, full.obstacle)


def test_accepted_file_without_endings(copies: Path, accepted: Path) -> None:
    """Files of older versions have no endings, so that the baseline's lost answers are unknown."""
    content = json.loads(accepted.read_text())
    for task in content["tasks"].values():
        del task["endings"]
    accepted.write_text(json.dumps(content))
    verdict = decide(accepted, copies / "twin", margin=0.02, alpha=0.05)
    assert verdict.outcome == "PASS"
    assert all(task.answers is None or task.answers.baseline is None for task in verdict.tasks)


@pytest.mark.parametrize(
    "endings", [{"0-99": "c"}, {"0-99": "x" * 100}, {"5-9": "....."}, {"a": "."}]
)
def test_damaged_endings_are_refused(accepted: Path, endings: dict[str, str]) -> None:
    content = json.loads(accepted.read_text())
    content["tasks"]["sums"]["endings"] = endings
    accepted.write_text(json.dumps(content))
    with pytest.raises(InputError, match="sums"):
        read_accepted(accepted)


@pytest.mark.parametrize("state", ["", "cut", "empty", "unparsed"])
@pytest.mark.parametrize("is_whole", [False, True])
def test_letters_preserve_counts(state: State, is_whole: bool) -> None:
    """An ending that is stored as a letter gives the same counts as the ending itself."""
    is_cut = state == "cut"
    ending = Ending(state=state, is_cut=is_cut, is_whole=is_whole and not is_cut)
    restored = LETTERS[letter_of(ending)]
    scores = np.array([0.0, 1.0, 0.0])
    others = [Ending(state=""), Ending(state="", is_cut=True)]
    counts = [
        count_answers([each, *others], scores, sign=1, alpha=0.05) for each in (ending, restored)
    ]
    assert counts[0] == counts[1]


def test_changed_environment_is_named(copies: Path, tmp_path: Path) -> None:
    """Another vLLM or model between the accepted baseline and the results is a warning."""
    for name, vllm in (("baseline", "0.31.0"), ("twin", "0.32.0")):
        folder = read_lm_eval(copies / name).file.parent
        write_fingerprint(folder, {"vllm": vllm, "dtype": "bfloat16", "model": name})
    accept_results(tmp_path / "baseline", tmp_path / "accepted.json", {})
    assert read_accepted(tmp_path / "accepted.json").fingerprint["lm-eval"] == "0.4.13"
    verdict = decide(tmp_path / "accepted.json", tmp_path / "twin", margin=0.02, alpha=0.05)
    assert verdict.outcome == "PASS"
    (warning,) = verdict.warnings
    assert re.search(r"^vllm\b.* 0\.31\.0 .*\baccepted\b.* 0\.32\.0 now$", warning)
    verdict = decide(tmp_path / "baseline", tmp_path / "twin", margin=0.02, alpha=0.05)
    (warning,) = verdict.warnings
    assert re.search(r"^vllm\b.* 0\.31\.0 .*\bbaseline\b.* 0\.32\.0 .*\bresults$", warning)


def test_different_prompt_names_document(copies: Path, accepted: Path) -> None:
    edit_sample(copies / "twin", 123, prompt_hash="0")
    edit_results(copies / "twin", lambda content: content.update(lm_eval_version="0.4.14"))
    with assert_raises(InputError, "task sums", "document 123", "lm-eval"):
        decide(accepted, copies / "twin", margin=0.02, alpha=0.05)


def test_all_mismatches_in_one_error(copies: Path, accepted: Path) -> None:
    file = samples_file(copies / "twin")
    file.write_text("\n".join(file.read_text().splitlines()[:200]))
    edit_sample(copies / "twin", 123, prompt_hash="0")
    choices = samples_file(copies / "twin", "choices")
    choices.write_text("".join(choices.read_text().splitlines(keepends=True)[:300]))
    with pytest.raises(InputError) as caught:
        decide(accepted, copies / "twin", margin=0.02, alpha=0.05)
    first, second = str(caught.value).splitlines()
    assert_contains(first, "got 300", "acc,none", "400")
    assert_contains(second, "got 200", "exact_match,none", "400")


def test_accepted_task_without_results_is_no_pass(copies: Path, accepted: Path) -> None:
    edit_results(copies / "twin", lambda content: content["configs"].pop("near"))
    verdict = decide(accepted, copies / "twin", margin=0.02, alpha=0.05)
    assert verdict.outcome == "INCONCLUSIVE"
    assert_contains(verdict.reason, "the results have no task near")
    selected = decide(accepted, copies / "twin", margin=0.02, alpha=0.05, tasks=["sums"])
    assert [task.task for task in selected.tasks] == ["sums"]
    assert selected.outcome == "PASS"


def test_accepted_gates_are_kept(lm_eval_runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "accepted.json"
    accept_results(lm_eval_runs / "baseline", file, {"choices": "acc_norm"})
    choice = choice_of(read_accepted(file))
    assert choice["choices"] == "acc_norm,none"
    first = file.read_bytes()
    accept_results(lm_eval_runs / "twin", file, choice)
    assert file.read_bytes() == first
    twin = lm_eval_runs / "twin"
    with assert_raises(InputError, "got choices=acc", "need choices=acc_norm,none"):
        decide(file, twin, margin=0.02, alpha=0.05, gate={"choices": "acc"})
    same = decide(file, twin, margin=0.02, alpha=0.05, gate={"choices": "acc_norm"})
    assert same.outcome == "PASS"


def test_path_of_the_model_is_not_stored(copies: Path, tmp_path: Path) -> None:
    """An accepted baseline is committed, and the checkpoint's path differs by machine."""
    arguments = {"pretrained": "/home/somebody/model", "max_gen_toks": 9}
    edit_results(
        copies / "baseline", lambda content: content["config"].update(model_args=arguments)
    )
    accept_results(tmp_path / "baseline", tmp_path / "accepted.json", {})
    text = (tmp_path / "accepted.json").read_text()
    assert "somebody" not in text
    assert "max_gen_toks" in text


DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def test_chat_template_in_either_file(model: Path) -> None:
    """The fingerprint finds a chat template in its own file and in tokenizer_config.json."""
    before = engine_fingerprint(model, engine())
    assert before["model's chat template"] == "none"
    (model / "chat_template.jinja").write_text("{{ messages }}")
    in_file = engine_fingerprint(model, engine())
    assert changed_names(before, in_file) == ["model's chat template"]
    (model / "chat_template.jinja").unlink()
    settings = model / "tokenizer_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"chat_template": "{{ messages }}"})
    )
    in_settings = engine_fingerprint(model, engine())
    assert in_settings["model's chat template"] == in_file["model's chat template"]


def test_changed_engine_settings_are_named(model: Path) -> None:
    before = engine_fingerprint(model, engine())
    after = engine_fingerprint(model, replace(engine(), vllm="9.9", dtype="float16"))
    assert changed_names(before, after) == ["vllm", "dtype"]
    earlier, later = (
        engine_fingerprint(model, replace(engine(), settings=settings))
        for settings in (
            {"tensor_parallel_size": "1", "kv_cache_dtype": "auto", "engine_args": "none"},
            {
                "tensor_parallel_size": "2",
                "kv_cache_dtype": "auto",
                "engine_args": '{"block_size": 32}',
            },
        )
    )
    (arguments,) = changes(earlier, later, where=("before", "now"))
    assert_contains(arguments, "engine_args", "none before", '{"block_size": 32} now')
