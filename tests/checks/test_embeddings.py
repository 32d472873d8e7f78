"""The config group of each layer, embeddings included, and ignored layers."""

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

BY_NAME, BY_CLASS = "re:.*embed_tokens$", "Embedding"
TABLE = "model.embed_tokens"


@tensors
def pack_table(values: Tensors) -> None:
    """Store the embedding in codes of 4 bits with groups of 32."""
    rows, columns = values.pop(f"{TABLE}.weight").shape
    values[f"{TABLE}.weight_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
    values[f"{TABLE}.weight_scale"] = torch.zeros(rows, columns // 32, dtype=torch.bfloat16)
    values[f"{TABLE}.weight_shape"] = torch.tensor([rows, columns])


@pytest.mark.parametrize(
    ("model", "target", "state", "words"),
    [
        ("LlamaForCausalLM", BY_NAME, "packed", "gives its embedding no name"),
        ("LlamaForCausalLM", BY_CLASS, "packed", ""),
        ("LlamaForCausalLM", BY_CLASS, "tied", "tied"),
        ("Qwen3ForCausalLM", BY_NAME, "packed", ""),
        ("Qwen3ForCausalLM", BY_NAME, "tied", "tied"),
        ("Qwen3ForCausalLM", BY_NAME, "asymmetric", "symmetric integers"),
        ("Gemma2ForCausalLM", BY_CLASS, "tied", "without a quantization config"),
        ("MixtralForCausalLM", BY_NAME, "packed", "without a quantization config"),
        ("LlamaForCausalLM", BY_NAME, "16 bits", ""),
        ("LlamaForCausalLM", BY_CLASS, "16 bits", "an unquantized weight"),
        ("Qwen3ForCausalLM", BY_NAME, "16 bits", "an unquantized weight"),
        ("Gemma2ForCausalLM", BY_CLASS, "16 bits", ""),
    ],
)
def test_quantized_embeddings(
    good: Good, tmp_path: Path, model: str, target: str, state: str, words: str
) -> None:
    """A config group has this target. `state` is how the embedding is stored."""

    @json_config
    def targeted(whole: dict[str, Json]) -> None:
        args = {**node(whole, ARGUMENTS), "group_size": 32, "symmetric": state != "asymmetric"}
        groups = node(whole, (*QUANTIZATION, "config_groups"))
        groups["table"] = {**node(whole, GROUP), "targets": [target], "weights": args}
        whole["architectures"], whole["tie_word_embeddings"] = [model], state == "tied"

    folder = spoiled(good("W4A16"), tmp_path / "table", targeted)
    if state != "16 bits":
        pack_table(folder)
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
LLAMA = Architecture(
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


def group_name(unit: str, members: tuple[str, ...], *groups: ConfigGroup) -> str | None:
    found = group_for(
        unit, members, targets_of(groups), LLAMA, is_embedding=LLAMA.is_embedding(unit)
    )
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
    assert group_name(f"{ATTENTION}.qkv_proj", QKV, *groups) == name


def test_targets_of_experts_embeddings_and_heads() -> None:
    last = (f"{EXPERTS}.7.gate_proj", f"{EXPERTS}.7.up_proj")
    assert group_name(f"{EXPERTS}.7.w13", last, group("a", "re:.*experts.0.*")) == "a"
    assert group_name(f"{EXPERTS}.7.w13", last, group("a", "re:.*experts.7.*")) is None
    assert group_name(f"{EXPERTS}.7.w13", last, group("a", "Linear")) == "a"
    assert group_name(f"{EXPERTS}.7.w13", last, group("a", "linear")) is None
    assert [*ignored(f"{EXPERTS}.7.w13", last, Patterns(["re:.*experts.7.*"]), LLAMA)] == []
    assert [*ignored(f"{EXPERTS}.7.w13", last, Patterns(["re:.*experts.0.*"]), LLAMA)] == [*last]
    assert group_name("model.embed_tokens", ("model.embed_tokens",), group("a", "Linear")) is None
    assert group_name("model.embed_tokens", ("model.embed_tokens",), group("a", "Embedding")) == "a"
    assert group_name("lm_head", ("lm_head",), group("a", "Linear", "Embedding")) is None
    assert group_name("lm_head", ("lm_head",), group("a", "LMHead")) == "a"
