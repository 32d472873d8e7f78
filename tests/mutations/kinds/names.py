"""Mutations with missing, unexpected and exchanged tensors, and for special checkpoints."""

from collections.abc import Iterator

import torch

from tests.mutations.edits import (
    QUANTIZATION,
    WHOLE,
    Change,
    add,
    config,
    copy_prefix,
    drop,
    drop_if,
    fill_with,
    inverse,
    move_prefix,
    put,
    rename,
    rename_all,
    set_first,
    swap,
    swap_parts,
    tensors,
)
from tests.mutations.good import Sound

LAYER, BFLOAT16 = "model.layers.0", torch.bfloat16
STRAY = {
    "weight": torch.zeros(128, 256, dtype=BFLOAT16),
    "weight_zero_point": torch.zeros(128, 1, dtype=torch.int8),
    "weight_g_idx": torch.zeros(256, dtype=torch.int32),
    "input_scale": torch.ones(1),
    "weight_global_scale": torch.zeros(1),
    "input_zero_point": torch.zeros(1),
}


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations that depend on the scheme."""
    q, o, down, leaves = sound.attention("q"), sound.attention("o"), sound.mlp("down"), sound.leaves
    for leaf in leaves:
        yield f"no {leaf} in down_proj", drop(f"{down}.{leaf}")
        yield f"no {leaf} in q_proj", drop(f"{q}.{leaf}")
    layers = {
        **{part: sound.attention(part) for part in "qvo"},
        "gate": sound.mlp("gate"),
        "down": down,
    }
    for projection, layer in layers.items():
        yield f"no {projection}_proj at all", drop(*(f"{layer}.{leaf}" for leaf in leaves))
    yield "weight misspelled", rename(f"{down}.{leaves[0]}", f"{down}.{leaves[0]}s")
    yield "scale misspelled", rename(f"{down}.weight_scale", f"{down}.scale")
    yield "scale_inv instead of scale", rename(f"{down}.weight_scale", f"{down}.weight_scale_inv")
    for leaf, stray in STRAY.items():
        if leaf not in leaves:
            yield f"{leaf} that the scheme does not have", add(f"{down}.{leaf}", stray)
    yield "q_proj's scale under k_proj's name", swap(f"{q}.weight_scale", f"{o}.weight_scale")
    yield (
        "gate_proj and up_proj exchanged",
        swap_parts(f"{sound.mlp('gate')}.", f"{sound.mlp('up')}."),
    )
    yield (
        "o_proj's weight under down_proj's name",
        rename(f"{o}.{leaves[0]}", f"{down}.{leaves[0]}"),
    )


def shared_kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations that do not depend on the scheme."""
    down, q = sound.mlp("down"), sound.attention("q")
    yield "no final norm", drop("model.norm.weight")
    yield "no layer norm", drop(f"{LAYER}.input_layernorm.weight")
    yield "no layer norm after attention", drop(f"{LAYER}.post_attention_layernorm.weight")
    yield "no embeddings", drop("model.embed_tokens.weight")
    if not sound.tied:
        yield "no lm_head", drop("lm_head.weight")
        yield "lm_head at another place", rename("lm_head.weight", "model.lm_head.weight")
    yield "no first layer", drop_if(lambda name: name.startswith(f"{LAYER}."))
    yield "no first attention", drop_if(lambda name: name.startswith(f"{LAYER}.self_attn."))
    yield "no tensors", drop_if(bool)
    yield "unknown tensor", add(f"{LAYER}.mlp.no_such.weight", torch.ones(4, 4))
    yield "unknown tensor at the top", add("no_such.weight", torch.ones(4, 4))
    yield "unknown leaf", add(f"{down}.no_such_leaf", torch.ones(1))
    yield "unknown norm", add(f"{LAYER}.no_such_layernorm.weight", torch.ones(128))
    yield (
        "a bias that the config does not have",
        add(f"{down}.bias", torch.zeros(128, dtype=BFLOAT16)),
    )
    yield (
        "a bias of q_proj that the config does not have",
        add(f"{q}.bias", torch.ones(128, dtype=BFLOAT16)),
    )
    yield "a bias of lm_head", add("lm_head.bias", torch.ones(384, dtype=BFLOAT16))
    yield "a bias of a norm", add("model.norm.bias", torch.ones(128, dtype=BFLOAT16))
    yield "rotary buffer of old", add(f"{LAYER}.self_attn.rotary_emb.inv_freq", torch.ones(16))
    yield "rotary buffer elsewhere", add("model.rotary_emb.inv_freq", torch.ones(16))
    yield "KV scales without a scheme", add(f"{q.rpartition('.')[0]}.k_scale", torch.ones(1) / 64)
    yield "a prefix too many", move_prefix("", "language_model.")
    yield "a prefix too few", move_prefix("model.", "")
    yield "layers counted from one", rename_all(_counted_from_one)
    yield "layers called blocks", move_prefix("model.layers.", "model.blocks.")
    yield (
        "embeddings under an older name",
        rename("model.embed_tokens.weight", "model.tok_embeddings.weight"),
    )
    yield (
        "final norm under another name",
        rename("model.norm.weight", "model.final_layernorm.weight"),
    )
    further = f"model.layers.{sound.layers}.input_layernorm.weight"
    yield "a decoder layer too many", add(further, torch.ones(128, dtype=BFLOAT16))
    if sound.layers > 1:
        for what, leaf in (
            ("scales", "self_attn.o_proj.weight_scale"),
            ("norms", "input_layernorm.weight"),
        ):
            yield f"layers' {what} exchanged", swap(f"{LAYER}.{leaf}", f"model.layers.1.{leaf}")


def _counted_from_one(name: str) -> str:
    head, layer, rest = name.partition("model.layers.")
    number, _, leaf = rest.partition(".")
    return f"{head}{layer}{int(number) + 1}.{leaf}" if layer else name


EXPERT, GATE = "model.layers.0.mlp.experts", "model.layers.0.mlp.gate"
PROJECTIONS = ("gate", "up", "down")
TABLE = "model.embed_tokens.weight"


def special_kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations for checkpoints with experts, a tied head or a KV cache."""
    if sound.experts:
        yield from _experts(sound)
    if sound.tied:
        yield (
            "a head of its own beside a tie",
            tensors(lambda values: values.update({"lm_head.weight": -values[TABLE]})),
        )
        yield "the tied head stored again", copy_prefix(TABLE, "lm_head.weight")
        yield "no norm of keys", drop("model.layers.1.self_attn.k_norm.weight")
    if sound.kv_cache:
        yield from _kv_cache(sound)
    if not sound.tied:
        yield "lm_head NaN", put("lm_head.weight", set_first(float("nan")))
        yield "lm_head lacks a row", put("lm_head.weight", lambda value: value[:-1])
        yield (
            "lm_head has a row too many",
            put("lm_head.weight", lambda value: torch.cat([value, value[-1:]])),
        )
        yield "lm_head as fp8", put("lm_head.weight", lambda value: value.to(torch.float8_e4m3fn))
        yield "lm_head with a scale", add("lm_head.weight_scale", torch.ones(384, 1))


def _experts(sound: Sound) -> Iterator[tuple[str, Change]]:
    last = {
        part: [f"{EXPERT}.1.{part}_proj.{leaf}" for leaf in sound.leaves] for part in PROJECTIONS
    }
    for projection in PROJECTIONS:
        yield f"no {projection}_proj in the last expert", drop(*last[projection])
        scale = f"{EXPERT}.1.{projection}_proj.weight_scale"
        yield f"no scale of {projection}_proj in the last expert", drop(scale)
    yield "no last expert", drop(*(name for names in last.values() for name in names))
    yield "an expert too many", copy_prefix(f"{EXPERT}.1.", f"{EXPERT}.2.")
    yield "more experts in the config", config(WHOLE, num_experts=4, num_local_experts=4)
    yield "fewer experts in the config", config(WHOLE, num_experts=1, num_local_experts=1)
    yield "another width of experts in the config", config(WHOLE, moe_intermediate_size=64)
    yield "a larger width of experts in the config", config(WHOLE, moe_intermediate_size=256)
    yield "no router", drop(f"{GATE}.weight")
    yield "router of one expert", put(f"{GATE}.weight", lambda value: value[:1])
    yield "router NaN", put(f"{GATE}.weight", fill_with(float("nan")))
    yield "router not ignored", config(QUANTIZATION, ignore=["lm_head"])
    yield "an expert ignored", config(QUANTIZATION, ignore=["lm_head", GATE, "re:.*experts.1.*"])
    yield "all experts ignored", config(QUANTIZATION, ignore=["lm_head", GATE, "re:.*experts.*"])
    yield "no norm of queries", drop("model.layers.0.self_attn.q_norm.weight")
    yield "experts called by older names", rename_all(_older_name)
    yield "experts exchanged", swap_parts(".experts.0.", ".experts.1.", "weight_scale")


def _older_name(name: str) -> str:
    if ".experts." not in name:
        return name
    return name.replace("gate_proj", "w1").replace("down_proj", "w2").replace("up_proj", "w3")


def _kv_cache(sound: Sound) -> Iterator[tuple[str, Change]]:
    place = sound.attention("q").rpartition(".")[0]
    for leaf in ("k_scale", "v_scale"):
        name = f"{place}.{leaf}"
        yield f"no {leaf}", drop(name)
        yield f"{leaf} NaN", put(name, set_first(float("nan")))
        yield f"{leaf} zero", put(name, fill_with(0.0))
        yield f"{leaf} negative", put(name, lambda scale: -scale)
        yield f"{leaf} upside down", put(name, inverse)
        yield f"{leaf} a byte", put(name, lambda scale: scale.to(torch.uint8))
        yield f"{leaf} twice", put(name, lambda scale: scale.reshape(-1).repeat(2))
        yield f"{leaf} of a head each", put(name, lambda scale: scale.reshape(-1).repeat(4))
        yield f"{leaf} as bfloat16", put(name, lambda scale: scale.to(torch.bfloat16))
        yield f"{leaf} under the projection", rename(name, f"{place}.{leaf[0]}_proj.{leaf}")
        yield f"{leaf} under a name unknown", rename(name, f"{place}.{leaf[0]}_cache.{leaf}")
    yield "k_scale and v_scale exchanged", swap(f"{place}.k_scale", f"{place}.v_scale")
    yield "a scale of queries too", add(f"{place}.q_scale", torch.ones(1))
