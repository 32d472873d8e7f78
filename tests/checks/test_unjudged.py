"""What a check does not judge, it says."""

from pathlib import Path

from tests.architectures.families import save_family
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks.completeness import unjudged
from vexport.checks.vllm.view import CheckpointView


def what(folder: Path) -> list[str]:
    """What is not judged of a checkpoint."""
    with Reader() as reader:
        return list(unjudged(CheckpointView(read_index(folder), reader)))


def test_a_class_whose_tensors_are_not_known_is_named(tmp_path: Path) -> None:
    assert what(save_family("llama", tmp_path / "llama")) == []
    (entry,) = what(save_family("bloom", tmp_path / "bloom"))
    assert "BloomForCausalLM" in entry
