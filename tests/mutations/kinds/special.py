"""What only some checkpoints have: experts, tied embeddings, scales of the KV cache."""

from collections.abc import Iterator

import torch

from tests.mutations.edits import (
    QUANTIZATION,
    WHOLE,
    Change,
    Tensors,
    add,
    config,
    drop,
    element,
    every,
    put,
    rename,
    swap,
    tensors,
)
from tests.mutations.good import Sound

EXPERT = "model.layers.0.mlp.experts"


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Those that fit this checkpoint."""
    if sound.experts:
        yield from _experts(sound)
    if sound.tied:
        yield from _tied()
    if sound.kv_cache:
        yield from _kv_cache(sound)
    yield from _heads(sound)


def _experts(sound: Sound) -> Iterator[tuple[str, Change]]:
    leaves = sound.leaves
    for projection in ("gate", "up", "down"):
        layer = f"{EXPERT}.1.{projection}_proj"
        yield f"no {projection}_proj in the last expert", drop(*(f"{layer}.{leaf}" for leaf in leaves))
        yield f"no scale of {projection}_proj in the last expert", drop(f"{layer}.weight_scale")
    yield (
        "no last expert",
        drop(
            *(
                f"{EXPERT}.1.{projection}_proj.{leaf}"
                for projection in ("gate", "up", "down")
                for leaf in leaves
            )
        ),
    )
    yield "an expert too many", tensors(_another_expert)
    yield "more experts in the config", config(WHOLE, num_experts=4, num_local_experts=4)
    yield "fewer experts in the config", config(WHOLE, num_experts=1, num_local_experts=1)
    yield "another width of experts in the config", config(WHOLE, moe_intermediate_size=64)
    yield "a larger width of experts in the config", config(WHOLE, moe_intermediate_size=256)
    yield "no router", drop("model.layers.0.mlp.gate.weight")
    yield "router of one expert", put("model.layers.0.mlp.gate.weight", lambda value: value[:1])
    yield "router NaN", put("model.layers.0.mlp.gate.weight", every(float("nan")))
    yield "router not ignored", config(QUANTIZATION, ignore=["lm_head"])
    yield (
        "an expert ignored",
        config(QUANTIZATION, ignore=["lm_head", "model.layers.0.mlp.gate", "re:.*experts.1.*"]),
    )
    yield (
        "all experts ignored",
        config(QUANTIZATION, ignore=["lm_head", "model.layers.0.mlp.gate", "re:.*experts.*"]),
    )
    yield "no norm of queries", drop("model.layers.0.self_attn.q_norm.weight")
    yield "experts called by older names", tensors(_older_names)
    yield "experts exchanged", tensors(_exchanged)


def _another_expert(values: Tensors) -> None:
    for name in [name for name in values if name.startswith(f"{EXPERT}.1.")]:
        values[name.replace(".experts.1.", ".experts.2.")] = values[name].clone()


def _older_names(values: Tensors) -> None:
    for name in [name for name in values if ".experts." in name]:
        new = name.replace("gate_proj", "w1").replace("down_proj", "w2").replace("up_proj", "w3")
        values[new] = values.pop(name)


def _exchanged(values: Tensors) -> None:
    for name in [name for name in values if ".experts.0." in name and name.endswith("weight_scale")]:
        twin = name.replace(".experts.0.", ".experts.1.")
        values[name], values[twin] = values[twin], values[name]


def _tied() -> Iterator[tuple[str, Change]]:
    yield (
        "a head of its own beside a tie",
        tensors(lambda values: values.update({"lm_head.weight": -values["model.embed_tokens.weight"]})),
    )
    yield (
        "the tied head stored again",
        tensors(
            lambda values: values.update({"lm_head.weight": values["model.embed_tokens.weight"].clone()})
        ),
    )
    yield "no norm of keys", drop("model.layers.1.self_attn.k_norm.weight")


def _kv_cache(sound: Sound) -> Iterator[tuple[str, Change]]:
    place = sound.attention("q").rpartition(".")[0]
    for leaf in ("k_scale", "v_scale"):
        yield f"no {leaf}", drop(f"{place}.{leaf}")
        yield f"{leaf} NaN", put(f"{place}.{leaf}", element(float("nan")))
        yield f"{leaf} zero", put(f"{place}.{leaf}", every(0.0))
        yield f"{leaf} negative", put(f"{place}.{leaf}", lambda scale: -scale)
        yield f"{leaf} upside down", put(f"{place}.{leaf}", lambda scale: 1 / scale)
        yield f"{leaf} a byte", put(f"{place}.{leaf}", lambda scale: scale.to(torch.uint8))
        yield f"{leaf} twice", put(f"{place}.{leaf}", lambda scale: scale.reshape(-1).repeat(2))
        yield f"{leaf} of a head each", put(f"{place}.{leaf}", lambda scale: scale.reshape(-1).repeat(4))
        yield f"{leaf} as bfloat16", put(f"{place}.{leaf}", lambda scale: scale.to(torch.bfloat16))
        yield f"{leaf} under the projection", rename(f"{place}.{leaf}", f"{place}.{leaf[0]}_proj.{leaf}")
        yield f"{leaf} under a name unknown", rename(f"{place}.{leaf}", f"{place}.{leaf[0]}_cache.{leaf}")
    yield "k_scale and v_scale exchanged", swap(f"{place}.k_scale", f"{place}.v_scale")
    yield "a scale of queries too", add(f"{place}.q_scale", torch.ones(1))


def _heads(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Output heads."""
    if sound.tied:
        return
    yield "lm_head NaN", put("lm_head.weight", element(float("nan")))
    yield "lm_head lacks a row", put("lm_head.weight", lambda value: value[:-1])
    yield "lm_head has a row too many", put("lm_head.weight", lambda value: torch.cat([value, value[-1:]]))
    yield "lm_head as fp8", put("lm_head.weight", lambda value: value.to(torch.float8_e4m3fn))
    yield "lm_head with a scale", add("lm_head.weight_scale", torch.ones(384, 1))
