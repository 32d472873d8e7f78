"""The model card: huggingface_hub reads it, and it inherits valid metadata of the source."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.reports import sample
from vexport.checkpoint.card import inherited_card
from vexport.reports import render

# A front matter of 600 bytes whose aliases expand to 9^8 keys.
BOMB = (
    "---\nlicense: mit\na0: &a0 {k: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9))
    + "---\n"
)


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


@pytest.mark.parametrize(
    ("text", "license_"),
    [
        ("\n   Apache License\n   Version 2.0, January 2004\n", "apache-2.0"),
        ("MIT License\n\nCopyright (c)", "mit"),
        ("All rights reserved", None),
    ],
)
def test_license_file_is_read_without_card(tmp_path: Path, text: str, license_: str | None) -> None:
    (tmp_path / "LICENSE").write_text(text, encoding="utf-8")
    assert inherited_card(tmp_path).get("license") == license_
    (tmp_path / "README.md").write_text("---\nlicense: gemma\n---\n", encoding="utf-8")
    assert inherited_card(tmp_path)["license"] == "gemma"


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
        ("---\nlicense: &a [*a]\n---\n", {}),
        (f"---\nlicense: {'[' * 30_000}\n---\n", {}),
        ("---\nlicense: 2020-99-99\n---\n", {}),
        (f"---\nlicense: {'9' * 6000}\n---\n", {}),
        ('---\nlicense: "mit\\nbase_model: x"\n---\n', {}),
        (BOMB, {"license": "mit"}),
        ("", {}),
    ],
)
def test_inherited_metadata(tmp_path: Path, text: str, inherited: dict[str, object]) -> None:
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert inherited_card(tmp_path) == inherited


@pytest.mark.parametrize("name", ["", "README.md", "LICENSE"])
def test_source_without_card(tmp_path: Path, name: str) -> None:
    """A pipe with a card's name is ignored: reading it would block the end of a run."""
    if name:
        os.mkfifo(tmp_path / name)
    assert inherited_card(tmp_path) == {}
