"""Ways to spoil a checkpoint, by scheme: files, headers, names, values, dtypes, shapes, config.

Harmless ones are among them: what a check says of those is as telling.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from tests.mutations.edits import (
    ARGUMENTS,
    GROUP,
    INPUTS,
    QUANTIZATION,
    WEIGHTS,
    WHOLE,
    Change,
    add,
    config,
    drop,
    element,
    every,
    file_bytes,
    index,
    put,
    rename,
    swap,
    without,
)

Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
GATE, DOWN = "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.down_proj"
OUT = "model.layers.0.self_attn.o_proj"
NVFP4_LEAVES = ("weight_packed", "weight_scale", "weight_global_scale")
LEAVES: Mapping[str, tuple[str, ...]] = {
    "NVFP4": (*NVFP4_LEAVES, "input_global_scale"),
    "NVFP4A16": NVFP4_LEAVES,
    "FP8": ("weight", "weight_scale", "input_scale"),
    "FP8_DYNAMIC": ("weight", "weight_scale"),
    "FP8_BLOCK": ("weight", "weight_scale"),
    "W8A8": ("weight", "weight_scale"),
    "W4A16": ("weight_packed", "weight_scale", "weight_shape"),
}
SINGLE = frozenset({"weight_global_scale", "input_global_scale", "input_scale"})
LISTED = ("lm_head",)
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def mutations(scheme: str) -> dict[str, Change]:
    """All mutations of a scheme by name."""
    return {name: change for part in PARTS for name, change in part(scheme)}


def files(scheme: str) -> Iterator[tuple[str, Change]]:
    """Files and headers."""
    yield "file truncated", file_bytes(WEIGHTS, lambda data: data[:-10])
    yield "file too long", file_bytes(WEIGHTS, lambda data: data + bytes(8))
    yield "file empty", file_bytes(WEIGHTS, lambda data: b"")
    yield "header spoiled", file_bytes(WEIGHTS, lambda data: data[:8] + b"x" + data[9:])
    yield "header length huge", file_bytes(WEIGHTS, lambda data: (2**62).to_bytes(8, "little") + data[8:])
    yield "weights missing", lambda folder: (folder / WEIGHTS).unlink()
    yield "config no JSON", file_bytes("config.json", lambda data: data[:-5])
    yield "index right", index(lambda values: dict.fromkeys(values, WEIGHTS))
    yield (
        "index names a missing file",
        index(lambda values: dict.fromkeys(values, "model-00001-of-00002.safetensors")),
    )
    yield (
        "index names a second, missing file",
        index(
            lambda values: {**dict.fromkeys(values, WEIGHTS), f"{Q}.bias": "model-00002-of-00002.safetensors"}
        ),
    )


def names(scheme: str) -> Iterator[tuple[str, Change]]:
    """Tensors that are missing, that nobody asked for, or that have another's place."""
    leaves = LEAVES[scheme]
    for leaf in leaves:
        yield f"no {leaf} in down_proj", drop(f"{DOWN}.{leaf}")
        yield f"no {leaf} in q_proj", drop(f"{Q}.{leaf}")
    yield "no q_proj at all", drop(*(f"{Q}.{leaf}" for leaf in leaves))
    yield "no down_proj at all", drop(*(f"{DOWN}.{leaf}" for leaf in leaves))
    yield "no final norm", drop("model.norm.weight")
    yield "no layer norm", drop("model.layers.0.input_layernorm.weight")
    yield "no embeddings", drop("model.embed_tokens.weight")
    yield "no lm_head", drop("lm_head.weight")
    yield "unknown tensor", add("model.layers.0.mlp.no_such.weight", torch.ones(4, 4))
    yield "unknown leaf", add(f"{DOWN}.no_such_leaf", torch.ones(1))
    yield "weight misspelled", rename(f"{DOWN}.{leaves[0]}", f"{DOWN}.{leaves[0]}s")
    yield "scale misspelled", rename(f"{DOWN}.weight_scale", f"{DOWN}.scale")
    yield "a bias that the config does not have", add(f"{DOWN}.bias", torch.zeros(128, dtype=torch.bfloat16))
    yield "rotary buffer of old", add("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16))
    yield (
        "a third decoder layer",
        add("model.layers.2.input_layernorm.weight", torch.ones(128, dtype=torch.bfloat16)),
    )
    yield (
        "layers' scales exchanged",
        swap(f"{OUT}.weight_scale", "model.layers.1.self_attn.o_proj.weight_scale"),
    )


def values(scheme: str) -> Iterator[tuple[str, Change]]:
    """Scales that are no usable numbers."""
    for leaf in LEAVES[scheme]:
        if not leaf.endswith("scale"):
            continue
        for layer, where in ((DOWN, "down_proj"), (Q, "q_proj")):
            yield f"{leaf} of {where} NaN", put(f"{layer}.{leaf}", element(float("nan")))
        if scheme not in ("NVFP4", "NVFP4A16") or leaf in SINGLE:
            yield f"{leaf} of down_proj infinite", put(f"{DOWN}.{leaf}", element(float("inf")))
        yield (
            f"{leaf} of down_proj negative",
            put(f"{DOWN}.{leaf}", lambda scale: (-scale.float()).to(scale.dtype)),
        )
        yield f"{leaf} of down_proj all zero", put(f"{DOWN}.{leaf}", every(0.0))
        yield f"{leaf} of q_proj upside down", put(f"{Q}.{leaf}", _inverse)
    for leaf in SINGLE & set(LEAVES[scheme]):
        yield f"{leaf} of down_proj upside down", put(f"{DOWN}.{leaf}", _inverse)
        yield f"{leaf} of q_proj unlike k_proj's", put(f"{Q}.{leaf}", lambda scale: scale * 1.5)
        yield f"{leaf} of gate_proj unlike up_proj's", put(f"{GATE}.{leaf}", lambda scale: scale * 0.5)
    if LEAVES[scheme][0] == "weight" and scheme != "W8A8":
        yield "weight of down_proj NaN", put(f"{DOWN}.weight", element(float("nan")))
    yield "final norm NaN", put("model.norm.weight", element(float("nan")))


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return (1 / scale.to(torch.float32)).to(scale.dtype)


def forms(scheme: str) -> Iterator[tuple[str, Change]]:
    """Dtypes and shapes."""
    for leaf in LEAVES[scheme]:
        name = f"{DOWN}.{leaf}"
        if leaf.endswith("scale"):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                yield f"{leaf} as {str(dtype).removeprefix('torch.')}", put(name, _as(dtype))
        if leaf.endswith("_scale") and leaf not in SINGLE:
            yield f"{leaf} flat", put(name, lambda scale: scale.reshape(-1))
            yield f"{leaf} lacks a row", put(name, lambda scale: scale[:-1])
            yield f"{leaf} has a row too many", put(name, lambda scale: torch.cat([scale, scale[-1:]]))
            yield f"{leaf} transposed", put(name, lambda scale: scale.T)
        if leaf in SINGLE:
            yield f"{leaf} without a dimension", put(name, lambda scale: scale.reshape(()))
            yield f"{leaf} twice", put(name, lambda scale: scale.reshape(-1).repeat(2))
    weight = LEAVES[scheme][0]
    name = f"{DOWN}.{weight}"
    yield f"{weight} as int64", put(name, lambda value: value.float().to(torch.int64))
    yield f"{weight} as bfloat16", put(name, _as(torch.bfloat16))
    yield f"{weight} as float8_e5m2", put(name, lambda value: value.float().to(torch.float8_e5m2))
    yield f"{weight} transposed", put(name, lambda value: value.T)
    yield f"{weight} lacks a row", put(name, lambda value: value[:-1])
    yield f"{weight} has a row too many", put(name, lambda value: torch.cat([value, value[-1:]]))
    yield f"{weight} lacks half its columns", put(name, lambda value: value[:, : value.shape[1] // 2])
    yield (
        f"{weight} of q_proj lacks half its columns",
        put(f"{Q}.{weight}", lambda value: value[:, : value.shape[1] // 2]),
    )
    yield (
        f"{weight} of q_proj lacks half its rows",
        put(f"{Q}.{weight}", lambda value: value[: value.shape[0] // 2]),
    )


def _as(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: value.to(torch.float32).to(dtype)


def configs(scheme: str) -> Iterator[tuple[str, Change]]:
    """config.json."""
    yield "no quantization_config", without(WHOLE, "quantization_config")
    yield "quant_method missing", without(QUANTIZATION, "quant_method")
    yield "quant_method fp8", config(QUANTIZATION, quant_method="fp8")
    yield "no config groups", config(QUANTIZATION, config_groups={})
    yield "unknown key at the top", config(QUANTIZATION, no_such_key=1)
    yield "unknown key in the group", config(GROUP, no_such_key=1)
    yield "unknown key in weights", config(ARGUMENTS, no_such_key=1)
    yield "no format in the group", without(GROUP, "format")
    yield "no format at the top", without(QUANTIZATION, "format")
    yield "unknown format in the group", config(GROUP, format="no-such-format")
    yield "format of packed integers", config(GROUP, format="pack-quantized")
    yield "format of floats", config(GROUP, format="float-quantized")
    yield "observer is null", config(ARGUMENTS, observer=None)
    yield "actorder group", config(ARGUMENTS, actorder="group")
    yield "actorder weight", config(ARGUMENTS, actorder="weight")
    yield "8 bits become 4, 4 become 8", config(ARGUMENTS, num_bits=8 if "4" in scheme else 4)
    yield (
        "floats become integers, integers floats",
        config(ARGUMENTS, type="int" if "F" in scheme else "float"),
    )
    yield "asymmetric", config(ARGUMENTS, symmetric=False)
    yield "group size 64", config(ARGUMENTS, group_size=64)
    yield "strategy tensor", config(ARGUMENTS, strategy="tensor")
    yield "strategy channel", config(ARGUMENTS, strategy="channel")
    yield "weights dynamic", config(ARGUMENTS, dynamic=True)
    yield "no inputs", config(GROUP, input_activations=None)
    if scheme in ("NVFP4", "FP8", "FP8_DYNAMIC", "W8A8"):
        yield "inputs symmetric null", config(INPUTS, symmetric=None)
        yield "inputs dynamic", config(INPUTS, dynamic=True)
        yield "inputs static", config(INPUTS, dynamic=False)
    yield "nothing ignored", config(QUANTIZATION, ignore=[])
    yield "q_proj alone ignored", config(QUANTIZATION, ignore=[*LISTED, Q])
    yield "a quantized layer ignored", config(QUANTIZATION, ignore=[*LISTED, DOWN])
    yield "all ignored", config(QUANTIZATION, ignore=["re:.*"])
    yield "unknown layer ignored", config(QUANTIZATION, ignore=[*LISTED, "model.layers.9.no_such"])
    yield "targets in small letters", config(GROUP, targets=["linear"])
    yield "targets MLPs only", config(GROUP, targets=["re:.*mlp.*"])
    yield "targets by pattern", config(GROUP, targets=["re:.*proj"])
    yield "targets nothing", config(GROUP, targets=["re:nothing"])
    yield "targets lm_head too", config(GROUP, targets=["Linear", "re:.*lm_head"])
    yield (
        "sparsity config with targets",
        config(
            QUANTIZATION,
            sparsity_config={"format": "dense", "sparsity_structure": "2:4", "targets": ["Linear"]},
        ),
    )
    yield "KV cache announced without scales", config(QUANTIZATION, kv_cache_scheme=KV_SCHEME)
    yield "KV cache of integers", config(QUANTIZATION, kv_cache_scheme={**KV_SCHEME, "type": "int"})
    yield "another status", config(QUANTIZATION, quantization_status="frozen")
    yield "a layer more than there is", config(WHOLE, num_hidden_layers=3)
    yield "a layer less than there is", config(WHOLE, num_hidden_layers=1)
    yield "another intermediate size", config(WHOLE, intermediate_size=512)
    yield "another vocabulary", config(WHOLE, vocab_size=320)
    yield "unknown architecture", config(WHOLE, architectures=["NoSuchForCausalLM"])
    yield "no architecture", without(WHOLE, "architectures")
    yield "tied in the config", config(WHOLE, tie_word_embeddings=True)


PARTS = (files, names, values, forms, configs)
