"""Fused and kept layers, written tensors, and a load with vLLM's loaders, for each family."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.architectures.families import FAMILIES, Family, save, save_family, split
from tests.command import vexport
from tests.models import dequantized, quantize
from tests.mutations.edits import all_of, change_all, spoiled
from vexport.checkpoint.index import read_index
from vexport.engine.reference import load_dequantized
from vexport.errors import InputError
from vexport.formats.plan import Plan
from vexport.plan.build import PlanSettings, build_plan
from vexport.records.patterns import Patterns
from vexport.scenario import Rule

STACK = re.compile(r"(?:layers|h)\.\*\.")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def unfused(names: str) -> dict[str, str]:
    """Return layers that vLLM builds as they are stored."""
    return {name: name.rpartition(".")[2] for name in names.split()}


QKV = {"self_attn.qkv_proj": "q_proj k_proj v_proj", "self_attn.o_proj": "o_proj"}
MLP = {"mlp.gate_up_proj": "gate_proj up_proj", "mlp.down_proj": "down_proj"}
EXPERTS = {"mlp.experts.*.w13": "gate_proj up_proj", "mlp.experts.*.down_proj": "down_proj"}
DENSE = {**QKV, **MLP}
GPT_NEO = unfused(
    "self_attention.query_key_value self_attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h"
)
SHARED = {name.replace("mlp.", "mlp.shared_expert."): members for name, members in MLP.items()}
SHARED_EXPERTS = {
    name.replace("mlp.", "mlp.shared_experts."): members for name, members in MLP.items()
}
# A mixture of experts with Mixtral's names.
SPARSE = {name.replace("mlp", "block_sparse_moe"): members for name, members in EXPERTS.items()}
LATENT = {"self_attn.fused_qkv_a_proj": "q_a_proj kv_a_proj_with_mqa"}
LATENT |= unfused("self_attn.q_b_proj self_attn.kv_b_proj self_attn.o_proj")
NEMOTRON = {"mixer.qkv_proj": "q_proj k_proj v_proj"}
NEMOTRON |= unfused("mixer.in_proj mixer.out_proj mixer.o_proj mixer.up_proj mixer.down_proj")
NEMOTRON |= unfused("mixer.experts.*.up_proj mixer.experts.*.down_proj")
NEMOTRON |= unfused("mixer.shared_experts.up_proj mixer.shared_experts.down_proj")
QWEN = {**QKV, **EXPERTS, **SHARED}
QKVZ, LINEAR = "linear_attn.in_proj_qkvz", unfused("linear_attn.out_proj")
# vLLM's fused modules in a decoder layer, with names from its documentation and model files, and
# their layers in a checkpoint.
FUSED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3-tied", "gemma2", "gemma3"), DENSE),
    **dict.fromkeys(
        ("qwen2.5-vl", "gemma3-vision", "mistral3", "smollm3", "olmo2", "idefics3"), DENSE
    ),
    **dict.fromkeys(("falcon", "bloom"), GPT_NEO),
    "gpt2": unfused("attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"),
    "gptj": {
        "attn.qkv_proj": "q_proj k_proj v_proj",
        **unfused("attn.out_proj mlp.fc_in mlp.fc_out"),
    },
    "opt": {"self_attn.qkv_proj": "q_proj k_proj v_proj", **unfused("self_attn.out_proj fc1 fc2")},
    # The last layer has no v_proj.
    **dict.fromkeys(("gemma4", "gemma4-vision"), {**DENSE, "self_attn.qkv_proj": "q_proj k_proj"}),
    **dict.fromkeys(
        ("glm4.5v", "glm4-moe-mtp", "ernie4.5-moe-mtp", "exaone-moe-mtp"),
        {**DENSE, **EXPERTS, **SHARED_EXPERTS},
    ),
    **dict.fromkeys(("nemotron-h", "nemotron-h-mtp"), NEMOTRON),
    "granite-hybrid": {
        **QKV,
        **unfused("mamba.in_proj mamba.out_proj shared_mlp.input_linear shared_mlp.output_linear"),
    },
    "phi3": unfused("self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj"),
    "mixtral": {
        **QKV,
        "block_sparse_moe.experts.*.w13": "w1 w3",
        "block_sparse_moe.experts.*.w2": "w2",
    },
    **dict.fromkeys(("qwen3-moe", "olmoe", "qwen3-vl-moe"), {**QKV, **EXPERTS}),
    "qwen2-moe": QWEN,
    **dict.fromkeys(
        ("deepseek-v3", "deepseek-v3-mtp", "glm4-moe-lite-mtp"),
        {**MLP, **EXPERTS, **LATENT, **SHARED_EXPERTS},
    ),
    "granite-moe": {**QKV, **SPARSE},
    "llama4": {
        **QKV,
        **{name.replace("mlp", "feed_forward"): of for name, of in {**EXPERTS, **SHARED}.items()},
    },
    "gpt-oss": QKV,
    **dict.fromkeys(
        ("qwen3-next", "qwen3-next-mtp", "qwen3-next-mtp-stacked"),
        {**QWEN, QKVZ: "in_proj_qkvz", **LINEAR},
    ),
    **dict.fromkeys(
        ("qwen3.5-moe", "qwen3.5-moe-mtp", "qwen3.5-moe-mtp-single"),
        {**QWEN, QKVZ: "in_proj_qkv in_proj_z", **LINEAR},
    ),
}
# Names of modules that are kept in all families.
KEPT_MODULES = re.compile(
    r"visual|vision|multi_modal|lm_head|norm|embed|\bgate$|_gate$|router|conv1d|A_log|dt_bias|in_proj_b|in_proj_a"
)
# Families that store weights as (in, out). Written weights are (out, in), because vLLM transposes
# only unpacked weights.
TRANSPOSED = ("gpt2",)
# Experts that vLLM does not load from compressed-tensors are kept, with a note in the plan.
KEEPS_EXPERTS = ("gpt-oss", "granite-hybrid")
# Families on vLLM's Transformers backend, which fuses depending on transformers. The plan notes it.
TRANSFORMERS_BACKEND = ("smollm3", "olmo2")
# vLLM and transformers name no language model in these. The plan assumes the usual fusions.
USUAL_FUSIONS = ("glm4.5v",)
# Schemes that vLLM's loaders cannot load, see test_reordering.py.
REFUSED = {
    "gpt2": ("FP8_DYNAMIC", "FP8_BLOCK"),
    "bloom": ("NVFP4A16", "W4A16", "FP8_BLOCK"),
    "falcon": ("FP8_BLOCK",),
    "llama4": ("FP8_BLOCK",),
    # Parts of layers that are stored in one tensor, and keys that are also the values.
    **dict.fromkeys(
        ("nemotron-h", "nemotron-h-mtp", "granite-hybrid", "gemma4", "gemma4-vision"),
        ("FP8_BLOCK",),
    ),
}
DEFAULTS = PlanSettings()
MINIMUM_DB = {"NVFP4A16": 18.0, "FP8_DYNAMIC": 29.0, "W4A16": 16.0}


def plan_of(folder: Path, scheme: str = "NVFP4A16", settings: PlanSettings = DEFAULTS) -> Plan:
    return build_plan(read_index(folder), [Rule(match="Linear", scheme=scheme)], settings)


@pytest.mark.parametrize(("number", "family"), list(enumerate(FAMILIES)))
def test_groups_equal_vllms_modules(number: int, family: str, tmp_path: Path) -> None:
    """Compare dequantized layers with the source.

    The families take turns in using the schemes, as in test_matrix.py.
    """
    assert FUSED.keys() == set(FAMILIES)
    schemes = [scheme for scheme in MINIMUM_DB if scheme not in REFUSED.get(family, ())]
    scheme = schemes[number % len(schemes)]
    source = save_family(family, tmp_path / "model")
    plan = plan_of(source, scheme)
    assert plan.refusals == ()
    found = {
        STACK.split(NUMBER.sub("*", group.name))[1]: " ".join(
            member.name.rpartition(".")[2] for member in group.members
        )
        for group in plan.groups
    }
    assert found == FUSED[family]
    assert not any(
        KEPT_MODULES.search(member.name) for group in plan.groups for member in group.members
    )
    assert [note.check for note in plan.notes] == ["architecture"] * (
        family in (*KEEPS_EXPERTS, *TRANSFORMERS_BACKEND, *USUAL_FUSIONS)
    )
    out = quantize(source, tmp_path / "out", scheme)
    original, written = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    for name in plan.kept:
        before, after = (
            tensors[name].reshape(-1).view(torch.uint8) for tensors in (original, written)
        )
        assert torch.equal(before, after), name
    exact = {**original, **by_expert(original, family)}
    for group in plan.groups:
        for member in group.members:
            weight = exact[f"{member.name}.weight"].to(torch.float32)
            weight = weight.T if family in TRANSPOSED else weight
            noise = (dequantized(out, member.name).to(torch.float32) - weight).square().mean()
            decibels = 10 * torch.log10(weight.square().mean() / noise).item()
            assert decibels > MINIMUM_DB[scheme], member.name


def by_expert(tensors: Mapping[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Split tensors with all experts of a layer, like transformers' model files."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 3 or "conv" in name or "experts" not in name and "_linear" not in name:
            continue
        turned = tensor.mT if family in ("llama4", "qwen3-vl-moe") else tensor
        base = (
            name.rpartition(".experts")[0]
            or name.rpartition("block_sparse_moe")[0] + "block_sparse_moe"
        )
        for expert, weight in enumerate(turned):
            prefix = f"{base}.experts.{expert}"
            if "down_proj" in name or "output_linear" in name:
                found[f"{prefix}.down_proj.weight"] = weight
            else:
                found[f"{prefix}.gate_proj.weight"], found[f"{prefix}.up_proj.weight"] = (
                    weight.chunk(2)
                )
    return found


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3", "qwen3.5-moe"])
def test_fused_layers_share_global_scale(family: str, tmp_path: Path) -> None:
    """Some fused layers have their weights in different files."""
    source = split(save_family(family, tmp_path / "model"), 5)
    plan = plan_of(source)
    homes = {name: tensor.file for name, tensor in read_index(source).tensors.items()}
    assert any(len({homes[m.weight] for m in group.members}) > 1 for group in plan.groups)
    assert (
        vexport("quantize", source, tmp_path / "out", "--scheme", "NVFP4A16", "--quiet").code == 0
    )
    files = (tmp_path / "out").glob("*.safetensors")
    written = {name: value for file in files for name, value in load_file(file).items()}
    scales = [
        [f"{member.name}.weight_global_scale" for member in group.members] for group in plan.groups
    ]
    values = [{written[name].item() for name in names} for names in scales]
    assert all(len(group) == 1 for group in values)
    assert len({value for group in values for value in group}) > len(plan.groups) / 2


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("mixtral", "FP8_DYNAMIC"),
        ("gpt2", "W4A16"),
        ("opt", "W4A16"),
    ],
)
def test_reference_has_dequantized_layers(family: str, scheme: str, tmp_path: Path) -> None:
    """The models have experts, transposed weights, and a tied head without a weight."""
    source = save_family(family, tmp_path / "model")
    assert vexport("quantize", source, tmp_path / "out", "--scheme", scheme, "--quiet").code == 0
    reference = dict(load_dequantized(tmp_path / "out").named_parameters())
    original = dict(
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).named_parameters()
    )
    changed = {
        name for name, weight in original.items() if not torch.equal(weight, reference[name])
    }
    if scheme == "W4A16":
        assert changed == {
            f"{m.name}.weight" for g in plan_of(source, scheme).groups for m in g.members
        }
    assert family in ("gpt2", "opt") or any("experts" in name for name in changed)
    for name in changed:
        exact = original[name].to(torch.float32)
        noise = (reference[name].to(torch.float32) - exact).square().mean()
        assert noise <= exact.square().mean() * 10 ** (-MINIMUM_DB[scheme] / 10), name


def test_reference_with_random_experts_is_refused(tmp_path: Path) -> None:
    """transformers would initialize separate experts of this class randomly."""
    source = save_family("granite-moe", tmp_path / "model")
    assert (
        vexport("quantize", source, tmp_path / "out", "--scheme", "FP8_DYNAMIC", "--quiet").code
        == 0
    )
    with pytest.raises(InputError, match="experts.*no weight"):
        load_dequantized(tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "prefix"),
    [("deepseek-v3-mtp", "model.layers.2"), ("qwen3-next-mtp", "mtp.layers.0")],
)
def test_draft_layers_are_kept(family: str, prefix: str, tmp_path: Path) -> None:
    """The ignore list matches the names that vLLM's drafters look up."""
    plan = plan_of(save_family(family, tmp_path / "model"), "FP8_DYNAMIC")
    assert {f"{prefix}.self_attn.o_proj.weight", f"{prefix}.mlp.experts.0.gate_proj.weight"} <= {
        *plan.kept
    }
    for module in ("mlp.experts.0.gate_proj", "self_attn.qkv_proj", "self_attn.q_proj"):
        assert Patterns(plan.ignore).match(f"{prefix}.{module}")
    assert not any(
        Patterns(plan.ignore).match(m.name) for group in plan.groups for m in group.members
    )


def test_patterns_match_one_stack_of_layers(tmp_path: Path) -> None:
    """This holds for patterns of the decoder and of the drafter, from a plan and from a repair."""
    source = save_family("qwen3.5-moe-mtp", tmp_path / "model")
    kept, drafted = (
        r"re:model\.language_model\.layers\.0\.mlp\.experts\.",
        r"re:mtp\.layers\.0\.mlp\.",
    )
    rules = [(kept, "keep"), (drafted, "W4A16"), ("Linear", "FP8_DYNAMIC")]
    plan = build_plan(
        read_index(source), [Rule(match=match, scheme=scheme) for match, scheme in rules]
    )
    assert not any(
        Patterns(plan.ignore).match(m.name) for group in plan.groups for m in group.members
    )
    assert Patterns(plan.ignore).match("language_model.model.layers.0.mlp.experts.0.gate_proj")
    out = quantize(source, tmp_path / "out", "FP8_DYNAMIC")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["ignore"].append(r"re:.*\.layers\.0\.mlp\.experts\..*")
    (out / "config.json").write_text(json.dumps(config))
    assert vexport("check", out).code == 1
    assert vexport("repair", out, tmp_path / "repaired", "--quiet").code == 0
    assert vexport("check", tmp_path / "repaired").code == 0


def test_transposed_experts_give_same_layers(tmp_path: Path) -> None:
    """transformers 5 saves (experts, out, in), and the hub has (experts, in, out)."""
    hub = save_family("qwen3-vl-moe", tmp_path / "hub")
    turn = [
        change_all(f".experts.{name}", lambda value: value.mT.contiguous())
        for name in ("gate_up_proj", "down_proj")
    ]
    other = spoiled(hub, tmp_path / "other", all_of(*turn))
    assert [group.members[0].part for group in plan_of(hub).groups] != [
        group.members[0].part for group in plan_of(other).groups
    ]
    for folder in (hub, other):
        assert (
            vexport("quantize", folder, f"{folder}-out", "--scheme", "W4A16", "--quiet").code == 0
        )
    first, second = (
        load_file(Path(f"{folder}-out") / "model.safetensors") for folder in (hub, other)
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_hunyuan_router_stays_unquantized(tmp_path: Path) -> None:
    """HunYuan's router is the layer `wg` of the module `gate`."""
    experts = {"num_experts": 4, "moe_topk": [2, 2], "intermediate_size": 128}
    source = save(Family("hunyuan_v1_moe", experts), tmp_path / "model")
    kept = [name for name in plan_of(source).kept_linears if "layers" in name]
    assert kept == ["model.layers.0.mlp.gate.wg", "model.layers.1.mlp.gate.wg"]
