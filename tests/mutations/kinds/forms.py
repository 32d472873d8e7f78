"""Mutations of dtypes and shapes."""

from collections.abc import Callable, Iterator

import torch

from tests.mutations.edits import Change, Tensors, change_all, put, tensors
from tests.mutations.good import Sound
from tests.mutations.kinds.values import SINGLE

HALF = slice(None, None, 2)


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations of a quantized layer's parameters, and of unquantized tensors."""
    for leaf in sound.leaves:
        if leaf.endswith("scale"):
            yield from _scale_dtypes(sound, leaf)
            yield from _single_scales(sound, leaf) if leaf in SINGLE else _scale_arrays(sound, leaf)
    yield from _weight(sound)
    yield from _zero_points(sound)
    yield from _unquantized()


def _scale_dtypes(sound: Sound, leaf: str) -> Iterator[tuple[str, Change]]:
    name = f"{sound.mlp('down')}.{leaf}"
    for dtype in (torch.float32, torch.float64):
        yield f"{leaf} as {_dtype_name(dtype)}", put(name, _cast_to(dtype))
    for dtype in (torch.bfloat16, torch.float16):
        yield (
            f"{leaf} of o_proj as {_dtype_name(dtype)}",
            put(f"{sound.attention('o')}.{leaf}", _cast_to(dtype)),
        )
    yield f"{leaf} as float8_e5m2", put(name, lambda scale: scale.float().to(torch.float8_e5m2))
    yield f"{leaf} as int32", put(name, lambda scale: scale.float().to(torch.int32))
    if sound.scheme.startswith(("NVFP4", "MX")) and leaf == "weight_scale":
        yield f"{leaf}'s bits as int8", put(name, lambda scale: scale.view(torch.int8))
        yield (
            f"{leaf}'s bits as float8_e8m0",
            put(name, lambda scale: scale.view(torch.float8_e8m0fnu)),
        )
        yield f"{leaf}'s bits as uint8", put(name, lambda scale: scale.view(torch.uint8))
    elif leaf == "weight_scale":
        yield (
            f"all {leaf} as bfloat16",
            change_all(f".{leaf}", lambda scale: scale.to(torch.bfloat16)),
        )
        yield f"all {leaf} as float32", change_all(f".{leaf}", torch.Tensor.float)


def _single_scales(sound: Sound, leaf: str) -> Iterator[tuple[str, Change]]:
    name, fused = f"{sound.mlp('down')}.{leaf}", f"{sound.attention('q')}.{leaf}"
    yield f"{leaf} without a dimension", put(name, lambda scale: scale.reshape(()))
    yield f"{leaf} of two dimensions", put(name, lambda scale: scale.reshape(1, 1))
    yield f"{leaf} twice", put(name, lambda scale: scale.reshape(-1).repeat(2))
    yield f"{leaf} empty", put(name, lambda scale: scale.reshape(-1)[:0])
    yield f"{leaf} of q_proj of two dimensions", put(fused, lambda scale: scale.reshape(1, 1))
    yield f"{leaf} of q_proj twice", put(fused, lambda scale: scale.reshape(-1).repeat(2))


def _scale_arrays(sound: Sound, leaf: str) -> Iterator[tuple[str, Change]]:
    name, fused = f"{sound.mlp('down')}.{leaf}", f"{sound.attention('q')}.{leaf}"
    yield f"{leaf} flat", put(name, lambda scale: scale.reshape(-1))
    yield f"{leaf} of q_proj flat", put(fused, lambda scale: scale.reshape(-1))
    yield f"{leaf} of a dimension more", put(name, lambda scale: scale.unsqueeze(-1))
    yield f"{leaf} a single one", put(name, lambda scale: scale.reshape(-1)[:1])
    yield f"{leaf} of q_proj a single one", put(fused, lambda scale: scale.reshape(-1)[:1])
    if sound.scheme != "FP8":
        yield f"{leaf} transposed", put(name, lambda scale: scale.T)
        yield f"{leaf} lacks a row", put(name, lambda scale: scale[:-1])
        yield f"{leaf} of q_proj lacks a row", put(fused, lambda scale: scale[:-1])
        yield f"{leaf} has a row too many", put(name, lambda scale: torch.cat([scale, scale[-1:]]))
        yield (
            f"{leaf} of q_proj has a row too many",
            put(fused, lambda scale: torch.cat([scale, scale[-1:]])),
        )
        yield (
            f"{leaf} has a column too many",
            put(name, lambda scale: torch.cat([scale, scale[:, -1:]], 1)),
        )
        yield f"{leaf} for every other column", put(name, lambda scale: scale[:, HALF])


def _weight(sound: Sound) -> Iterator[tuple[str, Change]]:
    weight = sound.leaves[0]
    name, fused = f"{sound.mlp('down')}.{weight}", f"{sound.attention('q')}.{weight}"
    for dtype in (torch.int64, torch.bfloat16, torch.float32):
        yield f"{weight} as {_dtype_name(dtype)}", put(name, _cast_to(dtype))
    yield f"{weight} as float8_e5m2", put(name, lambda value: value.float().to(torch.float8_e5m2))
    yield f"{weight}'s bits as uint8", put(name, lambda value: value.view(torch.uint8))
    yield f"{weight}'s bits as int8", put(name, lambda value: value.view(torch.int8))
    yield f"{weight} transposed", put(name, lambda value: value.T)
    yield f"{weight} of q_proj transposed", put(fused, lambda value: value.T)
    yield f"{weight} flat", put(name, lambda value: value.reshape(-1))
    yield f"{weight} lacks a row", put(name, lambda value: value[:-1])
    yield f"{weight} of q_proj lacks a row", put(fused, lambda value: value[:-1])
    yield f"{weight} has a row too many", put(name, lambda value: torch.cat([value, value[-1:]]))
    yield (
        f"{weight} of q_proj has a row too many",
        put(fused, lambda value: torch.cat([value, value[-1:]])),
    )
    yield f"{weight} lacks half its columns", put(name, lambda value: value.chunk(2, 1)[0])
    yield f"{weight} has its columns twice", put(name, lambda value: torch.cat([value, value], 1))
    yield (
        f"{weight} of q_proj lacks half its columns",
        put(fused, lambda value: value.chunk(2, 1)[0]),
    )
    yield f"{weight} of q_proj lacks half its rows", put(fused, lambda value: value.chunk(2)[0])
    whole = [leaf for leaf in sound.leaves if leaf not in SINGLE and leaf != "weight_shape"]
    if sound.scheme != "FP8":
        yield "half of q_proj's rows", _halved(sound.attention("q"), whole)
        yield "half of down_proj's rows", _halved(sound.mlp("down"), whole)


def _zero_points(sound: Sound) -> Iterator[tuple[str, Change]]:
    if "weight_zero_point" in sound.leaves:
        name = f"{sound.mlp('down')}.weight_zero_point"
        yield "zero points transposed", put(name, lambda value: value.T)
        yield "zero points unpacked", put(name, lambda value: value.repeat(8, 1).to(torch.int8))
        yield "zero points lack a row", put(name, lambda value: value[:-1])
        yield "zero points as int64", put(name, _cast_to(torch.int64))
    if "weight_shape" in sound.leaves:
        name = f"{sound.mlp('down')}.weight_shape"
        yield "weight_shape wrong", put(name, lambda value: value * 2)
        yield "weight_shape turned", put(name, lambda value: value.flip(0))
        yield "weight_shape as int32", put(name, lambda value: value.to(torch.int32))
        yield "weight_shape of three", put(name, lambda value: torch.cat([value, value[:1]]))


def _unquantized() -> Iterator[tuple[str, Change]]:
    norm, table = "model.norm.weight", "model.embed_tokens.weight"
    yield "final norm as float32", put(norm, _cast_to(torch.float32))
    yield "final norm as float16", put(norm, _cast_to(torch.float16))
    yield "final norm as int8", put(norm, _cast_to(torch.int8))
    yield "final norm lacks an element", put(norm, lambda value: value[:-1])
    yield "final norm of two dimensions", put(norm, lambda value: value.reshape(1, -1))
    yield "embeddings as float16", put(table, _cast_to(torch.float16))
    yield "embeddings lack a row", put(table, lambda value: value[:-1])
    yield "embeddings lack a column", put(table, lambda value: value[:, :-1])
    yield "embeddings transposed", put(table, lambda value: value.T)


def _halved(module: str, leaves: list[str]) -> Change:
    def apply(values: Tensors) -> None:
        for name in (f"{module}.{leaf}" for leaf in leaves):
            values[name] = values[name][: max(values[name].shape[0] // 2, 1)].clone()

    return tensors(apply)


def _cast_to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: value.to(torch.float64).to(dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
