"""Round the inputs of quantized layers as their schemes do, with scales from compressed-tensors.

compressed-tensors also rounds the values. Only e2m1 on a CPU is rounded by vexport's kernels,
because they are ten times as fast.

This module needs numba. vLLM's process imports `dequantize`, which is therefore a separate module:
vLLM's CPU build fails at startup if numba is imported.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import (
    calculate_range,
    compute_dynamic_scales_and_zp,
    helpers,
)
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary

from vexport.numerics.arithmetic import round_values
from vexport.numerics.number_formats import E2M1

Tensors = Mapping[str, torch.Tensor]


class InputRounding:
    """Rounds the input that the layers of a fusion group share.

    The rounded input is cached as long as another object references the input.
    """

    def __init__(self, args: QuantizationArgs, scales: Tensors) -> None:
        self._args = args
        self._scales = scales
        self._rounded = WeakTensorKeyDictionary()

    def rounded(self, value: torch.Tensor, module: Module) -> torch.Tensor:
        """Return the rounded value, as `round_activations` does, from the cache if possible."""
        if value not in self._rounded:
            self._rounded[value] = round_activations(value, self._args, self._scales, module)
        rounded: torch.Tensor = self._rounded[value]
        return rounded

    def hook(self, module: Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Forward pre-hook of a layer that quantizes and dequantizes its input."""
        value, *others = inputs
        return (self.rounded(value, module), *others)


def round_activations(
    value: torch.Tensor, args: QuantizationArgs, scales: Tensors, module: Module
) -> torch.Tensor:
    """Quantize and dequantize `value` (..., features) in float32; return it in its original dtype.

    `scales` contains `input_scale` for static quantization and `input_global_scale` for NVFP4's
    two-level quantization.
    """
    # compressed-tensors computes a scale per token only for (batch, tokens, features).
    exact = value.to(torch.float32).reshape(1, -1, value.shape[-1])
    global_scale = scales.get("input_global_scale")
    if args.dynamic in (True, "local"):
        with _range_as_numbers():
            scale, zero_point = compute_dynamic_scales_and_zp(
                exact, args, module, global_scale=global_scale
            )
    else:
        scale, zero_point = scales["input_scale"].to(torch.float32), scales.get("input_zero_point")
    if (args.type, args.num_bits, exact.device.type) == ("float", 4, "cpu"):
        rounded = _rounded_to_e2m1(exact, scale if global_scale is None else scale / global_scale)
    else:
        rounded = fake_quantize(exact, scale, zero_point, args, global_scale=global_scale)
    return rounded.reshape(value.shape).to(value.dtype)


@contextmanager
def _range_as_numbers() -> Iterator[None]:
    """Let compressed-tensors compute scales with numbers for the ends of a format's range.

    It computes the ends as tensors on the device, and reads them. The host would wait for a GPU.
    """
    before = helpers.calculate_range
    helpers.calculate_range = _range_of
    try:
        yield
    finally:
        helpers.calculate_range = before


def _range_of(args: QuantizationArgs, device: torch.device) -> tuple[float, float]:
    return _ends(args.type, args.num_bits)


@cache
def _ends(kind: str, bits: int) -> tuple[float, float]:
    low, high = calculate_range(QuantizationArgs(type=kind, num_bits=bits), "cpu")
    return float(low), float(high)


def _rounded_to_e2m1(exact: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Fake-quantize values (1, tokens, features) with scales (1, tokens, groups)."""
    scales = scale.to(torch.float32).unsqueeze(-1)
    scaled = exact.reshape(*scale.shape, -1) / scales
    round_values(scaled.numpy().reshape(-1), E2M1)
    return scaled.mul_(scales).reshape(exact.shape)
