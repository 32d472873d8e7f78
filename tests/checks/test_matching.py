"""Which config group a layer gets and which layers are ignored, in vLLM's order."""

import pytest

from vexport.architectures import Architecture
from vexport.checks.vllm.groups import ConfigGroup, group_for, ignored, parse_group, targets_of

ATTENTION = "model.layers.0.self_attn"
QKV = tuple(f"{ATTENTION}.{leaf}_proj" for leaf in "qkv")
EXPERTS = "model.layers.0.mlp.experts"
LLAMA = Architecture(
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")}, resolved=("qkv_proj",), row_parallel=("o_proj",)
)
UNRESOLVED = Architecture(fused=LLAMA.fused)


def group(name: str, *targets: str) -> ConfigGroup:
    parsed = parse_group(name, {"targets": [*targets], "weights": {"num_bits": 8}}, "pack-quantized")
    assert isinstance(parsed, ConfigGroup)
    return parsed


def chosen(unit: str, members: tuple[str, ...], *groups: ConfigGroup) -> str | None:
    found = group_for(unit, members, targets_of(groups), LLAMA, table=LLAMA.is_table(unit))
    return found.name if found else None


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        ((group("a", "Linear"), group("b", "re:.*q_proj")), "a"),
        ((group("a", "Linear"), group("b", "re:.*[qkv]_proj")), "b"),
        ((group("a", "Linear"), group("b", "Linear")), "b"),
        ((group("a", "re:.*qkv_proj"), group("b", "re:.*self_attn.*")), "a"),
        ((group("a", "QKVParallel"),), "a"),
        ((group("a", "re:.*Linear"),), "a"),
        ((group("a", "re:qkv_proj"),), None),
        ((group("a", "RowParallelLinear"),), None),
        ((group("a", *QKV),), "a"),
    ],
)
def test_a_name_wins_over_a_class_and_a_later_group_over_an_earlier_of_the_same_target(
    groups: tuple[ConfigGroup, ...], name: str | None
) -> None:
    assert chosen(f"{ATTENTION}.qkv_proj", QKV, *groups) == name


def test_all_experts_get_what_the_first_gets() -> None:
    last = (f"{EXPERTS}.7.gate_proj", f"{EXPERTS}.7.up_proj")
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "re:.*experts.0.*")) == "a"
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "re:.*experts.7.*")) is None
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "Linear")) == "a"
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "linear")) is None
    assert [*ignored(f"{EXPERTS}.7.w13", last, ["re:.*experts.7.*"], LLAMA)] == []
    assert [*ignored(f"{EXPERTS}.7.w13", last, ["re:.*experts.0.*"], LLAMA)] == [*last]


def test_a_fused_layer_is_ignored_by_its_own_name_or_by_its_parts_where_vllm_knows_them() -> None:
    unit = f"{ATTENTION}.qkv_proj"
    assert [*ignored(unit, QKV, ["re:.*qkv_proj"], LLAMA)] == [*QKV]
    assert [*ignored(unit, QKV, [QKV[0]], LLAMA)] == [QKV[0]]
    assert [*ignored(unit, QKV, QKV, UNRESOLVED)] == []
    assert [*ignored(unit, QKV, ["re:.*qkv_proj"], UNRESOLVED)] == [*QKV]


def test_tables_and_heads_have_classes_of_their_own() -> None:
    assert chosen("model.embed_tokens", ("model.embed_tokens",), group("a", "Linear")) is None
    assert chosen("model.embed_tokens", ("model.embed_tokens",), group("a", "Embedding")) == "a"
    assert chosen("lm_head", ("lm_head",), group("a", "Linear", "Embedding")) is None
    assert chosen("lm_head", ("lm_head",), group("a", "LMHead")) == "a"
