"""Folders that are broken or meant to harm: one clear error each, never a traceback or a wrong verdict."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vexport.errors import InputError
from vexport.evaluation.verdict import decide
from vexport.records import Verdict

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
