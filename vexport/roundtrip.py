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
from vexport.checkpoint.reader import Reader, same_bytes
from vexport.checkpoint.tensors import read_tensor, read_weight
from vexport.numerics.constants import INT32_BITS
from vexport.numerics.metrics import NONE, noise_of
from vexport.schemes import get_scheme
from vexport.schemes.base import QuantArgs, SchemeArgs
from vexport.types import Finding, FusionGroup, LayerError, LinearPlan, Plan

CHECK = "roundtrip"
# Elements that are dequantized at once.
RUN_ELEMENTS = 1 << 22
# Rows of whole blocks of 128 and of whole words of packed zero points of any width.
WHOLE_ROWS = 128
# So many values of any width fill whole words.
VALUES_OF_WHOLE_WORDS = INT32_BITS
WORD_MASK = (1 << INT32_BITS) - 1


def layer_errors(
    source: SourceIndex,
    written: SourceIndex,
    plan: Plan,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[LayerError, ...]:
    """Signal-to-noise of every quantized weight against the source's, in plan order, a few rows at a time."""
    total = sum(len(group.members) for group in plan.groups)
    errors: list[LayerError] = []
    with Reader() as old, Reader() as new:
        for group in plan.groups:
            for member in group.members:
                found = _layer_error(source, written, group, member, old, new)
                errors.append(LayerError(name=member.name, scheme=group.scheme, snr_db=found))
                on_layer(len(errors), total)
    return tuple(errors)


def _layer_error(
    source: SourceIndex,
    written: SourceIndex,
    group: FusionGroup,
    member: LinearPlan,
    old: Reader,
    new: Reader,
) -> float:
    """In dB. The pages that were read are given back."""
    scheme, tensor = get_scheme(group.scheme), source.tensors[member.weight]
    weight = read_weight(old, tensor, member.part)
    tensors = [written.tensors[spec.name] for spec in scheme.layout(member, tensor.dtype)]
    stored = {one.name.rpartition(".")[2]: read_tensor(new, one) for one in tensors}
    found = NONE
    for rows in row_runs(member.out_features, member.in_features):
        back = dequantize(scheme.name, rows_of(stored, scheme.args.weights, rows))
        found += noise_of(weight[rows], back)
    old.release([tensor])
    new.release(tensors)
    return found.decibels


def row_runs(out_features: int, in_features: int) -> Iterator[slice]:
    """Rows that are compared at once: whole blocks, and whole words of packed zero points."""
    rows = max(1, RUN_ELEMENTS // max(1, in_features) // WHOLE_ROWS) * WHOLE_ROWS
    for start in range(0, out_features, rows):
        yield slice(start, min(start + rows, out_features))


def rows_of(stored: Mapping[str, torch.Tensor], args: QuantArgs, rows: slice) -> dict[str, torch.Tensor]:
    """The stored tensors of some rows of a layer; `rows` begins at a multiple of `WHOLE_ROWS`."""
    high = args.block_structure[0] if args.strategy == "block" and args.block_structure else 1
    per_word = INT32_BITS / args.num_bits

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "weight_shape":
            return torch.tensor([rows.stop - rows.start, int(tensor[1])])
        if tensor.numel() == 1 and name not in ("weight", "weight_packed"):
            return tensor
        step = {"weight_scale": high, "weight_zero_point": per_word}.get(name, 1)
        return tensor[int(rows.start / step) : math.ceil(rows.stop / step)]

    return {name: cut(name, tensor) for name, tensor in stored.items()}


def dequantize(scheme_name: str, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight that compressed-tensors makes of a layer's stored tensors."""
    return decompress(ct_scheme(scheme_name), get_scheme(scheme_name).family.format, stored)


def decompress(scheme: QuantizationScheme, format_: str, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The same for any producer's checkpoint: a config group's arguments and its format."""
    args = scheme.weights
    assert args is not None
    weight: torch.Tensor
    if "weight_packed" in stored and INT32_BITS % args.num_bits:
        weight = ct_dequantize(_unpacked(stored, args.num_bits), stored["weight_scale"], args=args)
    elif args.strategy == "block":
        # Its decompression guesses the blocks from the shapes, which fails where they are ragged.
        weight = ct_dequantize(stored["weight"], stored["weight_scale"], args=args)
    else:
        compressor = BaseCompressor.get_value_from_registry(format_)
        weight = compressor.decompress(dict(stored), scheme)["weight"]
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


def changed_tensors(source: SourceIndex, written: SourceIndex, plan: Plan) -> Iterator[Finding]:
    """An error finding for every kept tensor whose bytes are not those of the source."""
    with Reader() as old, Reader() as new:
        for name in plan.kept:
            tensor, copy = source.tensors[name], written.tensors.get(name)
            if copy is None or not same_bytes(old, tensor, new, copy):
                yield Finding(
                    check=CHECK,
                    severity="error",
                    where=name,
                    expected="the bytes of the source",
                    got="no such tensor" if copy is None else "other bytes",
                    fix="export the checkpoint again",
                )


def unpack_int32(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The (rows, columns) unsigned int64 values of `bits` bits that are packed into int32 words of each row.

    Value i takes the bits from i*bits on, low bits first, also across the border of two words.
    """
    unsigned = packed.to(torch.int64) & WORD_MASK
    padded = torch.nn.functional.pad(unsigned, (0, -packed.shape[1] % bits))
    runs = padded.reshape(packed.shape[0], -1, bits)
    values = torch.empty(*runs.shape[:2], VALUES_OF_WHOLE_WORDS, dtype=torch.int64, device=packed.device)
    for position in range(VALUES_OF_WHOLE_WORDS):
        word, offset = divmod(position * bits, INT32_BITS)
        value = runs[..., word] >> offset
        if offset + bits > INT32_BITS:
            value = value | (runs[..., word + 1] << (INT32_BITS - offset))
        values[..., position] = value & ((1 << bits) - 1)
    return values.reshape(packed.shape[0], -1)[:, :columns]
