"""What goes wrong between an export and its use: lost parts of files, layers mixed up, other files."""

import json
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.mutations.edits import (
    QUANTIZATION,
    WEIGHTS,
    WHOLE,
    Change,
    Tensors,
    config,
    file_bytes,
    put,
    tensors,
)
from tests.mutations.good import Sound
from tests.mutations.kinds.values import SINGLE
from vexport.types import Json


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """All of them, whatever the scheme."""
    yield from _data()
    yield from _exchanges(sound)
    yield from _parts(sound)
    yield from _configs(sound)


def _data() -> Iterator[tuple[str, Change]]:
    yield "data all zero", file_bytes(WEIGHTS, lambda data: _from(data, 0.0, _zeros))
    yield "second half of the data zero", file_bytes(WEIGHTS, lambda data: _from(data, 0.5, _zeros))
    yield "end of the data zero", file_bytes(WEIGHTS, lambda data: _from(data, 0.98, _zeros))
    yield "data of another file", file_bytes(WEIGHTS, lambda data: _from(data, 0.0, _noise))
    yield "end of the data of another file", file_bytes(WEIGHTS, lambda data: _from(data, 0.9, _noise))
    yield "data shifted by a byte", file_bytes(WEIGHTS, lambda data: _from(data, 0.0, _shifted))
    yield (
        "data all ones",
        file_bytes(WEIGHTS, lambda data: _from(data, 0.0, lambda rest: b"\xff" * len(rest))),
    )


def _from(data: bytes, share: float, change: Callable[[bytes], bytes]) -> bytes:
    """Change a file's data from a share of it on; the header stays."""
    base = 8 + int.from_bytes(data[:8], "little")
    start = base + int((len(data) - base) * share)
    return data[:start] + change(data[start:])


def _zeros(rest: bytes) -> bytes:
    return bytes(len(rest))


def _noise(rest: bytes) -> bytes:
    generator = torch.Generator().manual_seed(5)
    return bytes(torch.randint(256, (len(rest),), dtype=torch.uint8, generator=generator).tolist())


def _shifted(rest: bytes) -> bytes:
    return rest[1:] + rest[:1]


def _exchanges(sound: Sound) -> Iterator[tuple[str, Change]]:
    q, k, o = (sound.attention(leaf) for leaf in "qko")
    yield "q_proj and o_proj exchanged", tensors(partial(_exchange, one=q, other=o))
    yield "q_proj and k_proj exchanged", tensors(partial(_exchange, one=q, other=k))
    if sound.layers > 1:
        exchange = partial(_exchange, one="model.layers.0", other="model.layers.1")
        yield "decoder layers exchanged", tensors(exchange)
        yield "a decoder layer twice", tensors(_first_layer_again)


def _exchange(values: Tensors, one: str, other: str) -> None:
    """Exchange all tensors of two modules, for as far as both have them."""
    for name in [name for name in values if name.startswith(f"{one}.")]:
        twin = other + name.removeprefix(one)
        if twin in values:
            values[name], values[twin] = values[twin], values[name]


def _first_layer_again(values: Tensors) -> None:
    for name in [name for name in values if name.startswith("model.layers.0.")]:
        values[name.replace(".0.", ".1.", 1)] = values[name].clone()


def _parts(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Slices of tensors, as shards of tensor parallelism or of a lost half."""
    q, down, weight = sound.attention("q"), sound.mlp("down"), sound.leaves[0]
    yield "all tensors halved along rows", tensors(partial(_halved, prefix=""))
    yield "a decoder layer halved along rows", tensors(partial(_halved, prefix="model.layers.0."))
    yield "last rows of q_proj zero", put(f"{q}.{weight}", partial(_zero_rows, share=0.5))
    yield "last rows of down_proj zero", put(f"{down}.{weight}", partial(_zero_rows, share=0.9))
    yield "rows of down_proj in reverse", tensors(partial(_reversed, module=down))
    yield "embeddings with a row too many", put("model.embed_tokens.weight", _padded)
    yield "embeddings in reverse", put("model.embed_tokens.weight", lambda value: value.flip(0))


def _halved(values: Tensors, prefix: str) -> None:
    for name in [name for name in values if name.startswith(prefix)]:
        if values[name].dim() == 2 and values[name].shape[0] > 1:
            values[name] = values[name][: values[name].shape[0] // 2].clone()


def _zero_rows(value: torch.Tensor, share: float) -> torch.Tensor:
    changed = value.view(torch.uint8).clone()
    changed[int(len(changed) * share) :] = 0
    return changed.view(value.dtype)


def _padded(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value, value[-1:]])


def _reversed(values: Tensors, module: str) -> None:
    """The rows of all tensors of a layer: outputs come in another order."""
    for name in [name for name in values if name.startswith(f"{module}.")]:
        leaf = name.rpartition(".")[2]
        if leaf not in SINGLE and leaf != "weight_shape":
            values[name] = values[name].flip(0)


def _configs(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Of another checkpoint of the same model, or of another model."""
    for other in ("W4A16", "FP8_DYNAMIC", "NVFP4A16", "W8A8"):
        if other != sound.scheme:
            yield f"quantization config of {other}", config(WHOLE, quantization_config=_of(other))
    yield "ignores all of attention's outputs", config(QUANTIZATION, ignore=["lm_head", "re:.*o_proj"])
    yield "config of a smaller model", config(WHOLE, hidden_size=64, intermediate_size=128, head_dim=16)
    if sound.experts:
        yield "one expert for a token", config(WHOLE, num_experts_per_tok=1)
        yield "more experts for a token than there are", config(WHOLE, num_experts_per_tok=9)
        yield "weights of experts not normalized", config(WHOLE, norm_topk_prob=False)
        yield "weights of experts normalized", config(WHOLE, norm_topk_prob=True)
        yield "experts in every other layer", config(WHOLE, decoder_sparse_step=2)
        yield "dense MLPs only", config(WHOLE, mlp_only_layers=[0])


def _of(scheme: str) -> Json:
    """The quantization config of a scheme, as compressed-tensors writes it."""
    tokens = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    found = {
        "W4A16": (
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            None,
        ),
        "NVFP4A16": (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            None,
        ),
        "FP8_DYNAMIC": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            {**tokens, "type": "float"},
        ),
        "W8A8": (
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {**tokens, "type": "int"},
        ),
    }[scheme]
    group = {"targets": ["Linear"], "weights": found[1], "input_activations": found[2], "format": found[0]}
    whole = {"quant_method": "compressed-tensors", "format": found[0], "ignore": ["lm_head"]}
    copied: Json = json.loads(json.dumps({**whole, "config_groups": {"group_0": group}}))
    return copied
