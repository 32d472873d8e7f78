"""The values that `check` reads of another method's weights are those of its producer's own formula."""

from pathlib import Path

import pytest
import torch

from tests.checks.formulas import own_weight
from tests.checks.quant_methods import CHECKPOINTS, write
from tests.models import save_llama
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.quant_methods.base import MethodGroup
from vexport.checks.vllm.translated import translate
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import dequantized, read_parameters

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller micro Llama."""
    return save_llama(tmp_path_factory.mktemp("small") / "model", num_hidden_layers=2)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_values_are_the_producers(model: Path, tmp_path: Path, name: str) -> None:
    with Reader() as reader:
        view = CheckpointView(read_index(write(name, model, tmp_path / "source")), reader)
        (fused,) = (each for each in view.fused_linears if DOWN in each.members)
        group = view.group_of(fused)
        assert isinstance(group, MethodGroup)
        expected = own_weight(group, read_parameters(view, fused.members[DOWN]))
        weight = dequantized(translate(view), DOWN)
    assert weight is not None
    assert torch.equal(weight, expected.to(weight.dtype))
