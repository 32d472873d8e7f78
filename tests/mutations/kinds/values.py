"""Mutations with numbers that no export would write."""

from collections.abc import Iterator

import torch

from tests.mutations.edits import (
    Change,
    all_of,
    fill_with,
    inverse,
    multiply_by,
    put,
    set_first,
    swap_bytes,
)
from tests.mutations.good import Sound

SINGLE = frozenset({"weight_global_scale", "input_global_scale", "input_scale"})


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations of scales, codes and unquantized tensors."""
    for leaf in sound.leaves:
        if leaf.endswith("scale"):
            yield from _exponents(sound) if sound.scheme.startswith("MX") else _scale(sound, leaf)
    yield from _shared(sound)
    yield from _payload(sound)
    yield "final norm NaN", put("model.norm.weight", set_first(float("nan")))
    yield (
        "layer norm infinite",
        put("model.layers.0.input_layernorm.weight", set_first(float("inf"))),
    )
    yield "embeddings NaN", put("model.embed_tokens.weight", fill_with(float("nan")))
    yield "final norm zero", put("model.norm.weight", fill_with(0.0))


def _scale(sound: Sound, leaf: str) -> Iterator[tuple[str, Change]]:
    down, q = f"{sound.mlp('down')}.{leaf}", f"{sound.attention('q')}.{leaf}"
    one_byte = sound.scheme.startswith("NVFP4") and leaf not in SINGLE
    yield f"{leaf} of down_proj NaN", put(down, set_first(float("nan")))
    yield f"{leaf} of q_proj NaN", put(q, set_first(float("nan")))
    if not one_byte:
        yield f"{leaf} of down_proj infinite", put(down, set_first(float("inf")))
        yield f"{leaf} of down_proj denormal", put(down, fill_with(1e-39))
        yield f"{leaf} of down_proj byteswapped", put(down, _byteswapped)
    if (
        leaf != "input_global_scale"
    ):  # its sign cancels in the emulation, but maybe not in FP4 kernels
        yield f"{leaf} of down_proj negative", put(down, multiply_by(-1))
    yield f"{leaf} of down_proj all zero", put(down, fill_with(0.0))
    yield f"{leaf} of down_proj once zero", put(down, set_first(0.0))
    yield f"{leaf} of down_proj all one", put(down, fill_with(1.0))
    if leaf in SINGLE:
        fused = (f"{sound.attention(projection)}.{leaf}" for projection in ("q", "k", "v"))
        yield f"{leaf} of attention upside down", all_of(*(put(name, inverse) for name in fused))
    else:
        yield f"{leaf} of q_proj upside down", put(q, inverse)
    yield f"{leaf} of down_proj upside down", put(down, inverse)
    yield f"{leaf} of down_proj times 10000", put(down, multiply_by(1e4))


def _exponents(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations of scales that are exponents in a byte. 127 means a scale of 1."""
    down = f"{sound.mlp('down')}.weight_scale"
    yield "weight_scale of down_proj NaN", put(down, set_first(255))
    yield "weight_scale of down_proj all zero", put(down, fill_with(0))
    yield "weight_scale of down_proj all one", put(down, fill_with(127))
    yield "weight_scale of down_proj upside down", put(down, lambda scale: 254 - scale)
    yield "weight_scale of down_proj huge", put(down, fill_with(254))
    yield "weight_scale of down_proj without a bias", put(down, lambda scale: scale - 100)


def _shared(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations of scales that fused layers share.

    No scale is made smaller. vLLM uses the largest scale, and the result could be right.
    """
    for leaf in sorted(SINGLE & set(sound.leaves)):
        for projection in ("q", "k", "v"):
            name = f"{sound.attention(projection)}.{leaf}"
            yield (
                f"{leaf} of {projection}_proj larger than its neighbours'",
                put(name, lambda scale: scale * 1.5),
            )


def _payload(sound: Sound) -> Iterator[tuple[str, Change]]:
    weight, down = sound.leaves[0], sound.mlp("down")
    if weight == "weight" and sound.scheme != "W8A8":
        yield "weight of down_proj NaN", put(f"{down}.weight", set_first(float("nan")))
        yield (
            "weight of q_proj all NaN",
            put(f"{sound.attention('q')}.weight", fill_with(float("nan"))),
        )
    yield f"{weight} of down_proj all zero", put(f"{down}.{weight}", fill_with(0))
    if sound.scheme in ("NVFP4", "NVFP4A16", "MXFP4"):
        yield (
            "nibbles exchanged",
            put(f"{down}.{weight}", lambda codes: (codes << 4) | (codes >> 4)),
        )


def _byteswapped(scale: torch.Tensor) -> torch.Tensor:
    """Return a scale in the other byte order.

    It is rounded first, so that it is equal on all processors.
    """
    return swap_bytes(scale.bfloat16().to(scale.dtype))
