"""Micro models of all families of architectures, with tensor names as on the hub."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.core_model_loading import revert_weight_conversion

Values = Mapping[str, object]
TEXT: Values = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: Values = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
MLA: Values = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
}
LINEAR_ATTENTION: Values = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
VISION: Values = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_heads": 4,
}
PATCHES: Values = {"image_size": 56, "patch_size": 14}
QWEN_VISION: Values = {**VISION, "depth": 1, "out_hidden_size": 256}
ONE_LAYER: Values = {**VISION, "num_hidden_layers": 1}
MIXTURE: Values = {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA: Values = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 32}
SHARED: Values = {"shared_expert_intermediate_size": 128}

STACKED = frozenset({"mlp.experts.gate_up_proj", "mlp.experts.down_proj"})
SINGLE_GATE = re.compile(r"mlp\.experts\.\d+\.gate_proj\.weight")

# transformers 5 saves these experts as (experts, out, in), the hub has (experts, in, out).
TRANSPOSED_ON_HUB = ("qwen3_vl_moe",)
# transformers 5 drops a part of these names.
NEXT_NORMS = ("enorm", "hnorm", "shared_head.norm")
RENAMED = {"gemma3": ("vision_tower.", "vision_tower.vision_model.")}


Draft = Literal["single", "stacked", "dense", "next", "ernie", "nemotron"]


@dataclass(frozen=True, slots=True)
class Family:
    """A model type of transformers with micro sizes.

    `towers` are the nested configs of a multimodal type. `without` are usual config values that
    this type does not accept. `draft` adds a draft layer. With Qwen's names (`mtp.layers.0.`), the
    draft layer's experts are in separate tensors ("single") or in one tensor ("stacked"), or it
    copies the first decoder layer ("dense"). Other values use the names of DeepSeek
    (`model.layers.N.`, "next"), Ernie (`model.mtp_block.0.`) and Nemotron.
    """

    model_type: str
    text: Values = field(default_factory=dict)
    towers: Mapping[str, Values] | None = None
    values: Values | None = None
    without: tuple[str, ...] = ()
    draft: Draft | None = None

    def config(self, **changes: object) -> PretrainedConfig:
        """Return the micro configuration. `changes` apply to the language model."""
        usual = {key: value for key, value in TEXT.items() if key not in self.without}
        if self.draft in ("dense", "next", "ernie", "nemotron"):
            usual["num_nextn_predict_layers"] = 1
        text = {**usual, **self.text, **changes}
        if self.towers is None:
            return AutoConfig.for_model(self.model_type, **{"dtype": "bfloat16", **text})
        nested = {"text_config": text, **self.towers}
        return AutoConfig.for_model(
            self.model_type, dtype="bfloat16", **nested, **(self.values or {})
        )


GEMMA4: Values = {
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_k_eq_v": True,
    **{"num_global_key_value_heads": 2, "global_head_dim": 64},
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
}
GEMMA4_VISION: Values = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
    "use_clipped_linears": True,
}
FOUR_EXPERTS: Values = {**EXPERTS, "num_experts": 4}
NEXT: Values = {**FOUR_EXPERTS, **LINEAR_ATTENTION, **SHARED}
GROUPED: Values = {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "topk_group": 1}
GLM: Values = {**GROUPED, "n_shared_experts": 1, "n_group": 1}
GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ERNIE: Values = {
    **EXPERTS,
    **{"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
}
NEMOTRON: Values = {
    **EXPERTS,
    "hybrid_override_pattern": "M-*E",
    "mtp_hybrid_override_pattern": "*E",
    "num_hidden_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "n_groups": 2,
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 128,
}
QWEN_NEXT = Family("qwen3_next", NEXT)
QWEN35_MOE = Family("qwen3_5_moe", NEXT, towers={"vision_config": QWEN_VISION})
DEEPSEEK = Family("deepseek_v3", {**GROUPED, **MLA, "topk_method": "noaux_tc", "n_group": 2})
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama"),
    "qwen2": Family("qwen2"),
    "qwen3-tied": Family("qwen3", {"tie_word_embeddings": True}),
    "gemma2": Family("gemma2"),
    "gemma3": Family("gemma3_text"),
    "phi3": Family("phi3"),
    "gpt2": Family("gpt2", {"n_embd": 256, "n_layer": 2, "n_head": 4}),
    "gptj": Family(
        "gptj", {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_inner": 512, "rotary_dim": 32}
    ),
    "opt": Family("opt", {"ffn_dim": 512, "word_embed_proj_dim": 256}),
    "falcon": Family(
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, without=("head_dim",)
    ),
    "bloom": Family("bloom", {"n_layer": 2, "n_head": 4}),
    "mixtral": Family("mixtral", MIXTURE),
    "qwen3-moe": Family("qwen3_moe", FOUR_EXPERTS),
    "qwen2-moe": Family("qwen2_moe", {**FOUR_EXPERTS, **SHARED}),
    "olmoe": Family(
        "olmoe", {"intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    ),
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3-mtp": replace(DEEPSEEK, draft="next"),
    "glm4-moe-mtp": Family("glm4_moe", GLM, draft="next"),
    "granite-moe": Family("granitemoe", MIXTURE),
    "llama4": Family(
        "llama4_text",
        {
            **MIXTURE,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 1,
        },
    ),
    "gpt-oss": Family("gpt_oss", MIXTURE),
    "qwen3-next": QWEN_NEXT,
    "qwen3-next-mtp": replace(QWEN_NEXT, draft="single"),
    "qwen3-next-mtp-stacked": replace(QWEN_NEXT, draft="stacked"),
    "qwen3.5-moe": QWEN35_MOE,
    "qwen3.5-moe-mtp": replace(QWEN35_MOE, draft="stacked"),
    "qwen3.5-moe-mtp-single": replace(QWEN35_MOE, draft="single"),
    "nemotron-h": Family("nemotron_h", NEMOTRON),
    "nemotron-h-mtp": Family("nemotron_h", NEMOTRON, draft="nemotron"),
    "ernie4.5-moe-mtp": Family("ernie4_5_moe", ERNIE, draft="ernie"),
    "exaone-moe-mtp": Family(
        "exaone_moe",
        {**FOUR_EXPERTS, "num_shared_experts": 1, "n_group": 1, "topk_group": 1},
        draft="dense",
    ),
    "glm4-moe-lite-mtp": Family("glm4_moe_lite", {**GLM, **MLA}, draft="next"),
    "granite-hybrid": Family(
        "granitemoehybrid",
        {
            **MAMBA,
            **MIXTURE,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 256,
        },
    ),
    "smollm3": Family("smollm3", {"tie_word_embeddings": True}),
    "olmo2": Family("olmo2"),
    "qwen3-vl-moe": Family(
        "qwen3_vl_moe",
        {**FOUR_EXPERTS, "norm_topk_prob": True, "tie_word_embeddings": False},
        towers={"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}},
        values={"tie_word_embeddings": False},
    ),
    "qwen2.5-vl": Family(
        "qwen2_5_vl",
        {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}},
        towers={"vision_config": QWEN_VISION},
    ),
    "gemma3-vision": Family(
        "gemma3",
        towers={"vision_config": {**ONE_LAYER, **PATCHES, "vision_use_head": False}},
        values={"mm_tokens_per_image": 4},
    ),
    "mistral3": Family(
        "mistral3",
        {"model_type": "mistral"},
        towers={"vision_config": {**ONE_LAYER, **PATCHES, "model_type": "pixtral", "head_dim": 32}},
    ),
    "gemma4": Family("gemma4_text", GEMMA4),
    "gemma4-vision": Family("gemma4", GEMMA4, towers={"vision_config": GEMMA4_VISION}),
    "glm4.5v": Family(
        "glm4v_moe",
        {**GLM, "use_qk_norm": False, "rope_parameters": {**GLM_ROPE, "mrope_section": [4, 6, 6]}},
        towers={"vision_config": {**QWEN_VISION, **PATCHES}},
    ),
    "idefics3": Family(
        "idefics3",
        {"model_type": "llama"},
        towers={"vision_config": {**ONE_LAYER, **PATCHES}},
        values={"scale_factor": 2, "image_token_id": 300, "pad_token_id": 0},
    ),
}


def hub_tensors(
    config: PretrainedConfig, device: str = "cpu"
) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the class name and the tensors of a new model, as stored on the hub.

    Experts are in separate tensors if the hub's checkpoints store them separately.
    """
    auto = (
        AutoModelForImageTextToText if "vision_config" in config.to_dict() else AutoModelForCausalLM
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = auto.from_config(config, dtype=torch.bfloat16)
    tensors = revert_weight_conversion(model, dict(model.state_dict()))
    if config.model_type in TRANSPOSED_ON_HUB:
        tensors = {
            name: value.mT if ".experts." in name else value for name, value in tensors.items()
        }
    if config.model_type in RENAMED:
        old, new = RENAMED[config.model_type]
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    tied = getattr(config, "tie_word_embeddings", False)
    if getattr(config.get_text_config(), "tie_word_embeddings", tied):
        tensors = {
            name: value for name, value in tensors.items() if not name.endswith("lm_head.weight")
        }
    return type(model).__name__, tensors


def draft_layer(tensors: Mapping[str, torch.Tensor], kind: Draft) -> dict[str, torch.Tensor]:
    """Return a draft layer: a copy of a decoder layer with attention, and its input projection."""
    last = [name for name in tensors if name.endswith(".o_proj.weight")][
        0 if kind in ("dense", "ernie") else -1
    ]
    prefix, _, _ = last.rpartition(".self_attn." if ".self_attn." in last else ".mixer.")
    layer = _layer(tensors, prefix)
    norm = next(value for name, value in layer.items() if name.endswith("norm.weight"))
    join = 0.02 * torch.randn(norm.numel(), 2 * norm.numel(), dtype=torch.bfloat16)
    before, _, number = prefix.rpartition(".")
    if kind == "next":
        more = {"eh_proj.weight": join, **{f"{name}.weight": norm for name in NEXT_NORMS}}
        return {
            f"{before}.{int(number) + 1}.{name}": value for name, value in {**layer, **more}.items()
        }
    if kind == "ernie":
        return {
            **{f"model.mtp_block.0.{name}": value for name, value in layer.items()},
            **{f"model.{name}.0.weight": norm for name in ("mtp_emb_norm", "mtp_hidden_norm")},
            "model.mtp_linear_proj.0.weight": join,
        }
    if kind == "nemotron":
        experts = next(name for name in tensors if ".experts." in name).partition(".mixer.")[0]
        first = {**layer, "eh_proj.weight": join, "enorm.weight": norm, "hnorm.weight": norm}
        second = {**_layer(tensors, experts), "final_layernorm.weight": norm}
        return {
            f"mtp.layers.{number}.{name}": value
            for number, stored in enumerate((first, second))
            for name, value in stored.items()
        }
    named = stacked_experts(layer) if kind == "stacked" else single_experts(layer)
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    return {
        **{f"mtp.layers.0.{name}": value for name, value in named.items()},
        **{f"mtp.{name}.weight": norm for name in norms},
        "mtp.fc.weight": join,
    }


def _layer(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    start = f"{prefix}."
    return {
        name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)
    }


def single_experts(layer: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with each expert's projections in separate tensors."""
    found = {name: value for name, value in layer.items() if name not in STACKED}
    for name in STACKED & layer.keys():
        leaves = ("down_proj",) if "down_proj" in name else ("gate_proj", "up_proj")
        for expert, weight in enumerate(layer[name]):
            for leaf, part in zip(leaves, weight.chunk(len(leaves)), strict=True):
                found[f"mlp.experts.{expert}.{leaf}.weight"] = part
    return found


def stacked_experts(layer: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with the experts' gate and up projections in one tensor.

    The down projections are in a second tensor.
    """
    experts = [
        name.removesuffix("gate_proj.weight") for name in layer if SINGLE_GATE.fullmatch(name)
    ]
    if not experts:
        return dict(layer)
    parts = {
        leaf: torch.stack([layer[f"{expert}{leaf}.weight"] for expert in experts])
        for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    found = {name: value for name, value in layer.items() if not name.startswith("mlp.experts.")}
    gate_up = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
    return {
        **found,
        "mlp.experts.gate_up_proj": gate_up,
        "mlp.experts.down_proj": parts["down_proj"],
    }


def save_family(name: str, folder: Path, **changes: object) -> Path:
    """Save a micro model of a family in one file.

    `changes` apply to its language model's config.
    """
    return save(FAMILIES[name], folder, **changes)


def save(family: Family, folder: Path, **changes: object) -> Path:
    """Save a micro model of a family that may not be in FAMILIES."""
    config = family.config(**changes)
    architecture, tensors = hub_tensors(config)
    if family.draft:
        tensors = {**tensors, **draft_layer(tensors, family.draft)}
    folder.mkdir(parents=True, exist_ok=True)
    contents = {key: value.contiguous().clone() for key, value in tensors.items()}
    save_file(contents, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


def split(folder: Path, shards: int) -> Path:
    """Distribute a checkpoint's tensors over shards. Adjacent names are in different files."""
    tensors = load_file(folder / "model.safetensors")
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        chosen = {key: tensors[key] for key in sorted(tensors)[number::shards]}
        save_file(chosen, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(chosen, name))
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
