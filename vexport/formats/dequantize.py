"""Dequantize stored tensors with compressed-tensors, to check packings independently."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from pydantic import TypeAdapter

from vexport.formats.arguments import Arguments, QuantArgs, SchemeArgs, arguments_adapter
from vexport.numerics import INT32_BITS

# Elements dequantized at a time.
CHUNK_ELEMENTS = 1 << 22
# A run of this many rows contains complete blocks of 128, and complete words of zero points of any
# width.
WHOLE_ROWS = 128
WORD_MASK = (1 << INT32_BITS) - 1


def decompress(name: str, args: Arguments, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decompress stored tensors to a weight with compressed-tensors' compressor `name`."""
    compressor = BaseCompressor.get_value_from_registry(name)
    weight: torch.Tensor = compressor.decompress(dict(stored), ct_scheme(args))["weight"]
    return weight


def scaled(
    codes: torch.Tensor,
    args: Arguments,
    stored: Mapping[str, torch.Tensor],
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize codes with their scales and `zeros` (out, groups)."""
    weight: torch.Tensor = ct_dequantize(
        codes, stored["weight_scale"], zero_point=zeros, args=ct_scheme(args).weights
    )
    return weight


def ct_scheme(args: Arguments) -> QuantizationScheme:
    """Convert arguments to compressed-tensors' QuantizationScheme."""
    inputs = args.input_activations
    return _ct_scheme(_dumped(args.weights), _dumped(inputs) if inputs else None)


def arguments_of(scheme: QuantizationScheme) -> SchemeArgs:
    """Convert a QuantizationScheme that quantizes weights to arguments."""
    sides = scheme.model_dump(mode="json", include={"weights", "input_activations"})
    return TypeAdapter(SchemeArgs).validate_python(sides)


def _dumped(args: QuantArgs) -> str:
    return arguments_adapter().dump_json(args).decode()


@cache
def _ct_scheme(weights: str, inputs: str | None) -> QuantizationScheme:
    with ignore_group_warning():
        return QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs.model_validate_json(weights),
            input_activations=QuantizationArgs.model_validate_json(inputs) if inputs else None,
        )


@contextmanager
def ignore_group_warning() -> Iterator[None]:
    """Silence compressed-tensors' warnings about configs that other checks judge.

    They are about inputs and weights with different groups, and about an observer of dynamic
    inputs. From 0.20 on, compressed-tensors does not warn if weights and inputs have different
    bits, as in some of its presets.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message="Using GROUP strategy for both|No observer is used for dynamic",
            category=UserWarning,
        )
        yield


def row_chunks(out_features: int, in_features: int) -> Iterator[slice]:
    """Yield slices of rows to dequantize at a time.

    Each slice has complete blocks and complete words of packed zero points, except the last slice.
    """
    rows = max(1, CHUNK_ELEMENTS // max(1, in_features) // WHOLE_ROWS) * WHOLE_ROWS
    for start in range(0, out_features, rows):
        yield slice(start, min(start + rows, out_features))


def rows_of(
    stored: Mapping[str, torch.Tensor], args: QuantArgs, rows: slice
) -> dict[str, torch.Tensor]:
    """Return a layer's stored tensors for `rows`, which start at a multiple of `WHOLE_ROWS`."""
    rows_per_entry = {
        "weight_scale": args.block[0] if args.block else 1,
        "weight_zero_point": INT32_BITS / args.num_bits,
    }

    def take_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "weight_shape":
            return torch.tensor([rows.stop - rows.start, int(tensor[1])])
        if tensor.numel() == 1 and name not in ("weight", "weight_packed"):
            return tensor
        step = rows_per_entry.get(name, 1)
        return tensor[int(rows.start / step) : math.ceil(rows.stop / step)]

    return {name: take_rows(name, tensor) for name, tensor in stored.items()}


def unpack_int32(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Unpack the unsigned values in each row of int32 words, as int64 (rows, columns).

    Each value has `bits` bits. Value i starts at bit i*bits, low bits first, and may cross the
    border between two words.
    """
    unsigned = packed.to(torch.int64) & WORD_MASK
    padded = torch.nn.functional.pad(unsigned, (0, -packed.shape[1] % bits))
    runs = padded.reshape(packed.shape[0], -1, bits)
    # 32 values of any width fill complete words.
    values = torch.empty(*runs.shape[:2], INT32_BITS, dtype=torch.int64, device=packed.device)
    for position in range(INT32_BITS):
        word, offset = divmod(position * bits, INT32_BITS)
        value = runs[..., word] >> offset
        if offset + bits > INT32_BITS:
            value = value | (runs[..., word + 1] << (INT32_BITS - offset))
        values[..., position] = value & ((1 << bits) - 1)
    return values.reshape(packed.shape[0], -1)[:, :columns]
