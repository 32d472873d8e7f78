"""Mutations with names of other producers, fused layers, single wrong numbers, and model sizes."""

from collections.abc import Callable, Iterator

import torch

from tests.mutations.edits import (
    WHOLE,
    Change,
    Tensors,
    change_all,
    config,
    copy_prefix,
    drop,
    drop_if,
    fill_with,
    inverse,
    move_prefix,
    multiply_by,
    put,
    rename,
    rename_all,
    set_first,
    swap,
    swap_bytes,
    swap_parts,
    tensors,
    without,
)
from tests.mutations.good import Sound
from tests.mutations.kinds.values import SINGLE


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations that depend on the scheme."""
    yield from _tensor_names(sound)
    yield from _fused(sound)
    yield from _scales(sound)
    yield from _codes(sound)


def _tensor_names(sound: Sound) -> Iterator[tuple[str, Change]]:
    q, down = sound.attention("q"), sound.mlp("down")
    yield "q_proj in capitals", move_prefix(f"{q}.", f"{q.replace('q_proj', 'Q_proj')}.")
    yield "weight_scale in capitals", rename(f"{down}.weight_scale", f"{down}.WEIGHT_SCALE")
    yield "down_proj by another name", move_prefix(f"{down}.", f"{down.replace('down', 'dn')}.")
    yield "down_proj twice, under another name", copy_prefix(f"{down}.", f"{down}_copy.")
    yield "GPTQ's names", _rename_leaves({"weight_packed": "qweight", "weight_scale": "scales"})
    yield "ModelOpt's names", _rename_leaves({"weight_global_scale": "weight_scale_2"})
    yield "a wrapper's names", move_prefix("", "base_model.model.")
    yield "a compiled model's names", move_prefix("", "_orig_mod.")
    yield "names with model twice", move_prefix("", "model.")
    yield "layers counted with two digits", move_prefix("model.layers.0.", "model.layers.00.")


def _rename_leaves(names: dict[str, str]) -> Change:
    def new(name: str) -> str:
        module, dot, leaf = name.rpartition(".")
        return f"{module}{dot}{names.get(leaf, leaf)}"

    return rename_all(new)


def _fused(sound: Sound) -> Iterator[tuple[str, Change]]:
    place, mlp = (layer.rpartition(".")[0] for layer in (sound.attention("q"), sound.mlp("up")))
    yield (
        "q, k and v stored as one",
        _joined([f"{place}.{name}_proj" for name in "qkv"], f"{place}.qkv_proj"),
    )
    if not sound.experts:
        halves = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        yield "gate and up stored as one", _joined(halves, f"{mlp}.gate_up_proj")


def _joined(parts: list[str], whole: str) -> Change:
    def apply(values: Tensors) -> None:
        leaves = [
            name.removeprefix(f"{parts[0]}.") for name in values if name.startswith(f"{parts[0]}.")
        ]
        for leaf in leaves:
            found = [values.pop(f"{part}.{leaf}") for part in parts]
            single = leaf in SINGLE or leaf == "weight_shape" or not found[0].dim()
            values[f"{whole}.{leaf}"] = found[0] if single else torch.cat(found)

    return tensors(apply)


def _scales(sound: Sound) -> Iterator[tuple[str, Change]]:
    down, q = sound.mlp("down"), sound.attention("q")
    if {"weight_global_scale", "input_global_scale"} <= {*sound.leaves}:
        yield (
            "global scales exchanged",
            swap(f"{down}.weight_global_scale", f"{down}.input_global_scale"),
        )
        yield "all global scales exchanged", swap_parts("weight_global", "input_global")
    for leaf in sorted(SINGLE & {*sound.leaves}):
        yield f"no {leaf} in v_proj", drop(f"{sound.attention('v')}.{leaf}")
        yield f"{leaf} of down_proj tenfold", put(f"{down}.{leaf}", lambda scale: scale * 10)
        yield f"{leaf} of down_proj thousandfold", put(f"{down}.{leaf}", lambda scale: scale * 1000)
        yield f"all {leaf} upside down", change_all(f".{leaf}", inverse)
        yield f"all {leaf} one", change_all(f".{leaf}", fill_with(1.0))
    yield "no scales at all", drop_if(lambda name: name.endswith(".weight_scale"))
    if not sound.scheme.startswith("MX"):
        yield "all weight_scale upside down", change_all(".weight_scale", inverse)
        yield "all weight_scale NaN", change_all(".weight_scale", fill_with(float("nan")))
        yield "weight_scale of down_proj a tenth", put(f"{down}.weight_scale", multiply_by(0.1))
        yield "weight_scale of q_proj tenfold", put(f"{q}.weight_scale", multiply_by(10))
        yield "a scale of down_proj tenfold", put(f"{down}.weight_scale", _scale_first(10))
        yield "a scale of down_proj infinite", put(f"{down}.weight_scale", set_first(float("inf")))
    if sound.scheme.startswith("NVFP4"):
        yield (
            "a scale of down_proj NaN of the other sign",
            put(f"{down}.weight_scale", _set_first_code(0xFF)),
        )
        yield "a scale of down_proj denormal", put(f"{down}.weight_scale", _set_first_code(0x01))


def _scale_first(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scale: set_first(float(scale.float().view(-1)[0]) * factor)(scale)


def _set_first_code(code: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.view(torch.uint8).clone()
        changed.view(-1)[0] = code
        return changed.view(tensor.dtype)

    return apply


def _codes(sound: Sound) -> Iterator[tuple[str, Change]]:
    weight = sound.leaves[0]
    name, zero_point = f"{sound.mlp('down')}.{weight}", f"{sound.mlp('down')}.weight_zero_point"
    if weight == "weight" and sound.scheme != "W8A8":
        yield "a weight of down_proj NaN of the other sign", put(name, _set_first_code(0xFF))
    if sound.scheme == "W8A8":
        yield "a code of -128", put(name, set_first(-128))
    if weight == "weight_packed" and "weight_shape" in sound.leaves:
        yield "words as uint32", put(name, lambda value: value.view(torch.uint32))
        yield "words byteswapped", put(name, swap_bytes)
        yield "words of all ones", put(name, lambda value: torch.full_like(value, -1))
    yield f"{weight} of down_proj with rows turned", put(name, lambda value: value.roll(1, 0))
    yield f"{weight} of down_proj with columns turned", put(name, lambda value: value.roll(1, 1))
    if "weight_zero_point" in sound.leaves:
        yield "zero points zero", put(zero_point, torch.zeros_like)
        yield "zero points at the end", put(zero_point, lambda value: torch.full_like(value, -1))


def shared_kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations that do not depend on the scheme: embeddings, norms, model config."""
    yield "embeddings zero", put("model.embed_tokens.weight", fill_with(0.0))
    yield "embeddings doubled", put("model.embed_tokens.weight", lambda value: value * 2)
    yield "layer norm zero", put("model.layers.0.input_layernorm.weight", fill_with(0.0))
    yield "final norm negative", put("model.norm.weight", lambda value: -value)
    yield "embeddings infinite", put("model.embed_tokens.weight", fill_with(float("inf")))
    if not sound.tied:
        yield "lm_head zero", put("lm_head.weight", fill_with(0.0))
        yield "lm_head transposed", put("lm_head.weight", lambda value: value.T)
        yield "lm_head as float32", put("lm_head.weight", lambda value: value.float())
        yield "lm_head as float16", put("lm_head.weight", lambda value: value.half())
        yield (
            "embeddings and lm_head exchanged",
            swap("lm_head.weight", "model.embed_tokens.weight"),
        )
    yield from _sizes()


def _sizes() -> Iterator[tuple[str, Change]]:
    yield (
        "another rope theta",
        config(WHOLE, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
    )
    yield "older rope theta", config(WHOLE, rope_theta=1e6)
    yield (
        "unknown rope",
        config(WHOLE, rope_parameters={"rope_theta": 1e4, "rope_type": "no-such-rope"}),
    )
    yield "older rope scaling", config(WHOLE, rope_scaling={"type": "linear", "factor": 4.0})
    yield (
        "yarn without a factor",
        config(WHOLE, rope_parameters={"rope_theta": 1e4, "rope_type": "yarn"}),
    )
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
    llama = "LlamaForCausalLM"
    yield "two architectures", config(WHOLE, architectures=[llama, "OPTForCausalLM"])
    yield (
        "two architectures, the first unknown",
        config(WHOLE, architectures=["NoSuchForCausalLM", llama]),
    )
    yield "architectures a string", config(WHOLE, architectures=llama)
    yield "architecture in small letters", config(WHOLE, architectures=["llamaforcausallm"])
    yield "architecture of the base model", config(WHOLE, architectures=["LlamaModel"])
    yield "model type in capitals", config(WHOLE, model_type="LLAMA")
    code, own = {"AutoModelForCausalLM": "modeling_x.X"}, {"AutoConfig": "configuration_x.X"}
    yield "code of the checkpoint's own, missing", config(WHOLE, auto_map={**code})
    yield "config of the checkpoint's own, missing", config(WHOLE, auto_map={**own})
    yield "a sliding window", config(WHOLE, sliding_window=4, use_sliding_window=True)
    yield "ends null", config(WHOLE, eos_token_id=None)
    yield "tensor parallelism of old", config(WHOLE, pretraining_tp=2)
