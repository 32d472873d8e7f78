"""What is no checkpoint is known by its files, and told with what helps."""

from pathlib import Path

import pytest

from tests.command import vexport


@pytest.mark.parametrize(
    ("files", "name", "got", "fix"),
    [
        (["model.Q4_K_M.gguf"], "", "a GGUF file (model.Q4_K_M.gguf)", "converted from"),
        (["model.gguf"], "model.gguf", "a GGUF file", "converted from"),
        (["model_index.json", "transformer/config.json"], "", "a pipeline of Diffusers", "a language model"),
        (
            ["config.json", "pytorch_model.bin"],
            "",
            "pickled weights alone (pytorch_model.bin)",
            "save_pretrained",
        ),
        (["config.json", "onnx/model.onnx"], "", "an ONNX model (onnx/model.onnx)", "exported from"),
        (["checkpoint-10/config.json", "trainer_state.json"], "", "a training run", "checkpoint-10"),
        (["snapshots/abc/config.json", "refs/main"], "", "the hub's cache", "snapshots/abc"),
        (["models--A--B/snapshots/abc/config.json"], "", "the hub's cache", "snapshots/abc"),
    ],
)
def test_it_is_named(files: list[str], name: str, got: str, fix: str, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    ran = vexport("plan", tmp_path / name, "--scheme", "FP8_DYNAMIC")
    assert ran.code == 2
    assert len(ran.errors) == 1
    assert got in ran.errors[0]
    assert fix in ran.errors[0]
