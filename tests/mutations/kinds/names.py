"""Tensors that are missing, that nobody asked for, or that have another's place."""

from collections.abc import Iterator

import torch

from tests.mutations.edits import Change, Tensors, add, drop, rename, swap, tensors
from tests.mutations.good import Sound


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Those that depend on the scheme."""
    q, down, leaves = sound.attention("q"), sound.mlp("down"), sound.leaves
    for leaf in leaves:
        yield f"no {leaf} in down_proj", drop(f"{down}.{leaf}")
        yield f"no {leaf} in q_proj", drop(f"{q}.{leaf}")
    for projection in ("q", "v", "o"):
        layer = sound.attention(projection)
        yield f"no {projection}_proj at all", drop(*(f"{layer}.{leaf}" for leaf in leaves))
    for projection in ("gate", "down"):
        layer = sound.mlp(projection)
        yield f"no {projection}_proj at all", drop(*(f"{layer}.{leaf}" for leaf in leaves))
    yield "weight misspelled", rename(f"{down}.{leaves[0]}", f"{down}.{leaves[0]}s")
    yield "scale misspelled", rename(f"{down}.weight_scale", f"{down}.scale")
    yield "scale_inv instead of scale", rename(f"{down}.weight_scale", f"{down}.weight_scale_inv")
    for leaf in (
        "weight",
        "weight_zero_point",
        "weight_g_idx",
        "input_scale",
        "weight_global_scale",
        "input_zero_point",
    ):
        if leaf not in leaves:
            yield f"{leaf} that the scheme does not have", add(f"{down}.{leaf}", _stray(leaf))
    yield (
        "q_proj's scale under k_proj's name",
        swap(f"{q}.weight_scale", f"{sound.attention('o')}.weight_scale"),
    )
    yield (
        "gate_proj and up_proj exchanged",
        tensors(lambda values: _exchange(values, sound.mlp("gate"), sound.mlp("up"))),
    )
    yield (
        "o_proj's weight under down_proj's name",
        rename(f"{sound.attention('o')}.{leaves[0]}", f"{down}.{leaves[0]}"),
    )


def _stray(leaf: str) -> torch.Tensor:
    shapes = {"weight": (128, 256), "weight_zero_point": (128, 1), "weight_g_idx": (256,)}
    dtypes = {"weight": torch.bfloat16, "weight_zero_point": torch.int8, "weight_g_idx": torch.int32}
    return torch.zeros(shapes.get(leaf, (1,)), dtype=dtypes.get(leaf, torch.float32)) + (
        leaf == "input_scale"
    )


def _exchange(values: Tensors, one: str, other: str) -> None:
    for name in [name for name in values if name.startswith(f"{one}.")]:
        twin = other + name.removeprefix(one)
        values[name], values[twin] = values[twin], values[name]


def shared_kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Those that do not."""
    down, q = sound.mlp("down"), sound.attention("q")
    yield "no final norm", drop("model.norm.weight")
    yield "no layer norm", drop("model.layers.0.input_layernorm.weight")
    yield "no layer norm after attention", drop("model.layers.0.post_attention_layernorm.weight")
    yield "no embeddings", drop("model.embed_tokens.weight")
    if not sound.tied:
        yield "no lm_head", drop("lm_head.weight")
        yield "lm_head at another place", rename("lm_head.weight", "model.lm_head.weight")
    yield "no first layer", tensors(lambda values: _without(values, "model.layers.0."))
    yield "no first attention", tensors(lambda values: _without(values, "model.layers.0.self_attn."))
    yield "no tensors", tensors(lambda values: _without(values, ""))
    yield "unknown tensor", add("model.layers.0.mlp.no_such.weight", torch.ones(4, 4))
    yield "unknown tensor at the top", add("no_such.weight", torch.ones(4, 4))
    yield "unknown leaf", add(f"{down}.no_such_leaf", torch.ones(1))
    yield "unknown norm", add("model.layers.0.no_such_layernorm.weight", torch.ones(128))
    yield "a bias that the config does not have", add(f"{down}.bias", torch.zeros(128, dtype=torch.bfloat16))
    yield (
        "a bias of q_proj that the config does not have",
        add(f"{q}.bias", torch.ones(128, dtype=torch.bfloat16)),
    )
    yield "a bias of lm_head", add("lm_head.bias", torch.ones(384, dtype=torch.bfloat16))
    yield "a bias of a norm", add("model.norm.bias", torch.ones(128, dtype=torch.bfloat16))
    yield "rotary buffer of old", add("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16))
    yield "rotary buffer elsewhere", add("model.rotary_emb.inv_freq", torch.ones(16))
    yield "KV scales without a scheme", add(f"{q.rpartition('.')[0]}.k_scale", torch.ones(1) / 64)
    yield "a prefix too many", tensors(lambda values: _renamed(values, "", "language_model."))
    yield "a prefix too few", tensors(lambda values: _renamed(values, "model.", ""))
    yield "layers counted from one", tensors(_shifted)
    yield "layers called blocks", tensors(lambda values: _renamed(values, "model.layers.", "model.blocks."))
    yield "embeddings under an older name", rename("model.embed_tokens.weight", "model.tok_embeddings.weight")
    yield "final norm under another name", rename("model.norm.weight", "model.final_layernorm.weight")
    yield (
        "a decoder layer too many",
        add(f"model.layers.{sound.layers}.input_layernorm.weight", torch.ones(128, dtype=torch.bfloat16)),
    )
    if sound.layers > 1:
        yield (
            "layers' scales exchanged",
            swap(
                "model.layers.0.self_attn.o_proj.weight_scale", "model.layers.1.self_attn.o_proj.weight_scale"
            ),
        )
        yield (
            "layers' norms exchanged",
            swap("model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
        )


def _without(values: Tensors, prefix: str) -> None:
    for name in [name for name in values if name.startswith(prefix)]:
        del values[name]


def _renamed(values: Tensors, old: str, new: str) -> None:
    for name in [name for name in values if name.startswith(old)]:
        values[new + name.removeprefix(old)] = values.pop(name)


def _shifted(values: Tensors) -> None:
    for name in sorted(values, reverse=True):
        head, layer, rest = name.partition("model.layers.")
        if layer:
            number, _, leaf = rest.partition(".")
            values[f"{head}{layer}{int(number) + 1}.{leaf}"] = values.pop(name)
