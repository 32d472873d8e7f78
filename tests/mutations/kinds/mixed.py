"""Names of other producers, layers stored as one, numbers that are off in one place, sizes of the model."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.mutations.edits import (
    WHOLE,
    Change,
    Tensors,
    config,
    drop,
    element,
    every,
    put,
    rename,
    swap,
    tensors,
    without,
)
from tests.mutations.good import Sound
from tests.mutations.kinds.values import SINGLE


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Those that depend on the scheme."""
    yield from _names(sound)
    yield from _fused(sound)
    yield from _scales(sound)
    yield from _codes(sound)


def _names(sound: Sound) -> Iterator[tuple[str, Change]]:
    q, down = sound.attention("q"), sound.mlp("down")
    yield "q_proj in capitals", tensors(lambda values: _moved(values, q, q.replace("q_proj", "Q_proj")))
    yield "weight_scale in capitals", rename(f"{down}.weight_scale", f"{down}.WEIGHT_SCALE")
    yield (
        "down_proj by another name",
        tensors(lambda values: _moved(values, down, down.replace("down", "dn"))),
    )
    yield "down_proj twice, under another name", tensors(lambda values: _twice(values, down, f"{down}_copy"))
    yield (
        "GPTQ's names",
        tensors(lambda values: _leaves(values, {"weight_packed": "qweight", "weight_scale": "scales"})),
    )
    yield (
        "ModelOpt's names",
        tensors(lambda values: _leaves(values, {"weight_global_scale": "weight_scale_2"})),
    )
    yield "a wrapper's names", tensors(lambda values: _prefixed(values, "base_model.model."))
    yield "a compiled model's names", tensors(lambda values: _prefixed(values, "_orig_mod."))
    yield "names with model twice", tensors(lambda values: _prefixed(values, "model."))
    yield (
        "layers counted with two digits",
        tensors(lambda values: _moved(values, "model.layers.0", "model.layers.00")),
    )


def _moved(values: Tensors, old: str, new: str) -> None:
    for name in [name for name in values if name.startswith(f"{old}.")]:
        values[new + name.removeprefix(old)] = values.pop(name)


def _twice(values: Tensors, old: str, new: str) -> None:
    for name in [name for name in values if name.startswith(f"{old}.")]:
        values[new + name.removeprefix(old)] = values[name].clone()


def _leaves(values: Tensors, names: dict[str, str]) -> None:
    for name in list(values):
        module, dot, leaf = name.rpartition(".")
        if leaf in names:
            values[f"{module}{dot}{names[leaf]}"] = values.pop(name)


def _prefixed(values: Tensors, prefix: str) -> None:
    for name in list(values):
        values[prefix + name] = values.pop(name)


def _fused(sound: Sound) -> Iterator[tuple[str, Change]]:
    q = sound.attention("q")
    place = q.rpartition(".")[0]
    parts = [f"{place}.{name}_proj" for name in "qkv"]
    yield "q, k and v stored as one", tensors(lambda values: _joined(values, parts, f"{place}.qkv_proj"))
    if not sound.experts:
        mlp = sound.mlp("up").rpartition(".")[0]
        halves = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        yield (
            "gate and up stored as one",
            tensors(lambda values: _joined(values, halves, f"{mlp}.gate_up_proj")),
        )


def _joined(values: Tensors, parts: list[str], whole: str) -> None:
    leaves = [name.removeprefix(f"{parts[0]}.") for name in values if name.startswith(f"{parts[0]}.")]
    for leaf in leaves:
        found = [values.pop(f"{part}.{leaf}") for part in parts]
        single = leaf in SINGLE or leaf == "weight_shape" or not found[0].dim()
        values[f"{whole}.{leaf}"] = found[0] if single else torch.cat(found)


def _scales(sound: Sound) -> Iterator[tuple[str, Change]]:
    down, q = sound.mlp("down"), sound.attention("q")
    if {"weight_global_scale", "input_global_scale"} <= {*sound.leaves}:
        yield "global scales exchanged", swap(f"{down}.weight_global_scale", f"{down}.input_global_scale")
        yield "all global scales exchanged", tensors(_exchanged)
    for leaf in sorted(SINGLE & {*sound.leaves}):
        yield f"no {leaf} in v_proj", drop(f"{sound.attention('v')}.{leaf}")
        yield f"{leaf} of down_proj tenfold", put(f"{down}.{leaf}", lambda scale: scale * 10)
        yield f"{leaf} of down_proj thousandfold", put(f"{down}.{leaf}", lambda scale: scale * 1000)
        yield f"all {leaf} upside down", tensors(partial(_inverted, leaf=leaf))
        yield f"all {leaf} one", tensors(partial(_filled, leaf=leaf, value=1.0))
    yield "no scales at all", tensors(lambda values: _dropped(values, ".weight_scale"))
    if not sound.scheme.startswith("MX"):
        yield "all weight_scale upside down", tensors(lambda values: _inverted(values, "weight_scale"))
        yield "all weight_scale NaN", tensors(lambda values: _filled(values, "weight_scale", float("nan")))
        yield "weight_scale of down_proj a tenth", put(f"{down}.weight_scale", _times(0.1))
        yield "weight_scale of q_proj tenfold", put(f"{q}.weight_scale", _times(10))
        yield "a scale of down_proj tenfold", put(f"{down}.weight_scale", _first(10))
        yield "a scale of down_proj infinite", put(f"{down}.weight_scale", element(float("inf")))
    if sound.scheme.startswith("NVFP4"):
        yield "a scale of down_proj NaN of the other sign", put(f"{down}.weight_scale", _bits(0xFF))
        yield "a scale of down_proj denormal", put(f"{down}.weight_scale", _bits(0x01))


def _exchanged(values: Tensors) -> None:
    for name in [name for name in values if name.endswith(".weight_global_scale")]:
        twin = name.replace("weight_global", "input_global")
        values[name], values[twin] = values[twin], values[name]


def _dropped(values: Tensors, ending: str) -> None:
    for name in [name for name in values if name.endswith(ending)]:
        del values[name]


def _inverted(values: Tensors, leaf: str) -> None:
    for name in values:
        if name.endswith(f".{leaf}"):
            values[name] = (1 / values[name].float()).to(values[name].dtype)


def _filled(values: Tensors, leaf: str, value: float) -> None:
    for name in values:
        if name.endswith(f".{leaf}"):
            values[name] = every(value)(values[name])


def _times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scale: (scale.float() * factor).to(scale.dtype)


def _first(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scale: element(float(scale.float().view(-1)[0]) * factor)(scale)


def _bits(code: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.view(torch.uint8).clone()
        changed.view(-1)[0] = code
        return changed.view(tensor.dtype)

    return apply


def _codes(sound: Sound) -> Iterator[tuple[str, Change]]:
    down, weight = sound.mlp("down"), sound.leaves[0]
    if weight == "weight" and sound.scheme != "W8A8":
        yield "a weight of down_proj NaN of the other sign", put(f"{down}.weight", _bits(0xFF))
    if sound.scheme == "W8A8":
        yield "a code of -128", put(f"{down}.weight", lambda value: element(-128)(value))
    if weight == "weight_packed" and "weight_shape" in sound.leaves:
        yield "words as uint32", put(f"{down}.weight_packed", lambda value: value.view(torch.uint32))
        yield "words byteswapped", put(f"{down}.weight_packed", _byteswapped)
        yield "words of all ones", put(f"{down}.weight_packed", lambda value: torch.full_like(value, -1))
    yield f"{weight} of down_proj with rows turned", put(f"{down}.{weight}", lambda value: value.roll(1, 0))
    yield (
        f"{weight} of down_proj with columns turned",
        put(f"{down}.{weight}", lambda value: value.roll(1, 1)),
    )
    if "weight_zero_point" in sound.leaves:
        yield "zero points zero", put(f"{down}.weight_zero_point", lambda value: torch.zeros_like(value))
        yield (
            "zero points at the end",
            put(f"{down}.weight_zero_point", lambda value: torch.full_like(value, -1)),
        )


def _byteswapped(value: torch.Tensor) -> torch.Tensor:
    size = value.element_size()
    return (
        value.view(torch.uint8).reshape(-1, size).flip(1).reshape(-1).view(value.dtype).reshape(value.shape)
    )


def shared_kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Those that do not: tables, norms, the model's config."""
    yield "embeddings zero", put("model.embed_tokens.weight", every(0.0))
    yield "embeddings doubled", put("model.embed_tokens.weight", lambda value: value * 2)
    yield "layer norm zero", put("model.layers.0.input_layernorm.weight", every(0.0))
    yield "final norm negative", put("model.norm.weight", lambda value: -value)
    yield "embeddings infinite", put("model.embed_tokens.weight", every(float("inf")))
    if not sound.tied:
        yield "lm_head zero", put("lm_head.weight", every(0.0))
        yield "lm_head transposed", put("lm_head.weight", lambda value: value.T)
        yield "lm_head as float32", put("lm_head.weight", lambda value: value.float())
        yield "lm_head as float16", put("lm_head.weight", lambda value: value.half())
        yield "embeddings and lm_head exchanged", swap("lm_head.weight", "model.embed_tokens.weight")
    yield from _sizes()


def _sizes() -> Iterator[tuple[str, Change]]:
    yield "another rope theta", config(WHOLE, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    yield "older rope theta", config(WHOLE, rope_theta=1e6)
    yield "unknown rope", config(WHOLE, rope_parameters={"rope_theta": 1e4, "rope_type": "no-such-rope"})
    yield "older rope scaling", config(WHOLE, rope_scaling={"type": "linear", "factor": 4.0})
    yield "yarn without a factor", config(WHOLE, rope_parameters={"rope_theta": 1e4, "rope_type": "yarn"})
    yield "another epsilon of norms", config(WHOLE, rms_norm_eps=0.5)
    yield "no epsilon of norms", without(WHOLE, "rms_norm_eps")
    yield "epsilon of norms a string", config(WHOLE, rms_norm_eps="1e-6")
    yield "epsilon of norms negative", config(WHOLE, rms_norm_eps=-1.0)
    yield "fewer positions", config(WHOLE, max_position_embeddings=64)
    yield "too few positions", config(WHOLE, max_position_embeddings=8)
    yield "no positions", without(WHOLE, "max_position_embeddings")
    yield "dtype float16", config(WHOLE, dtype="float16")
    yield "dtype float32", config(WHOLE, dtype="float32")
    yield "no dtype", without(WHOLE, "dtype")
    yield "dtype auto", config(WHOLE, dtype="auto")
    yield "dtype float8", config(WHOLE, dtype="float8_e4m3fn")
    yield "no layers", config(WHOLE, num_hidden_layers=0)
    yield "heads zero", config(WHOLE, num_attention_heads=0)
    yield "heads of keys null", config(WHOLE, num_key_value_heads=None)
    yield "heads of keys zero", config(WHOLE, num_key_value_heads=0)
    yield "vocabulary a string", config(WHOLE, vocab_size="384")
    yield "vocabulary null", config(WHOLE, vocab_size=None)
    yield "layers a float", config(WHOLE, num_hidden_layers=2.0)
    yield "head size null", config(WHOLE, head_dim=None)
    yield "head size zero", config(WHOLE, head_dim=0)
    yield "odd heads", config(WHOLE, num_attention_heads=3)
    yield "activation null", config(WHOLE, hidden_act=None)
    yield "activation gelu", config(WHOLE, hidden_act="gelu")
    yield "two architectures", json_first()
    yield (
        "two architectures, the first unknown",
        config(WHOLE, architectures=["NoSuchForCausalLM", "LlamaForCausalLM"]),
    )
    yield "architectures a string", config(WHOLE, architectures="LlamaForCausalLM")
    yield "architecture in small letters", config(WHOLE, architectures=["llamaforcausallm"])
    yield "architecture of the base model", config(WHOLE, architectures=["LlamaModel"])
    yield "model type in capitals", config(WHOLE, model_type="LLAMA")
    yield (
        "code of the checkpoint's own, missing",
        config(WHOLE, auto_map={"AutoModelForCausalLM": "modeling_x.X"}),
    )
    yield (
        "config of the checkpoint's own, missing",
        config(WHOLE, auto_map={"AutoConfig": "configuration_x.X"}),
    )
    yield "a sliding window", config(WHOLE, sliding_window=4, use_sliding_window=True)
    yield "ends null", config(WHOLE, eos_token_id=None)
    yield "tensor parallelism of old", config(WHOLE, pretraining_tp=2)


def json_first() -> Change:
    """Llama's class before another."""
    return config(WHOLE, architectures=["LlamaForCausalLM", "OPTForCausalLM"])
