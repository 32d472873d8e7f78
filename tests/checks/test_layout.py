"""Tensors that vLLM's classes build from a config, and tensors that are not judged."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.architectures.families import save_family
from tests.models import errors, quantize
from tests.mutations.edits import (
    WEIGHTS,
    WHOLE,
    Change,
    Tensors,
    config,
    drop_if,
    spoiled,
    tensors,
    without,
)
from vexport.architectures import architecture_table
from vexport.architectures.config import vocab_size
from vexport.architectures.layout_table import get_layout, layout_entries
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks.completeness import tensors_not_judged
from vexport.checks.vllm.view import CheckpointView
from vexport.records import Json

NORM = "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight"


def test_layout_experts_are_class_experts() -> None:
    table = architecture_table()
    for name in layout_entries().keys() & table.architectures.keys():
        entry, experts = get_layout(name), table.architectures[name].experts
        assert entry is not None
        own = {
            each.split(".")[-2] for row in entry.rows for each in row.names if ".experts.*." in each
        }
        assert experts is None or own <= {*experts}, name


def drop_prefix(start: str) -> Change:
    return drop_if(lambda name: name.startswith(start))


@tensors
def stack_experts(values: Tensors) -> None:
    """Stack the experts of the second layer in one tensor, with a name that vLLM does not load."""
    start = "model.layers.1.mlp.experts."
    experts = {name: values.pop(name) for name in [*values] if name.startswith(start)}
    down = [value for name, value in experts.items() if name.endswith("down_proj.weight_packed")]
    values[f"{start}down_proj_packed"] = torch.stack(down)


@pytest.mark.parametrize(
    ("family", "spoil", "where"),
    [
        ("qwen3-moe", drop_prefix("model.layers.1.mlp.experts.2."), "model.layers.1.mlp.experts.2"),
        ("qwen3-moe", stack_experts, "model.layers.1.mlp.experts.down_proj_packed"),
        (
            "qwen3-next",
            drop_prefix("model.layers.0.linear_attn.A_log"),
            "model.layers.0.linear_attn.A_log",
        ),
        (
            "llama4",
            drop_prefix("model.layers.0.feed_forward.experts."),
            "model.layers.0.feed_forward.experts",
        ),
        ("gemma3-vision", drop_prefix(NORM), NORM),
        (
            "qwen2.5-vl",
            drop_prefix("visual.blocks.0.attn.qkv.bias"),
            "visual.blocks.0.attn.qkv.bias",
        ),
        ("gpt2", drop_prefix("transformer.wpe"), "transformer.wpe.weight"),
    ],
)
def test_missing_tensors_are_named(family: str, spoil: Change, where: str, tmp_path: Path) -> None:
    folder = quantize(save_family(family, tmp_path / "source"), tmp_path / "out", "NVFP4A16")
    assert errors(folder) == []
    assert [finding.where for finding in errors(spoiled(folder, tmp_path / "spoiled", spoil))][
        :1
    ] == [where]


@pytest.mark.parametrize(
    ("family", "part", "key"),
    [
        ("mistral3", "text_config", "intermediate_size"),
        ("qwen2.5-vl", "vision_config", "hidden_size"),
    ],
)
def test_sizes_of_nested_configs(family: str, part: str, key: str, tmp_path: Path) -> None:
    folder = quantize(save_family(family, tmp_path / "source"), tmp_path / "out", "FP8_DYNAMIC")
    size = json.loads((folder / "config.json").read_text())[part][key]
    larger = spoiled(folder, tmp_path / "larger", config((part,), **{key: 2 * size}))
    assert {finding.check for finding in errors(larger)} == {"shapes"}


def unjudged_names(folder: Path) -> list[str]:
    with Reader() as reader:
        return [
            each.what for each in tensors_not_judged(CheckpointView(read_index(folder), reader))
        ]


def test_unjudged_tensors_are_named(tmp_path: Path) -> None:
    assert unjudged_names(save_family("llama", tmp_path / "llama")) == []
    config(WHOLE, architectures=["InternLM2ForCausalLM"])(tmp_path / "llama")
    (entry,) = unjudged_names(tmp_path / "llama")
    assert "InternLM2ForCausalLM" in entry
    folder = save_family("qwen3-next", tmp_path / "model")
    without(WHOLE, "layer_types")(folder)
    (entry,) = unjudged_names(folder)
    assert "linear_attn" in entry
    config(WHOLE, full_attention_interval=4)(folder)
    assert unjudged_names(folder) == []


# Class, model type, prefix of the language model's tensors, and keys of its nested config.
WRAPPERS = {
    "text_config": ("LlavaForConditionalGeneration", "llava", "language_model.", ("text_config",)),
    "llm_config": ("InternVLChatModel", "internvl_chat", "language_model.", ("llm_config",)),
    "thinker_config": (
        "Qwen2_5OmniModel",
        "qwen2_5_omni",
        "thinker.",
        ("thinker_config", "text_config"),
    ),
}


def save_wrapped(llama: Path, folder: Path, kind: str, *, last_layer: bool = True) -> Path:
    """Store a Llama of three layers as the language model of another class.

    The last layer can be left out.
    """
    architecture, model_type, prefix, keys = WRAPPERS[kind]
    folder.mkdir()
    stored: Tensors = load_file(llama / WEIGHTS)
    kept = {name: value for name, value in stored.items() if last_layer or ".layers.2." not in name}
    save_file({prefix + name: value for name, value in kept.items()}, folder / WEIGHTS)
    inner: Json = json.loads((llama / "config.json").read_text())
    for key in reversed(keys):
        inner = {key: inner}
    outer = {"architectures": [architecture], "model_type": model_type, "dtype": "bfloat16"}
    (folder / "config.json").write_text(
        json.dumps({**outer, **(inner if isinstance(inner, dict) else {})})
    )
    return folder


@pytest.mark.parametrize("kind", WRAPPERS)
def test_missing_layer_of_language_model(llama: Path, tmp_path: Path, kind: str) -> None:
    model = save_wrapped(llama, tmp_path / "model", kind)
    assert errors(model) == []
    assert vocab_size(read_index(model).config, "config.json") == 384
    (finding,) = errors(save_wrapped(llama, tmp_path / "cut", kind, last_layer=False))
    prefix = WRAPPERS[kind][2]
    assert finding.where == f"{prefix}model.layers.2"
    assert (finding.rule, finding.facts) == ("completeness/missing-decoder-layer", {"layers": 3})
