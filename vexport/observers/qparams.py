"""Read the quantization arguments of observers, and compute float32 scales from ranges.

Observers accept vexport's `QuantArgs` and compressed-tensors' `QuantizationArgs`. Symmetric scales
are absmax / (range / 2): FP4 /6, FP8 /448, INT4 /7.5, INT8 /127.5 (calculate_qparams in
compressed_tensors/quantization/utils/helpers.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
from pydantic import BaseModel

from vexport.numerics import (
    E2M1_MAX,
    E4M3_EPS,
    E4M3_MAX,
    FLOAT32_EPS,
    arithmetic,
)
from vexport.numerics.tensors import E2M1, E4M3, mx_scale, round_to
from vexport.records.observer_names import OptionValue

MX_FORMATS = {4: E2M1, 8: E4M3}
# 16-bit dtypes of stored scales. Scales with another `scale_dtype` are stored as float32, except
# for NVFP4 (e4m3) and MX (e8m0).
SCALE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class ObserverArgs(Protocol):
    """Subset of compressed-tensors' `QuantizationArgs` that statistics and scales depend on."""

    @property
    def num_bits(self) -> int: ...
    @property
    def type(self) -> str: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def strategy(self) -> str | None: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def block_structure(self) -> "tuple[int, int] | list[int] | None": ...
    @property
    def dynamic(self) -> bool | str: ...
    @property
    def scale_dtype(self) -> object: ...
    @property
    def observer_kwargs(self) -> Mapping[str, OptionValue]: ...


ArgsT = TypeVar("ArgsT", bound=ObserverArgs)


def with_keywords(args: ArgsT, keywords: Mapping[str, OptionValue]) -> ArgsT:
    """Return a copy of the arguments with the observer keywords updated; `args` is not changed."""
    if not keywords:
        return args
    merged = {**(args.observer_kwargs or {}), **keywords}
    if isinstance(args, BaseModel):
        return cast(ArgsT, args.model_copy(update={"observer_kwargs": merged}))
    return replace(args, observer_kwargs=merged)  # type: ignore[type-var]


def enum_value(value: object) -> str:
    """Return the text of an enum's value or of a dtype: "tensor_group", "float8_e4m3fn"."""
    return str(getattr(value, "value", value)).removeprefix("torch.")


def strategy_of(args: ObserverArgs) -> str:
    """Return the strategy of the scales, by its compressed-tensors name."""
    return enum_value(args.strategy)


def is_float(args: ObserverArgs) -> bool:
    """Return True for floating-point values (e2m1 or e4m3), False for integers."""
    return enum_value(args.type) == "float"


def is_nvfp4(args: ObserverArgs) -> bool:
    """Return True for e2m1 values with e4m3 block scales relative to a global scale."""
    return strategy_of(args) == "tensor_group" and is_float(args) and args.num_bits == 4


def is_mx(args: ObserverArgs) -> bool:
    """Return True if scales are powers of two stored as exponents (e8m0): MXFP4 and MXFP8.

    Source: should_generate_mx_scales in compressed_tensors/quantization/utils/mxfp_utils.py.
    """
    return (
        args.num_bits in (4, 8)
        and is_float(args)
        and args.group_size == 32
        and enum_value(args.scale_dtype) == "uint8"
    )


def quantized_range(args: ObserverArgs) -> tuple[float, float]:
    """Return the smallest and the largest representable value.

    Raises ValueError for floating-point values that have neither 4 nor 8 bits.
    """
    if not is_float(args):
        return -(2.0 ** (args.num_bits - 1)), 2.0 ** (args.num_bits - 1) - 1
    largest = {4: E2M1_MAX, 8: E4M3_MAX}.get(args.num_bits)
    if largest is None:
        raise ValueError(f"float with {args.num_bits} bits: need 4 (e2m1) or 8 (e4m3)")
    return -largest, largest


def stored_dtype(args: ObserverArgs) -> torch.dtype:
    """Return the dtype of stored scales: `scale_dtype` if it is a 16-bit float, else float32."""
    return SCALE_DTYPES.get(enum_value(args.scale_dtype), torch.float32)


def global_scale_of(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the global scale for ranges [low, high]: float32, shape (1,).

    It is computed from the largest magnitude of all ranges.
    """
    absmax = torch.maximum(low.abs().amax(), high.abs().amax()).to(torch.float32)
    return torch.from_numpy(arithmetic.global_scale_of(np.float32(float(absmax)))).to(low.device)


def scale_and_zero_point(
    low: torch.Tensor, high: torch.Tensor, args: ObserverArgs, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales (float32, shape of `low`) and zero points (int32) for the ranges [low, high].

    With a global scale, block scales are relative to it and rounded to e4m3, as NVFP4 stores them.
    MX scales are powers of two. Other scales are rounded to `stored_dtype`. Zero points are
    computed from the rounded scale.
    """
    low = torch.minimum(low.to(torch.float32), torch.zeros((), device=low.device))
    high = torch.maximum(high.to(torch.float32), torch.zeros((), device=high.device))
    smallest, largest = quantized_range(args)
    if is_mx(args):
        scale = mx_scale(torch.maximum(low.abs(), high.abs()), MX_FORMATS[args.num_bits])
    elif args.symmetric:
        scale = torch.maximum(low.abs(), high.abs()) / ((largest - smallest) / 2)
    else:
        scale = (high - low) / (largest - smallest)
    if global_scale is not None:
        # Not every device has float8 dtypes.
        scale = round_to(scale * global_scale, E4M3)
    elif not is_mx(args):
        scale = scale.to(stored_dtype(args)).to(torch.float32)
    scale = torch.where(scale == 0, E4M3_EPS if global_scale is not None else FLOAT32_EPS, scale)
    if args.symmetric:
        return scale, torch.zeros(scale.shape, dtype=torch.int32, device=scale.device)
    zero_point = (smallest - low / scale).round().clamp(smallest, largest)
    return scale, zero_point.to(torch.int32)


def round_to_format(scaled: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    """Round each element to the nearest representable value, in the same dtype.

    Values outside of the range saturate.
    """
    smallest, largest = quantized_range(args)
    if is_float(args) and args.num_bits == 4:
        return round_to(scaled.to(torch.float32), E2M1).to(scaled.dtype)
    clamped = scaled.clamp(smallest, largest)
    if not is_float(args):
        return clamped.round_()
    return clamped.to(torch.float8_e4m3fn).to(scaled.dtype)


def fake_quantize(
    value: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, args: ObserverArgs
) -> torch.Tensor:
    """Quantize and dequantize `value`.

    `scale` and `zero_point` broadcast to `value`. All three have the same float dtype. The
    operations have the same order as in _quantize_dequantize in
    compressed_tensors/quantization/lifecycle/forward_helpers.py.
    """
    if args.symmetric:
        return round_to_format(value / scale, args).mul_(scale)
    return round_to_format((value / scale).add_(zero_point), args).sub_(zero_point).mul_(scale)
