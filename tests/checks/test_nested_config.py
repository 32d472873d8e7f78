"""A language model inside another model is judged by its own part of config.json, whatever that is called."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.models import errors
from tests.mutations.edits import WEIGHTS, Tensors
from vexport.checkpoint.index import read_index
from vexport.quantize.text import vocab_size
from vexport.records import Json

# Class and model type, where the names of the language model begin, the keys around its config.
WRAPPERS = {
    "text_config": ("LlavaForConditionalGeneration", "llava", "language_model.", ("text_config",)),
    "llm_config": ("InternVLChatModel", "internvl_chat", "language_model.", ("llm_config",)),
    "thinker_config": ("Qwen2_5OmniModel", "qwen2_5_omni", "thinker.", ("thinker_config", "text_config")),
}


def wrapped(llama: Path, folder: Path, kind: str, *, last_layer: bool = True) -> Path:
    """A Llama of three layers as the language model of another class, with or without its last layer."""
    architecture, model_type, prefix, keys = WRAPPERS[kind]
    folder.mkdir()
    stored: Tensors = load_file(llama / WEIGHTS)
    kept = {name: value for name, value in stored.items() if last_layer or ".layers.2." not in name}
    save_file({prefix + name: value for name, value in kept.items()}, folder / WEIGHTS)
    config: Json = json.loads((llama / "config.json").read_text())
    for key in reversed(keys):
        config = {key: config}
    outer = {"architectures": [architecture], "model_type": model_type, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**outer, **(config if isinstance(config, dict) else {})}))
    return folder


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_whole_model_is_clean(llama: Path, tmp_path: Path, kind: str) -> None:
    model = wrapped(llama, tmp_path / "model", kind)
    assert errors(model) == []
    assert vocab_size(read_index(model)) == 384


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_missing_last_layer_is_found(llama: Path, tmp_path: Path, kind: str) -> None:
    (finding,) = errors(wrapped(llama, tmp_path / "model", kind, last_layer=False))
    prefix = WRAPPERS[kind][2]
    assert (finding.check, finding.where) == ("completeness", f"{prefix}model.layers.2")
    assert "3 decoder layers (num_hidden_layers)" in finding.expected
