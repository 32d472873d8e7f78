"""Reads a written checkpoint back with compressed-tensors' own code and measures what was lost."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from pydantic import TypeAdapter

from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_tensor
from vexport.compress.integer import unpack_int32
from vexport.schemes import get_scheme
from vexport.schemes.base import SchemeArgs
from vexport.schemes.integer import INT32_BITS
from vexport.types import Finding, LayerError, Plan

CHECK = "roundtrip"
# A layer that came back exactly has no noise; the report needs a finite number.
EXACT_DB = 200.0


def layer_errors(
    source: SourceIndex,
    written: SourceIndex,
    plan: Plan,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[LayerError, ...]:
    """Signal-to-noise of every quantized weight against the source's, in plan order."""
    total = sum(len(group.members) for group in plan.groups)
    errors: list[LayerError] = []
    with Reader() as old, Reader() as new:
        for group in plan.groups:
            for member in group.members:
                weight = read_tensor(old, source.tensors[member.weight])
                stored = stored_tensors(written, member.name, new)
                noise = signal_to_noise(weight, dequantize(group.scheme, stored))
                errors.append(LayerError(name=member.name, scheme=group.scheme, snr_db=round(noise, 3)))
                on_layer(len(errors), total)
    return tuple(errors)


def stored_tensors(index: SourceIndex, module: str, reader: Reader) -> dict[str, torch.Tensor]:
    """The tensors of a module by their name within it."""
    prefix = f"{module}."
    return {
        name.removeprefix(prefix): read_tensor(reader, tensor)
        for name, tensor in index.tensors.items()
        if name.startswith(prefix) and name != f"{prefix}bias"
    }


def dequantize(scheme_name: str, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight that compressed-tensors makes of a layer's stored tensors."""
    return decompress(ct_scheme(scheme_name), get_scheme(scheme_name).family.format, stored)


def decompress(scheme: QuantizationScheme, format_: str, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The same for any producer's checkpoint: a config group's arguments and its format."""
    weights = scheme.weights
    assert weights is not None
    if "weight_packed" in stored and INT32_BITS % weights.num_bits:
        return ct_dequantize(_unpacked(stored, weights.num_bits), stored["weight_scale"], args=weights)
    if weights.strategy == "block":
        # Its decompression guesses the blocks from the shapes, which fails where they are ragged.
        return ct_dequantize(stored["weight"], stored["weight_scale"], args=weights)
    compressor = BaseCompressor.get_value_from_registry(format_)
    weight: torch.Tensor = compressor.decompress(dict(stored), scheme)["weight"]
    return weight


@cache
def ct_scheme(name: str) -> QuantizationScheme:
    """A scheme as compressed-tensors' own model."""
    args = TypeAdapter(SchemeArgs).dump_python(get_scheme(name).args, mode="json")
    return QuantizationScheme(targets=["Linear"], **args)


def _unpacked(stored: Mapping[str, torch.Tensor], bits: int) -> torch.Tensor:
    """Widths that cross the borders of words, which the pinned compressed-tensors cannot unpack."""
    columns = int(stored["weight_shape"][1])
    return unpack_int32(stored["weight_packed"], bits, columns) - (1 << (bits - 1))


def signal_to_noise(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """10 log10 of the power of `exact` over the power of the difference, in dB."""
    reference = exact.to(torch.float64)
    signal = float(reference.square().sum())
    noise = float((approximate.to(torch.float64) - reference).square().sum())
    if noise == 0 or signal == 0:
        return EXACT_DB if noise == 0 else -EXACT_DB
    return 10 * math.log10(signal / noise)


def changed_tensors(source: SourceIndex, written: SourceIndex, plan: Plan) -> Iterator[Finding]:
    """An error finding for every kept tensor whose bytes are not those of the source."""
    with Reader() as old, Reader() as new:
        for name in plan.kept:
            copy = written.tensors.get(name)
            if copy is None or bytes(old.raw(source.tensors[name])) != bytes(new.raw(copy)):
                yield Finding(
                    check=CHECK,
                    severity="error",
                    where=name,
                    expected="the bytes of the source",
                    got="no such tensor" if copy is None else "other bytes",
                    fix="export the checkpoint again",
                )
