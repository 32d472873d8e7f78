"""Which layers get which config group, tables of tokens among them, and which are ignored."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.engine.sketches import LLAMA, Tensor, sketch
from vexport.architectures import Architecture
from vexport.checks import check_checkpoint
from vexport.checks.vllm.groups import ConfigGroup, group_for, ignored, parse_group, targets_of
from vexport.records import Json

ROWS, COLUMNS, GROUP = 384, 256, 32
NAMED, OF_CLASS = "re:.*embed_tokens$", "Embedding"
TABLE: Mapping[str, Tensor | None] = {
    "model.embed_tokens.weight": None,
    "model.embed_tokens.weight_packed": ("I32", (ROWS, COLUMNS // 8)),
    "model.embed_tokens.weight_scale": ("BF16", (ROWS, COLUMNS // GROUP)),
    "model.embed_tokens.weight_shape": ("I64", (2,)),
}


def checkpoint(folder: Path, model: str, target: str, *, tied: bool, packed: bool, **weights: Json) -> Path:
    change = {**(TABLE if packed else {}), **({"lm_head.weight": None} if tied else {})}
    kind = model.removesuffix("ForCausalLM").lower()
    config = {**LLAMA, "architectures": [model], "model_type": kind, "tie_word_embeddings": tied}
    sketch(folder, config, "W4A16", change)
    content = json.loads((folder / "config.json").read_text())
    groups = content["quantization_config"]["config_groups"]
    args = {**groups["group_0"]["weights"], "group_size": GROUP, **weights}
    groups["table"] = {**groups["group_0"], "targets": [target], "weights": args}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def said(folder: Path) -> str:
    found = check_checkpoint(str(folder)).findings
    return " ".join(one.got for one in found if (one.check, one.where) == ("targets", "model.embed_tokens"))


@pytest.mark.parametrize(
    ("model", "target", "tied", "words"),
    [
        ("LlamaForCausalLM", NAMED, False, "gives its table no name"),
        ("LlamaForCausalLM", OF_CLASS, False, ""),
        ("LlamaForCausalLM", OF_CLASS, True, "tied"),
        ("Qwen3ForCausalLM", NAMED, False, ""),
        ("Qwen3ForCausalLM", NAMED, True, "tied"),
        ("Gemma2ForCausalLM", OF_CLASS, True, "without a quantization config"),
        ("MixtralForCausalLM", NAMED, False, "without a quantization config"),
    ],
)
def test_quantized_tables(tmp_path: Path, model: str, target: str, tied: bool, words: str) -> None:
    got = said(checkpoint(tmp_path / "table", model, target, tied=tied, packed=True))
    assert words in got
    assert bool(got) is bool(words)


@pytest.mark.parametrize(
    ("model", "target", "refused"),
    [
        ("LlamaForCausalLM", NAMED, False),
        ("LlamaForCausalLM", OF_CLASS, True),
        ("Qwen3ForCausalLM", NAMED, True),
        ("Gemma2ForCausalLM", OF_CLASS, False),
    ],
)
def test_targeted_tables_in_16_bits(tmp_path: Path, model: str, target: str, refused: bool) -> None:
    got = said(checkpoint(tmp_path / "table", model, target, tied=False, packed=False))
    assert got == ("an unquantized weight" if refused else "")


def test_other_numbers(tmp_path: Path) -> None:
    odd = checkpoint(tmp_path / "odd", "Qwen3ForCausalLM", NAMED, tied=False, packed=True, symmetric=False)
    assert "symmetric integers" in said(odd)


ATTENTION = "model.layers.0.self_attn"
QKV = tuple(f"{ATTENTION}.{leaf}_proj" for leaf in "qkv")
EXPERTS = "model.layers.0.mlp.experts"
OF_LLAMA = Architecture(
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")}, resolved=("qkv_proj",), row_parallel=("o_proj",)
)


def group(name: str, *targets: str) -> ConfigGroup:
    parsed = parse_group(name, {"targets": [*targets], "weights": {"num_bits": 8}}, "pack-quantized")
    assert isinstance(parsed, ConfigGroup)
    return parsed


def chosen(unit: str, members: tuple[str, ...], *groups: ConfigGroup) -> str | None:
    found = group_for(unit, members, targets_of(groups), OF_LLAMA, table=OF_LLAMA.is_table(unit))
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


def test_experts_tables_and_heads_have_rules_of_their_own() -> None:
    last = (f"{EXPERTS}.7.gate_proj", f"{EXPERTS}.7.up_proj")
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "re:.*experts.0.*")) == "a"
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "re:.*experts.7.*")) is None
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "Linear")) == "a"
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "linear")) is None
    assert [*ignored(f"{EXPERTS}.7.w13", last, ["re:.*experts.7.*"], OF_LLAMA)] == []
    assert [*ignored(f"{EXPERTS}.7.w13", last, ["re:.*experts.0.*"], OF_LLAMA)] == [*last]
    assert chosen("model.embed_tokens", ("model.embed_tokens",), group("a", "Linear")) is None
    assert chosen("model.embed_tokens", ("model.embed_tokens",), group("a", "Embedding")) == "a"
    assert chosen("lm_head", ("lm_head",), group("a", "Linear", "Embedding")) is None
    assert chosen("lm_head", ("lm_head",), group("a", "LMHead")) == "a"
