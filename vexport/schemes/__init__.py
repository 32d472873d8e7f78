"""The quantization schemes: compressed-tensors' presets, each with the family that lays out its tensors.

Adding a scheme family is one new file and one line in `FAMILIES`.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from pydantic import TypeAdapter

from vexport.errors import InputError, nearest
from vexport.schemes import fp8, integer, mxfp, nvfp4
from vexport.schemes.base import Family, PresetFile, Scheme

KEEP = "keep"
FAMILIES: Mapping[str, Family] = {
    "NVFP4": nvfp4.FAMILY,
    "NVFP4A16": nvfp4.A16_FAMILY,
    "MXFP4": mxfp.MXFP4_FAMILY,
    "MXFP4A16": mxfp.MXFP4_FAMILY,
    "MXFP8": mxfp.MXFP8_FAMILY,
    "MXFP8A16": mxfp.MXFP8_FAMILY,
    "FP8": fp8.STATIC_FAMILY,
    "FP8_DYNAMIC": fp8.FAMILY,
    "FP8_BLOCK": fp8.BLOCK_FAMILY,
    "W8A8": integer.W8A8_FAMILY,
    "INT8": integer.W8A8_FAMILY,
    "W4A8": integer.W4A8_FAMILY,
    "W4AFP8": integer.W4AFP8_FAMILY,
    "W4A16": integer.WNA16_FAMILY,
    "W4A16_ASYM": integer.WNA16_FAMILY,
    "W8A16": integer.W8A16_FAMILY,
    "W2A16": integer.HUMMING_FAMILY,
    "W3A16": integer.HUMMING_FAMILY,
    "W5A16": integer.HUMMING_FAMILY,
    "W6A16": integer.HUMMING_FAMILY,
    "W7A16": integer.HUMMING_FAMILY,
}


@cache
def presets() -> PresetFile:
    """The presets of the pinned compressed-tensors, as generated."""
    text = files("vexport.schemes").joinpath("presets.json").read_text(encoding="utf-8")
    return TypeAdapter(PresetFile).validate_json(text)


def fold_name(name: str) -> str:
    """A name without case and separators: `fp8-dynamic` and `FP8_DYNAMIC` are one."""
    return re.sub(r"[-_ ]", "", name).casefold()


def scheme_name(text: str) -> str:
    """The scheme that `text` names, whatever its case and separators; the text itself where it is none."""
    return next((name for name in FAMILIES if fold_name(name) == fold_name(text)), text)


@cache
def get_scheme(name: str) -> Scheme:
    """The scheme of that name; InputError lists what is known."""
    if name not in FAMILIES:
        raise InputError(
            f"scheme {name!r}",
            got="an unknown name",
            need=f"one of {', '.join(FAMILIES)}",
            fix=f"see `vexport list schemes`{nearest(name, list(FAMILIES))}",
        )
    return Scheme(name=name, args=presets().presets[name], family=FAMILIES[name])


def all_schemes() -> tuple[Scheme, ...]:
    """Every scheme that vexport quantizes to."""
    return tuple(get_scheme(name) for name in FAMILIES)
