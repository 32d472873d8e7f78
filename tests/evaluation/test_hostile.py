"""Folders that are broken or meant to harm: one clear error each, never a traceback or a wrong verdict."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vexport.errors import InputError, VexportError
from vexport.evaluation.results import read_results
from vexport.evaluation.verdict import decide
from vexport.types import Verdict

Break = Callable[[Path], None]


def results_file(folder: Path) -> Path:
    (file,) = folder.rglob("results_*.json")
    return file


def rewrite(change: Callable[[dict[str, object]], object]) -> Break:
    """Break the results file's content."""

    def apply(folder: Path) -> None:
        file = results_file(folder)
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return apply


def replace_results(data: bytes) -> Break:
    return lambda folder: None if results_file(folder).write_bytes(data) else None


def sample_line(text: str) -> Break:
    """Replace the third line of a samples file."""

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


def a_folder_for_samples(folder: Path) -> None:
    (file,) = folder.rglob("samples_sums_*.jsonl")
    file.unlink()
    file.mkdir()


def endless_samples(folder: Path) -> None:
    (file,) = folder.rglob("samples_sums_*.jsonl")
    file.unlink()
    file.symlink_to("/dev/zero")


def a_pipe_for_samples(folder: Path) -> None:
    (file,) = folder.rglob("samples_sums_*.jsonl")
    file.unlink()
    os.mkfifo(file)


def nobodys_results(folder: Path) -> None:
    shutil.copytree(results_file(folder).parent, folder / "other_model")


def another_tasks_name(name: str) -> Break:
    return rewrite(lambda content: content.__setitem__("configs", {name: {}}))


DEEP = b"[" * 100_000
BREAKS: dict[str, tuple[Break, str]] = {
    "nothing in the file": (replace_results(b""), "need valid JSON"),
    "not UTF-8": (replace_results(b"\xff\xfe{}"), "need readable JSON"),
    "a list": (replace_results(b"[]"), "got a JSON list"),
    "nested without end": (replace_results(DEEP), "broken JSON"),
    "a number without end": (replace_results(b'{"a": ' + b"9" * 5000 + b"}"), "broken JSON"),
    "no tasks": (rewrite(lambda content: content.pop("configs")), "got no tasks"),
    "configs of another kind": (rewrite(lambda content: content.__setitem__("configs", [1])), "got no tasks"),
    "a task that climbs": (another_tasks_name("../../../etc/passwd"), "need a name without folders"),
    "a task with a line break": (another_tasks_name("a\nb"), "need a name without folders"),
    "a task without a name": (another_tasks_name(""), "need a name without folders"),
    "two models": (nobodys_results, "results of 2 models"),
    "a folder for samples": (a_folder_for_samples, "need a file that can be read"),
    "a device for samples": (endless_samples, "got a pipe or a device"),
    "a pipe for samples": (a_pipe_for_samples, "got a pipe or a device"),
    "samples cut short": (sample_line("{"), "broken JSON"),
    "a list for a sample": (sample_line("[1]"), "got a JSON list"),
    "a sample nested without end": (sample_line(DEEP.decode()), "broken JSON"),
    "a document's number is true": (sample_key("doc_id", True), "need an integer and a list"),
    "metrics of another kind": (sample_key("metrics", "acc"), "need an integer and a list"),
    "a score beyond all floats": (sample_key("exact_match", 10**400), "need finite numbers"),
    "a score without a value": (sample_key("exact_match", float("nan")), "need finite numbers"),
    "another document": (sample_key("doc_hash", "0"), "need the same question"),
    "a name that no file can have": (another_tasks_name("n" * 300), "need a name without folders"),
    "more than right": (sample_key("exact_match", 5), "need from 0 to 1"),
    "the other direction": (
        rewrite(lambda content: content.__setitem__("higher_is_better", {"sums": {"exact_match": False}})),
        "one meaning of the metric",
    ),
    "another filter": (sample_key("filter", "x\ud800"), "got no document 2"),
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


@pytest.mark.parametrize(
    "change",
    [
        {"results": None},
        {"results": {"sums": {"exact_match,none": "high", "sample_len": 400}}},
        {"results": {"sums": {"exact_match,none": 10**400, "sample_len": 400}}},
        {"n-samples": {"sums": {"effective": -3}}},
        {"n-samples": {"sums": {"effective": True}}},
        {"higher_is_better": 7},
    ],
)
def test_means_that_cannot_be_read_are_missed(folders: Path, change: dict[str, object]) -> None:
    for name in ("baseline", "twin"):
        rewrite(lambda content: content.update(change, configs={"sums": {}}))(folders / name)
        (file,) = (folders / name).rglob("samples_sums_*.jsonl")
        file.unlink()
    if "higher_is_better" in change:
        assert compare(folders).outcome == "PASS"
    else:
        with pytest.raises(InputError, match="need samples, or mean, standard error and n"):
            compare(folders)


def test_groups_that_hold_themselves_end(folders: Path) -> None:
    for name in ("baseline", "twin"):
        rewrite(
            lambda content: content.update(
                group_subtasks={"a": ["b", "sums"], "b": ["a"], "sums": ["sums"]}, groups={"a": {}, "b": 1}
            )
        )(folders / name)
    assert {task.task for task in compare(folders).tasks} == {"a", "choices", "near"}


def test_random_damage_never_ends_in_a_traceback(folders: Path) -> None:
    """120 random changes of bytes in results or samples: a verdict, or one of our errors."""
    rng = random.Random(0)
    files = sorted((folders / "twin").rglob("*.json*"))
    originals = {file: file.read_bytes() for file in files}
    refused = 0
    for _ in range(120):
        file = rng.choice(files)
        data = bytearray(originals[file])
        for _ in range(rng.choice([1, 3, 30])):
            place = rng.randrange(len(data))
            data[place : place + rng.choice([0, 1, 8])] = bytes(
                rng.choice(b'{}[],:"0919\xffab-.e') for _ in range(rng.choice([0, 1, 2]))
            )
        file.write_bytes(data)
        try:
            read_results(folders / "twin")
            compare(folders)
        except VexportError:
            refused += 1
        file.write_bytes(originals[file])
    assert refused > 60
    assert compare(folders).outcome == "PASS"


def _doubled(depth: int) -> dict[str, list[str]]:
    return {f"g{number}": [f"g{number + 1}"] * 2 for number in range(depth)} | {f"g{depth}": ["sums"]}


GROUPS: dict[str, dict[str, list[str]]] = {
    "each twice in the next": _doubled(40),
    "a chain of 3,000": _doubled(3000),
    "all in each other": {f"g{one}": [*(f"g{other}" for other in range(14)), "sums"] for one in range(14)},
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_groups_are_gone_through_once(folders: Path, name: str) -> None:
    """2**40 paths, 3,000 levels, 14! paths."""
    change = {"group_subtasks": GROUPS[name], "groups": {"g0": {}}}
    for folder in ("baseline", "twin"):
        rewrite(lambda content: content.update(change))(folders / folder)
    assert read_results(folders / "twin").groups == {"g0": ("sums",)}
