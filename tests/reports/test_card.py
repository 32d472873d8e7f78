"""The model card, as huggingface_hub reads it."""

from dataclasses import replace
from typing import Any

from huggingface_hub import ModelCard

from tests.reports import sample
from vexport.reports import render


def test_hub_reads_front_matter() -> None:
    report = sample.with_source(sample.full(), "meta-llama/Llama-3.1-8B")
    data: Any = ModelCard(render(report, "card")).data
    assert data.base_model == "meta-llama/Llama-3.1-8B"
    assert data.license == "apache-2.0"
    assert "nvfp4" in data.tags
    assert report.verdict is not None
    assert [
        (result.dataset_name, result.metric_type, result.metric_value)
        for result in data.eval_results
    ] == [(task.task, task.metric, task.candidate.value) for task in report.verdict.tasks]


def test_base_model_needs_hub_source() -> None:
    report = sample.with_source(sample.full(), "/models/llama")
    data: Any = ModelCard(render(report, "card")).data
    assert "base_model" not in data.to_dict()
    assert "# NVFP4 of llama\n" in render(report, "card")
    assert "/models" not in render(report, "card")
    report = sample.with_source(sample.full(), "/cache/abc", id="Qwen/Qwen3-0.6B", card={})
    card = ModelCard(render(report, "card"))
    data = card.data
    assert (data.base_model, data.to_dict()["base_model_relation"]) == (
        "Qwen/Qwen3-0.6B",
        "quantized",
    )
    assert [result.dataset_name for result in data.eval_results] == ["facts", "addition"]
    assert data.model_name == "NVFP4 of Qwen/Qwen3-0.6B"
    assert card.text.strip().startswith("# NVFP4 of Qwen/Qwen3-0.6B\n")


def test_card_shows_commands_and_kept_layers() -> None:
    text = render(sample.full(), "card")
    assert 'pip install "vllm>=0.32.0"\nvllm serve ' in text
    assert "- 1 linear layer kept\n" in text
    loaded = sample.load_of(sample.full())
    assert loaded.engine is not None
    odd = replace(loaded, engine=replace(loaded.engine, vllm="0.32.1.dev0+g1; rm -rf ~"))
    assert "rm -rf" not in render(replace(sample.full(), load=odd), "card").split("## How")[0]
