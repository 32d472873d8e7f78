"""Findings on the set of safetensors files that vLLM loads."""

import shutil
from pathlib import Path

import pytest

from tests.models import Good, problems


@pytest.mark.parametrize("with_params", [False, True])
def test_files_of_mistral_beside_the_checkpoint(
    good: Good, tmp_path: Path, with_params: bool
) -> None:
    """vLLM would load only them. With its own config, this may be what the author wants."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(good("W8A16"), folder)
    assert not any(finding.rule.startswith("shards/") for finding in problems(folder))
    shutil.copy(folder / "model.safetensors", folder / "consolidated.00-of-01.safetensors")
    if with_params:
        (folder / "params.json").write_text("{}")
    found = next(each for each in problems(folder) if each.rule == "shards/other-files")
    assert found.severity == ("warning" if with_params else "error")
    assert found.facts == {"names": ["consolidated.00-of-01.safetensors"]}
    loader = pytest.importorskip("vllm.model_executor.model_loader.default_loader")
    config = pytest.importorskip("vllm.config.load").LoadConfig()
    loaded = loader.DefaultModelLoader(config)._prepare_weights(str(folder), None, None, True, None)
    assert loaded[1] == [str(folder / "consolidated.00-of-01.safetensors")]


def test_files_of_mistral_in_a_subfolder(good: Good, tmp_path: Path) -> None:
    """vLLM then loads no file, even with Mistral's config."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(good("W8A16"), folder)
    (folder / "original").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "original" / "consolidated.safetensors")
    (folder / "params.json").write_text("{}")
    found = next(each for each in problems(folder) if each.rule == "shards/other-files")
    assert found.severity == "error"
    assert found.facts == {"names": ["original/consolidated.safetensors"]}
    loader = pytest.importorskip("vllm.model_executor.model_loader.default_loader")
    config = pytest.importorskip("vllm.config.load").LoadConfig()
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        loader.DefaultModelLoader(config)._prepare_weights(str(folder), None, None, True, None)


def test_checkpoint_of_only_such_files(good: Good, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(good("W8A16"), folder)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert not any(finding.rule == "shards/other-files" for finding in problems(folder))
