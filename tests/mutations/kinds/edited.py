"""Hand edits of config.json, remains of conversions, scales of the KV cache that are off everywhere."""

from collections.abc import Callable, Iterator

import torch
from safetensors.torch import save_file

from tests.mutations.edits import (
    ARGUMENTS,
    GROUP,
    QUANTIZATION,
    WEIGHTS,
    WHOLE,
    Change,
    Tensors,
    add,
    config,
    file_bytes,
    put,
    tensors,
    without,
)
from tests.mutations.good import Sound
from vexport.types import Json

# A header that is nested deeper than parsers of JSON go.
NESTED = b'{"a":' + b"[" * 20000 + b"]" * 20000 + b"}"


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Those that depend on the scheme."""
    down = sound.mlp("down")
    yield "all weight_scale as float64", _all("weight_scale", lambda scale: scale.double())
    yield (
        "all weight_scale transposed",
        _all("weight_scale", lambda scale: scale.mT if scale.ndim > 1 else scale),
    )
    yield "weight_scale of down_proj of twice as many groups", put(f"{down}.weight_scale", _doubled)
    yield "an unquantized down_proj in a file beside", _beside(f"{down}.weight")
    yield "weight_shape of down_proj turned round", _shapes(down, lambda shape: shape.flip(0))
    yield "weight_shape of down_proj as float32", _shapes(down, lambda shape: shape.float())
    yield "weight_shape of down_proj of the words", _shapes(down, lambda shape: shape // 8)
    for dtype in ("bfloat16", "float8", "torch.uint8"):
        yield f"scale_dtype {dtype}", config(ARGUMENTS, scale_dtype=dtype)
    yield "targets a number too", config(GROUP, targets=["Linear", 3])
    for layout in ("naive-quantized", "int-quantized", "float-quantized", "dense", "mxfp8-quantized"):
        yield f"the group's format {layout}", config(GROUP, format=layout)
    if sound.kv_cache:
        yield from _kv_cache()


def _kv_cache() -> Iterator[tuple[str, Change]]:
    for name, change in {
        "one": torch.ones_like,
        "times 448": lambda scale: scale * 448,
        "a millionth": lambda scale: scale * 1e-6,
        "as e4m3": lambda scale: scale.float().to(torch.float8_e4m3fn),
        "without a side": lambda scale: scale.reshape(()),
    }.items():
        yield f"all scales of the KV cache {name}", _all(("k_scale", "v_scale"), change)
    yield "scales of the KV cache announced by nothing", config(QUANTIZATION, kv_cache_scheme=None)


def shared_kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Those that do not."""
    settings: dict[str, dict[str, Json]] = {
        "tie_word_embeddings a text": {"tie_word_embeddings": "true"},
        "tie_word_embeddings null": {"tie_word_embeddings": None},
        "max_position_embeddings null": {"max_position_embeddings": None},
        "rms_norm_eps null": {"rms_norm_eps": None},
        "rms_norm_eps a whole number": {"rms_norm_eps": 0},
        "attention_bias null": {"attention_bias": None},
        "dtype with torch's prefix": {"dtype": "torch.bfloat16"},
        "an encoder too": {"is_encoder_decoder": True},
        "layer_types unknown": {"layer_types": ["magic"] * sound.layers},
        "layer_types of too many layers": {"layer_types": ["full_attention"] * (sound.layers + 1)},
        "half of a head rotated": {"partial_rotary_factor": 0.5},
        "rope_scaling of no kind": {"rope_scaling": {"factor": 4.0}},
        "a head_dim of 16": {"head_dim": 16},
        "layers without experts": {"decoder_sparse_step": 2},
        "initializer_range of another": {"initializer_range": 0.5},
        "the class of Llama": {"architectures": ["LlamaForCausalLM"]},
        "pad_token_id of another": {"pad_token_id": 7},
    }
    for name, changes in settings.items():
        yield name, config(WHOLE, **changes)
    yield "no intermediate_size", without(WHOLE, "intermediate_size")
    yield "transform_config of no known keys", config(QUANTIZATION, transform_config={"R1": {}})
    attention: Json = {"targets": ["LlamaAttention"], "weights": None}
    yield "a group of attention beside", config((*QUANTIZATION, "config_groups"), attention=attention)
    yield "header nested deeply", file_bytes(WEIGHTS, lambda data: len(NESTED).to_bytes(8, "little") + NESTED)
    yield "a scale of probabilities too", add("model.layers.0.self_attn.prob_scale", torch.ones(1))
    yield "norms as one plus weight, rounded", _all("norm.weight", lambda norm: (norm + 1) - 1)


def _all(ends: str | tuple[str, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change all tensors whose names end so."""

    def apply(values: Tensors) -> None:
        values.update(
            {name: change(value).contiguous() for name, value in values.items() if name.endswith(ends)}
        )

    return tensors(apply)


def _doubled(scale: torch.Tensor) -> torch.Tensor:
    return scale.repeat_interleave(2, dim=1) if scale.ndim > 1 else scale


def _shapes(module: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return _all(f"{module}.weight_shape", change)


def _beside(name: str) -> Change:
    value = torch.ones(64, 64, dtype=torch.bfloat16)
    return lambda folder: save_file({name: value}, folder / "model-before.safetensors")
