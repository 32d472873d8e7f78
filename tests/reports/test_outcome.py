"""A run's outcome and reason, and the names of models and paths in a report."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.models import save_llama
from tests.reports import sample
from tests.texts import assert_contains
from vexport.checkpoint.index import read_index
from vexport.names import parse_source
from vexport.records import CheckReport, Needed, Outcome
from vexport.reports import render, render_verdicts
from vexport.reports.formatting import next_step_of_verdict
from vexport.run.directory import portable
from vexport.run.stages.concluding import Gate, conclusion_of_checkpoint
from vexport.run.stages.made import size_by_kind, source_name, tensor_kind

GOOD = CheckReport(checkpoint="c", ok=True, findings=(sample.finding(),))


def test_verdict_decides_if_stages_passed() -> None:
    gates: list[tuple[str, Gate]] = [
        ("check", GOOD),
        ("dry load", sample.dry_load()),
        ("load", sample.load()),
    ]
    outcome, reason = conclusion_of_checkpoint(gates, None, is_made=True)
    assert outcome == "PASS"
    assert "accuracy was not evaluated" in reason
    text = render(replace(sample.report(), verdict=None, reason=reason), "text")
    first, rest = text.split("\n", 1)
    assert first == "PASS on CPU, emulated  demo-nvfp4"
    assert " ".join(rest.split()).startswith(reason[0].upper() + reason[1:])
    judged = sample.verdict("INCONCLUSIVE")
    conclusion = conclusion_of_checkpoint(gates, judged, is_made=True)
    assert conclusion == ("INCONCLUSIVE", judged.reason)


@pytest.mark.parametrize("stage", ["check", "load"])
def test_failed_stage_names_first_error(stage: str) -> None:
    errors = (sample.finding(), sample.finding("error"), sample.finding("error", where="lm_head"))
    check = CheckReport(checkpoint="c", ok=False, findings=errors) if stage == "check" else GOOD
    failed = replace(sample.load(), ok=False, findings=errors)
    loaded = None if stage == "check" else failed
    gates: list[tuple[str, Gate]] = [("check", check), ("load", failed)]
    outcome, reason = conclusion_of_checkpoint(gates, None, is_made=True)
    assert outcome == "FAIL"
    assert reason.startswith(f"{stage}: model.layers.2.mlp.down_proj: ")
    assert "1 more error" in reason
    report = replace(sample.with_made(sample.unloaded(), check=check), reason=reason, load=loaded)
    text = render(report, "text")
    assert text.startswith("FAIL  demo" if stage == "check" else "FAIL on CPU, emulated  demo")
    assert "% of the size." not in text


@pytest.mark.parametrize(
    ("source", "folder", "name"),
    [
        (
            "Qwen/Qwen3-0.6B",
            "hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a0",
            "Qwen/Qwen3-0.6B",
        ),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/c1899", "elsewhere", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "local", "Qwen/Qwen3-0.6B"),
        ("/no/Llama-3.1-8B", "Llama-3.1-8B", "Llama-3.1-8B"),
        ("/no/tiny/model", "tiny/model", "tiny"),
        ("/no/tiny/model/checkpoint", "tiny/model/checkpoint", "tiny"),
    ],
)
def test_source_names(tmp_path: Path, source: str, folder: str, name: str) -> None:
    assert source_name(parse_source(source), tmp_path / folder) == name


def test_commands_are_relative_to_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        f"{tmp_path}/scenarios/a.yaml",
        f"--run-dir={tmp_path}/runs/a",
        "/elsewhere/b",
        "--limit=3",
    ]
    assert list(map(portable, words)) == [
        "scenarios/a.yaml",
        "--run-dir=runs/a",
        "/elsewhere/b",
        "--limit=3",
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.mlp.experts.7.down_proj.weight_scale", "mlp"),
        ("model.layers.3.self_attn.k_scale", "self_attn"),
        ("model.layers.3.input_layernorm.weight", "norm"),
        ("model.norm.weight", "norm"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("lm_head.weight", "lm_head"),
        ("lonely", "lonely"),
    ],
)
def test_tensor_kinds(name: str, kind: str) -> None:
    assert tensor_kind(name) == kind


def test_sizes_by_kind_add_up(tmp_path: Path) -> None:
    index = read_index(save_llama(tmp_path / "model"))
    sizes = size_by_kind(index, index)
    assert (
        sum(size.source_bytes for size in sizes)
        == sum(size.output_bytes for size in sizes)
        == index.num_bytes
    )
    assert {"self_attn", "mlp", "embed_tokens"} <= {size.kind for size in sizes}


def test_page_of_verdict_names_the_next_step() -> None:
    """A verdict outside of a run has a next step, unless it is PASS."""
    remedies: dict[Outcome, str] = {
        "FAIL": "scheme with more bits",
        "INCONCLUSIVE": "Evaluate about 2,900 documents of",
    }
    for outcome, remedy in remedies.items():
        page = render_verdicts([sample.verdict(outcome)], "html")
        assert "<b>Next</b>" in page
        assert remedy in page
    assert "<b>Next</b>" not in render_verdicts([sample.verdict("PASS")], "html")


def test_next_step_proposes_documents_only_if_they_help() -> None:
    verdict = sample.verdict("INCONCLUSIVE")
    cases = (
        (Needed(documents=500, available=1000), True),
        (Needed(documents=500, available=400), False),
        (None, False),
    )
    for needed, helps in cases:
        tasks = tuple(replace(task, needed=needed) for task in verdict.tasks)
        _, sentence = next_step_of_verdict(replace(verdict, tasks=tasks))
        assert ("about 500 documents of addition" in sentence) == helps
        assert "tasks" not in sentence or not helps


def test_next_step_after_missing_tasks() -> None:
    """If every shared task passes, further documents do not help: a side lacks a task."""
    verdict = replace(sample.verdict("PASS"), outcome="INCONCLUSIVE")
    _, sentence = next_step_of_verdict(verdict)
    assert_contains(sentence, "the same tasks", "--task")
