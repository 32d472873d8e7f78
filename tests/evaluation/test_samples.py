"""Folders made by the real lm-eval: what is read from them, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vexport.errors import InputError
from vexport.evaluation.pairs import TaskPair, gated_tasks, pair_metrics
from vexport.evaluation.results import Results, read_results
from vexport.evaluation.verdict import decide
from vexport.records import Verdict


@pytest.fixture
def copies(lm_eval_runs: Path, tmp_path: Path) -> Path:
    for name in ("baseline", "twin"):
        shutil.copytree(lm_eval_runs / name, tmp_path / name)
    return tmp_path


def sample_file(folder: Path, task: str) -> Path:
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    return file


def edit(file: Path, line: int, key: str, value: object) -> None:
    lines = file.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | {key: value})
    file.write_text("\n".join(lines) + "\n")


def pair(folder: Path) -> None:
    gates(read_results(folder / "baseline"), read_results(folder / "twin"))


def gates(baseline: Results, candidate: Results) -> list[TaskPair]:
    found = [task.gate for task in gated_tasks(baseline, candidate, {})]
    return [one for one in found if isinstance(one, TaskPair)]


def test_answers_are_read_as_people_see_them(lm_eval_runs: Path) -> None:
    results = read_results(lm_eval_runs / "baseline")
    assert set(results.tasks) == {"sums", "choices", "near"}
    generated, chosen = (results.tasks[name].samples["none", 25, 0] for name in ("sums", "choices"))
    assert (generated.prompt, generated.target, generated.answer) == ("5 + 1 =", "6", "6")
    assert (chosen.prompt, chosen.target, chosen.answer) == ("5 + 1 =", "6", "6")
    assert results.tasks["choices"].samples["none", 0, 0].answer == "none of them"


def test_scores_agree_with_lm_evals_own_means(lm_eval_runs: Path) -> None:
    results = read_results(lm_eval_runs / "worse")
    content = json.loads(results.file.read_text())["results"]
    pairs = [p for task in results.tasks.values() for p in pair_metrics(task, task)]
    assert {(p.task, p.metric) for p in pairs} == {
        ("sums", "exact_match"),
        ("choices", "acc"),
        ("choices", "acc_norm"),
        ("near", "nearness"),
    }
    for p in pairs:
        assert p.candidate.mean() == pytest.approx(content[p.task][f"{p.metric},{p.filter}"])


def test_the_gate_is_exact_match_then_acc_then_what_there_is(lm_eval_runs: Path) -> None:
    results = read_results(lm_eval_runs / "baseline")
    chosen = {p.task: p.metric for p in gates(results, results)}
    assert chosen == {"sums": "exact_match", "choices": "acc", "near": "nearness"}


def test_the_newest_run_of_a_folder_counts(copies: Path) -> None:
    folder = read_results(copies / "twin").file.parent
    for file in list(folder.iterdir()):
        stem, _, date = file.name.rpartition("_20")
        shutil.copy(file, folder / f"{stem}_19{date}")
    assert "_20" in read_results(copies / "twin").file.name


@pytest.mark.parametrize("key", ["doc_hash", "prompt_hash", "target_hash"])
def test_another_question_is_refused_by_task_and_document(copies: Path, key: str) -> None:
    edit(sample_file(copies / "twin", "sums"), 7, key, "0" * 64)
    with pytest.raises(InputError, match=f"task sums, document 7: got {key} 000000000000"):
        pair(copies)


def test_a_missing_document_is_named(copies: Path) -> None:
    file = sample_file(copies / "twin", "sums")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match="task sums: got no document 399.*--limit"):
        pair(copies)


def test_a_missing_task_is_named(copies: Path) -> None:
    file = read_results(copies / "twin").file
    content = json.loads(file.read_text())
    del content["configs"]["near"]
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match="got no task near"):
        pair(copies)


def test_a_group_with_an_aggregate_counts_as_one_task(copies: Path) -> None:
    for name in ("baseline", "twin"):
        file = read_results(copies / name).file
        sums = sample_file(copies / name, "sums")
        shutil.copy(sums, sums.with_name(sums.name.replace("sums", "more")))
        content = json.loads(file.read_text())
        content["configs"]["more"] = content["configs"]["sums"]
        content |= {"group_subtasks": {"all": ["inner"], "inner": ["sums", "more"]}, "groups": {"all": {}}}
        file.write_text(json.dumps(content))
    pairs = gates(read_results(copies / "baseline"), read_results(copies / "twin"))
    assert {p.task: len(p.gain) for p in pairs} == {"all": 800, "choices": 400, "near": 400}


Break = Callable[[Path], None]


def results_file(folder: Path) -> Path:
    (file,) = folder.rglob("results_*.json")
    return file


def rewrite(change: Callable[[dict[str, object]], object]) -> Break:
    def apply(folder: Path) -> None:
        file = results_file(folder)
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return apply


def replace_results(data: bytes) -> Break:
    return lambda folder: None if results_file(folder).write_bytes(data) else None


def sample_line(text: str) -> Break:
    def apply(folder: Path) -> None:
        (file,) = folder.rglob("samples_sums_*.jsonl")
        lines = file.read_text().splitlines()
        lines[2] = text if text.startswith("[") else json.dumps(json.loads(lines[2])) + text
        file.write_text("\n".join(lines))

    return apply


def sample_key(key: str, value: object) -> Break:
    def apply(folder: Path) -> None:
        (file,) = folder.rglob("samples_sums_*.jsonl")
        lines = file.read_text().splitlines()
        lines[2] = json.dumps(json.loads(lines[2]) | {key: value})
        file.write_text("\n".join(lines))

    return apply


def endless_samples(folder: Path) -> None:
    (file,) = folder.rglob("samples_sums_*.jsonl")
    file.unlink()
    file.symlink_to("/dev/zero")


def nobodys_results(folder: Path) -> None:
    shutil.copytree(results_file(folder).parent, folder / "other_model")


def another_tasks_name(name: str) -> Break:
    return rewrite(lambda content: content.__setitem__("configs", {name: {}}))


DEEP = b"[" * 100_000
BREAKS: dict[str, tuple[Break, str]] = {
    "nothing in the file": (replace_results(b""), "need valid JSON"),
    "nested without end": (replace_results(DEEP), "broken JSON"),
    "a task that climbs": (another_tasks_name("../../../etc/passwd"), "need a name without folders"),
    "two models": (nobodys_results, "results of 2 models"),
    "a device for samples": (endless_samples, "got a pipe or a device"),
    "samples cut short": (sample_line("{"), "broken JSON"),
    "a score without a value": (sample_key("exact_match", float("nan")), "need finite numbers"),
    "another document": (sample_key("doc_hash", "0"), "need the same question"),
    "the other direction": (
        rewrite(lambda content: content.__setitem__("higher_is_better", {"sums": {"exact_match": False}})),
        "one meaning of the metric",
    ),
}


@pytest.fixture
def folders(lm_eval_runs: Path, tmp_path: Path) -> Path:
    for name in ("baseline", "twin"):
        shutil.copytree(lm_eval_runs / name, tmp_path / name)
    return tmp_path


def compare(folder: Path) -> Verdict:
    return decide(folder / "baseline", folder / "twin", margin=0.02, alpha=0.05)


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_told_in_one_line(folders: Path, name: str) -> None:
    apply, message = BREAKS[name]
    apply(folders / "twin")
    with pytest.raises(InputError) as caught:
        compare(folders)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(folders) in str(caught.value)
