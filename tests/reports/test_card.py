"""The model card is one that huggingface_hub reads, and it inherits what stays true of the source."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.reports import sample
from vexport.checkpoint.card import inherited_card
from vexport.reports import render


def test_the_front_matter_is_read_by_the_hub() -> None:
    report = replace(sample.full(), source="meta-llama/Llama-3.1-8B")
    data: Any = ModelCard(render(report, "card")).data
    assert data.base_model == "meta-llama/Llama-3.1-8B"
    assert data.license == "apache-2.0"
    assert "nvfp4" in data.tags
    assert report.verdict is not None
    assert [(one.dataset_name, one.metric_type, one.metric_value) for one in data.eval_results] == [
        (task.task, task.metric, task.candidate.value) for task in report.verdict.tasks
    ]


def test_a_local_source_is_no_base_model() -> None:
    report = replace(sample.full(), source="/models/llama")
    data: Any = ModelCard(render(report, "card")).data
    assert "base_model" not in data.to_dict()
    assert "NVFP4 of llama: " in render(report, "card")
    assert "/models" not in render(report, "card")


def test_recovery_stands_with_its_interval() -> None:
    text = render(sample.full(), "card")
    assert "99.5% (98.1% to 100.2%)" in text
    assert "vllm serve" in text
    assert "not shown there: FlashInfer and CUTLASS NVFP4 kernels of sm100 were not run" in text


def test_a_hostile_name_stays_inside_its_value() -> None:
    card: Any = ModelCard(render(sample.hostile(), "card"))
    assert set(card.data.to_dict()) <= {
        "license",
        "language",
        "pipeline_tag",
        "library_name",
        "tags",
        "model-index",
    }
    assert "<script>" not in card.text


@pytest.mark.parametrize(
    ("text", "inherited"),
    [
        (
            "---\nlicense: mit\nlanguage: [en, de]\ntags: [x]\n---\n# A\n",
            {"license": "mit", "language": ("en", "de")},
        ),
        ("---\nlicense: {a: 1}\n---\n", {}),
        ("---\nlicense: [\n---\n", {}),
        ("# No front matter\n", {}),
        ("---\n- a\n---\n", {}),
        ("", {}),
    ],
)
def test_what_a_source_passes_on(tmp_path: Path, text: str, inherited: dict[str, object]) -> None:
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert inherited_card(tmp_path) == inherited


def test_a_source_without_a_card_passes_nothing_on(tmp_path: Path) -> None:
    assert inherited_card(tmp_path) == {}
