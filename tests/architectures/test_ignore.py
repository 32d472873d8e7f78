"""No entry of `ignore` matches a layer that vexport quantizes."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.utils import match_name

from tests.architectures.families import EXPERTS, Family, save, save_family
from tests.command import vexport
from tests.mutations.edits import spoiled, tensors
from vexport.checkpoint.index import read_index
from vexport.formats.plan import Plan
from vexport.plan.build import build_plan
from vexport.plan.source import scheme_rules
from vexport.scenario import Planning

INKLING = Family(
    "inkling_text",
    {
        **EXPERTS,
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 64},
        **{"n_routed_experts": 4, "n_shared_experts": 2, "mlp_layer_types": ["dense", "sparse"]},
    },
)
MLP = "model.layers.1.mlp"


def plan_of(folder: Path, ignore: tuple[str, ...] = ()) -> Plan:
    return build_plan(
        read_index(folder), scheme_rules(Planning(scheme="FP8_DYNAMIC", ignore=ignore))
    )


def matched(plan: Plan) -> set[str]:
    """Return the quantized layers that `ignore` matches, as compressed-tensors matches names."""
    names = [member.name for group in plan.groups for member in group.members]
    return {name for name in names if any(match_name(name, entry) for entry in plan.ignore)}


@pytest.mark.parametrize("part", ["extra_experts.up_proj", "experts.shared.up_proj"])
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_stacked_experts_beside_routed(family: str, part: str, tmp_path: Path) -> None:
    """Experts of an unknown format are kept. The routed experts of the layer are quantized."""
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    name = f"model.layers.1.{block}.{part}"
    extra = {name: torch.randn(2, 128, 256, dtype=torch.bfloat16)}
    model = save_family(family, tmp_path / "model")
    source = spoiled(model, tmp_path / "source", tensors(lambda values: values.update(extra)))
    plan = plan_of(source)
    quantized = {member.name for group in plan.groups for member in group.members}
    assert any(".experts.0." in each for each in quantized)
    assert matched(plan) == set()
    assert name in plan.ignore
    # A checkpoint without these experts has the same list, except for their names.
    assert set(plan.ignore) - {name} == set(plan_of(model).ignore)


def test_pattern_remains_if_routed_experts_are_kept(tmp_path: Path) -> None:
    extra = {f"{MLP}.extra_experts.up_proj": torch.randn(2, 128, 256, dtype=torch.bfloat16)}
    model = save_family("qwen3-moe", tmp_path / "model")
    source = spoiled(model, tmp_path / "source", tensors(lambda values: values.update(extra)))
    plan = plan_of(source, ignore=(rf"re:{MLP}[.]experts[.].*",))
    assert matched(plan) == set()
    assert any(entry.startswith("re:") and "experts" in entry for entry in plan.ignore)


def test_checkpoint_passes(tmp_path: Path) -> None:
    """Transformers writes the text model of Inkling with such tensors."""
    model = save(INKLING, tmp_path / "model")
    out = tmp_path / "out"
    ran = vexport("quantize", model, out, "--scheme", "W8A16", "--rounding", "nearest")
    assert ran.code == 0, ran.stderr
    assert vexport("check", out, "--static").code == 0
