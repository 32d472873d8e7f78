"""What only some checkpoints have: experts, tied embeddings, scales of the KV cache."""

from collections.abc import Iterator

import torch

from tests.mutations.edits import (
    QUANTIZATION,
    WHOLE,
    Change,
    add,
    config,
    copied,
    drop,
    element,
    every,
    exchanged,
    inverse,
    put,
    rename,
    renamed,
    swap,
    tensors,
)
from tests.mutations.good import Sound

EXPERT, GATE = "model.layers.0.mlp.experts", "model.layers.0.mlp.gate"
PROJECTIONS = ("gate", "up", "down")
TABLE = "model.embed_tokens.weight"


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Those that fit this checkpoint."""
    if sound.experts:
        yield from _experts(sound)
    if sound.tied:
        yield (
            "a head of its own beside a tie",
            tensors(lambda values: values.update({"lm_head.weight": -values[TABLE]})),
        )
        yield "the tied head stored again", copied(TABLE, "lm_head.weight")
        yield "no norm of keys", drop("model.layers.1.self_attn.k_norm.weight")
    if sound.kv_cache:
        yield from _kv_cache(sound)
    if not sound.tied:
        yield "lm_head NaN", put("lm_head.weight", element(float("nan")))
        yield "lm_head lacks a row", put("lm_head.weight", lambda value: value[:-1])
        yield (
            "lm_head has a row too many",
            put("lm_head.weight", lambda value: torch.cat([value, value[-1:]])),
        )
        yield "lm_head as fp8", put("lm_head.weight", lambda value: value.to(torch.float8_e4m3fn))
        yield "lm_head with a scale", add("lm_head.weight_scale", torch.ones(384, 1))


def _experts(sound: Sound) -> Iterator[tuple[str, Change]]:
    last = {part: [f"{EXPERT}.1.{part}_proj.{leaf}" for leaf in sound.leaves] for part in PROJECTIONS}
    for projection in PROJECTIONS:
        yield f"no {projection}_proj in the last expert", drop(*last[projection])
        scale = f"{EXPERT}.1.{projection}_proj.weight_scale"
        yield f"no scale of {projection}_proj in the last expert", drop(scale)
    yield "no last expert", drop(*(name for names in last.values() for name in names))
    yield "an expert too many", copied(f"{EXPERT}.1.", f"{EXPERT}.2.")
    yield "more experts in the config", config(WHOLE, num_experts=4, num_local_experts=4)
    yield "fewer experts in the config", config(WHOLE, num_experts=1, num_local_experts=1)
    yield "another width of experts in the config", config(WHOLE, moe_intermediate_size=64)
    yield "a larger width of experts in the config", config(WHOLE, moe_intermediate_size=256)
    yield "no router", drop(f"{GATE}.weight")
    yield "router of one expert", put(f"{GATE}.weight", lambda value: value[:1])
    yield "router NaN", put(f"{GATE}.weight", every(float("nan")))
    yield "router not ignored", config(QUANTIZATION, ignore=["lm_head"])
    yield "an expert ignored", config(QUANTIZATION, ignore=["lm_head", GATE, "re:.*experts.1.*"])
    yield "all experts ignored", config(QUANTIZATION, ignore=["lm_head", GATE, "re:.*experts.*"])
    yield "no norm of queries", drop("model.layers.0.self_attn.q_norm.weight")
    yield "experts called by older names", renamed(_older_name)
    yield "experts exchanged", exchanged(".experts.0.", ".experts.1.", "weight_scale")


def _older_name(name: str) -> str:
    if ".experts." not in name:
        return name
    return name.replace("gate_proj", "w1").replace("down_proj", "w2").replace("up_proj", "w3")


def _kv_cache(sound: Sound) -> Iterator[tuple[str, Change]]:
    place = sound.attention("q").rpartition(".")[0]
    for leaf in ("k_scale", "v_scale"):
        name = f"{place}.{leaf}"
        yield f"no {leaf}", drop(name)
        yield f"{leaf} NaN", put(name, element(float("nan")))
        yield f"{leaf} zero", put(name, every(0.0))
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
