"""What a check does not judge, it says."""

import json
from pathlib import Path

from tests.architectures.families import save_family
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks.completeness import unjudged_tensors
from vexport.checks.vllm.view import CheckpointView


def what(folder: Path) -> list[str]:
    with Reader() as reader:
        return [each.what for each in unjudged_tensors(CheckpointView(read_index(folder), reader))]


def test_a_class_whose_tensors_are_not_known_is_named(tmp_path: Path) -> None:
    assert what(save_family("llama", tmp_path / "llama")) == []
    config = json.loads((tmp_path / "llama/config.json").read_text())
    (tmp_path / "llama/config.json").write_text(
        json.dumps(config | {"architectures": ["InternLM2ForCausalLM"]})
    )
    (entry,) = what(tmp_path / "llama")
    assert "InternLM2ForCausalLM" in entry


def test_what_of_a_known_class_is_not_known_is_named(tmp_path: Path) -> None:
    folder = save_family("qwen3-next", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config))
    (entry,) = what(folder)
    assert "linear_attn" in entry
    (folder / "config.json").write_text(json.dumps({**config, "full_attention_interval": 4}))
    assert what(folder) == []
