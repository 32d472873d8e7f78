"""Which layers get which config group, tables of tokens among them, and which are ignored."""

from pathlib import Path

import pytest
import torch

from tests.models import Good, problems
from tests.mutations.edits import (
    ARGUMENTS,
    GROUP,
    QUANTIZATION,
    Tensors,
    drop,
    json_config,
    node,
    spoiled,
    tensors,
)
from vexport.architectures import Architecture
from vexport.checks.vllm.groups import ConfigGroup, group_for, ignored, parse_group, targets_of
from vexport.records import Json
from vexport.records.patterns import Patterns

NAMED, OF_CLASS = "re:.*embed_tokens$", "Embedding"
TABLE = "model.embed_tokens"


@tensors
def packed(values: Tensors) -> None:
    """The table of tokens in codes of 4 bits with groups of 32."""
    rows, columns = values.pop(f"{TABLE}.weight").shape
    values[f"{TABLE}.weight_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
    values[f"{TABLE}.weight_scale"] = torch.zeros(rows, columns // 32, dtype=torch.bfloat16)
    values[f"{TABLE}.weight_shape"] = torch.tensor([rows, columns])


@pytest.mark.parametrize(
    ("model", "target", "state", "words"),
    [
        ("LlamaForCausalLM", NAMED, "packed", "gives its table no name"),
        ("LlamaForCausalLM", OF_CLASS, "packed", ""),
        ("LlamaForCausalLM", OF_CLASS, "tied", "tied"),
        ("Qwen3ForCausalLM", NAMED, "packed", ""),
        ("Qwen3ForCausalLM", NAMED, "tied", "tied"),
        ("Qwen3ForCausalLM", NAMED, "asymmetric", "symmetric integers"),
        ("Gemma2ForCausalLM", OF_CLASS, "tied", "without a quantization config"),
        ("MixtralForCausalLM", NAMED, "packed", "without a quantization config"),
        ("LlamaForCausalLM", NAMED, "16 bits", ""),
        ("LlamaForCausalLM", OF_CLASS, "16 bits", "an unquantized weight"),
        ("Qwen3ForCausalLM", NAMED, "16 bits", "an unquantized weight"),
        ("Gemma2ForCausalLM", OF_CLASS, "16 bits", ""),
    ],
)
def test_tables_of_tokens(
    good: Good, tmp_path: Path, model: str, target: str, state: str, words: str
) -> None:
    """A config group with this target, by the model's class; `state` is how the table is stored."""

    @json_config
    def targeted(whole: dict[str, Json]) -> None:
        args = {**node(whole, ARGUMENTS), "group_size": 32, "symmetric": state != "asymmetric"}
        groups = node(whole, (*QUANTIZATION, "config_groups"))
        groups["table"] = {**node(whole, GROUP), "targets": [target], "weights": args}
        whole["architectures"], whole["tie_word_embeddings"] = [model], state == "tied"

    folder = spoiled(good("W4A16"), tmp_path / "table", targeted)
    if state != "16 bits":
        packed(folder)
    if state == "tied":
        drop("lm_head.weight")(folder)
    found = [
        each.got for each in problems(folder) if (each.check, each.where) == ("targets", TABLE)
    ]
    assert bool(found) is bool(words)
    assert words in " ".join(found)


ATTENTION = "model.layers.0.self_attn"
QKV = tuple(f"{ATTENTION}.{leaf}_proj" for leaf in "qkv")
EXPERTS = "model.layers.0.mlp.experts"
OF_LLAMA = Architecture(
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    resolved=("qkv_proj",),
    row_parallel=("o_proj",),
)


def group(name: str, *targets: str) -> ConfigGroup:
    parsed = parse_group(
        name, {"targets": [*targets], "weights": {"num_bits": 8}}, "pack-quantized"
    )
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
def test_target_precedence(groups: tuple[ConfigGroup, ...], name: str | None) -> None:
    assert chosen(f"{ATTENTION}.qkv_proj", QKV, *groups) == name


def test_experts_tables_and_heads_have_rules_of_their_own() -> None:
    last = (f"{EXPERTS}.7.gate_proj", f"{EXPERTS}.7.up_proj")
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "re:.*experts.0.*")) == "a"
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "re:.*experts.7.*")) is None
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "Linear")) == "a"
    assert chosen(f"{EXPERTS}.7.w13", last, group("a", "linear")) is None
    assert [*ignored(f"{EXPERTS}.7.w13", last, Patterns(["re:.*experts.7.*"]), OF_LLAMA)] == []
    assert [*ignored(f"{EXPERTS}.7.w13", last, Patterns(["re:.*experts.0.*"]), OF_LLAMA)] == [*last]
    assert chosen("model.embed_tokens", ("model.embed_tokens",), group("a", "Linear")) is None
    assert chosen("model.embed_tokens", ("model.embed_tokens",), group("a", "Embedding")) == "a"
    assert chosen("lm_head", ("lm_head",), group("a", "Linear", "Embedding")) is None
    assert chosen("lm_head", ("lm_head",), group("a", "LMHead")) == "a"
