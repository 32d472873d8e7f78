"""Unmet needs of the suites' tasks are errors with a remedy, before an engine starts."""

import re
from pathlib import Path

import pytest
import yaml

from tests.command import vexport
from tests.texts import assert_contains
from vexport.engine.process import started_process_group
from vexport.inference.task_data import missing_requirement
from vexport.scenario.evaluate import SUITES

SUITE_TASKS = {suite: ",".join(SUITES[suite].tasks) for suite in ("code", "chat")}
KEYS = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{answer}}",
}
UNKNOWN_METRIC = {"metric": "exact_mtch", "aggregation": "mean", "higher_is_better": True}
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide the hub and its caches. Workers read these variables when they import."""
    monkeypatch.setattr("vexport.engine.session.started_process_group", started_process_group)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def write_task(folder: Path, name: str, file: str, **keys: object) -> None:
    files = {"data_files": {"test": file}}
    task = {**KEYS, "task": name, "dataset_kwargs": files, **keys}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def test_trust_documents_and_metrics_are_required(offline: Path, llama: Path) -> None:
    """A metric of generated text may be on the hub.

    Without this check, lm-eval fails after all answers.
    """
    write_task(
        offline, "own", "own.jsonl", output_type="loglikelihood", metric_list=[{"metric": "acc"}]
    )
    write_task(
        offline, "other", "other.jsonl", output_type="generate_until", metric_list=[UNKNOWN_METRIC]
    )
    (offline / "other.jsonl").write_text('{"text": "a", "answer": " b"}\n')
    tasks = f"{SUITE_TASKS['code']},own,{offline / 'other.yaml'}"
    ran = vexport("eval", llama, "--baseline", llama, "--tasks", tasks, "--include-path", offline)
    assert ran.code == 2
    for task in ("humaneval", "mbpp"):
        (error,) = [line for line in ran.errors if f"task {task}: " in line]
        assert error.endswith("[tasks/model-code]")
    (error,) = [line for line in ran.errors if "own.jsonl" in line]
    assert_contains(error, "task own: data_files:", "[tasks/no-file]")
    (error,) = [line for line in ran.errors if "exact_mtch" in line]
    assert_contains(error, "task other: metric exact_mtch:", "[tasks/no-metric]")


def test_thinking_needs_generated_text(offline: Path, llama: Path) -> None:
    """Tasks and groups are refused before their documents are loaded."""
    write_task(offline, "own", "own.jsonl", output_type="multiple_choice")
    (offline / "own.jsonl").write_text('{"text": "a", "answer": " b"}\n')
    own = offline / "own.yaml"
    thinking = ("--enable-thinking", "--think-end-token", "</think>")
    ran = vexport(
        "eval", llama, "--baseline", llama, "--tasks", f"piqa,mmlu,arc_easy,{own}", *thinking
    )
    assert ran.code == 2
    for task in ("piqa", "mmlu_", "arc_easy", "own"):
        assert f"task {task}" in ran.stderr
    assert len([line for line in ran.errors if line.endswith("[tasks/thinking]")]) == 4
    assert all("multiple_choice" in line for line in ran.errors)
    assert "dataset" not in ran.stderr


def test_missing_metrics_and_documents_are_named(
    offline: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = offline / "shadow"
    shadow.mkdir()
    for name, text in {"langdetect": "", "immutabledict": "immutabledict = dict"}.items():
        (shadow / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(shadow), prepend=":")
    tasks = f"{SUITE_TASKS['code']},{SUITE_TASKS['chat']}"
    ran = vexport("eval", llama, "--baseline", llama, "--tasks", tasks, "--trust-remote-code")
    assert ran.code == 4
    for task in ("humaneval", "mbpp"):
        assert re.search(rf"\btask {task}: metric code_eval: .*\[tasks/no-metric\]", ran.stderr)
    assert "evaluate.load('code_eval')" in ran.stderr
    for name in (
        "openai_humaneval",
        "mbpp",
        "google/IFEval",
        "openai/gsm8k",
        "truthfulqa/truthful_qa",
    ):
        assert name in ran.stderr
    assert "`hf download`" in ran.stderr


def test_missing_package_names_extra() -> None:
    fault = missing_requirement(
        ModuleNotFoundError("No module named 'langdetect'", name="langdetect"), "ifeval"
    )
    assert fault is not None
    assert (fault.rule, fault.where) == ("environment/module", "task ifeval")
    assert fault.facts["module"] == "langdetect"
    assert fault.facts["requirement"] == "'lm-eval[ifeval]'"
    assert missing_requirement(ValueError("a broken template"), "mine") is None
