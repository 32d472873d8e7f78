"""Plans and checks use the same fused layers."""

from pathlib import Path

import pytest

from tests.architectures.families import save_family
from vexport.architectures.built import BuiltModel
from vexport.checkpoint.index import read_index
from vexport.plan.build import build_plan
from vexport.scenario import Rule


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3", "gemma3"])
def test_plan_and_checks_fuse_equally(family: str, tmp_path: Path) -> None:
    index = read_index(save_family(family, tmp_path / family))
    plan = build_plan(index, [Rule(match="Linear", scheme="FP8_DYNAMIC")])
    fused = {layer.name: layer for layer in BuiltModel(index).fused_layers}
    assert plan.groups
    assert all(fused[group.name] == group.layer for group in plan.groups)
    assert all(
        fused[member].members == (member,) for member in plan.kept_linears if member in fused
    )


def test_modules_that_are_no_layers(tmp_path: Path) -> None:
    index = read_index(save_family("llama", tmp_path / "llama"))
    everything = BuiltModel(index)
    less = BuiltModel(index, is_layer=lambda module: not module.endswith("q_proj"))
    left_out = everything.modules.keys() - less.modules.keys()
    assert left_out
    assert all(name.endswith("q_proj") for name in left_out)
    names = {layer.name.rpartition(".")[2]: layer.members for layer in less.fused_layers}
    assert [name.rpartition(".")[2] for name in names["qkv_proj"]] == ["k_proj", "v_proj"]
