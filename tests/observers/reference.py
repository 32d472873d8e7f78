"""The numerics of llm-compressor 0.14.0.1 on the CPU, to the bit: in the dtype of the observed tensor.

Sources: llmcompressor/observers/{mse_quant,imatrix}.py and, in compressed_tensors/quantization,
utils/helpers.py (calculate_qparams, generate_gparam), utils/mxfp_utils.py and lifecycle/forward_helpers.py.
"""

import torch

from vexport.numerics.constants import E4M3_EPS, GLOBAL_SCALE_NUMERATOR
from vexport.observers.flatten import flatten_for_calibration
from vexport.observers.qparams import (
    ObserverArgs,
    is_float,
    is_mx,
    mx_scale,
    plain,
    quantized_range,
    round_to_format,
    strategy_of,
)
from vexport.observers.search import Search, search_of
from vexport.records.observer_names import OBSERVERS, ImportanceOptions, SearchOptions

Range = tuple[torch.Tensor, torch.Tensor]


def range_of_weight(
    name: str, weight: torch.Tensor, args: ObserverArgs, importance: torch.Tensor | None = None
) -> Range:
    """What the peer's observer of that name takes for the range of a weight, with its own defaults.

    `importance` (columns,) is the mean square of each column.
    """
    observations, options = flatten_for_calibration(weight, "weight", args), OBSERVERS[name].options
    if not isinstance(options, SearchOptions):
        return range_of_observations(observations)
    steps = int(options.maxshrink * options.grid)
    if not isinstance(options, ImportanceOptions):
        return grid_search(observations, args, search_of(options, steps), None, float32_error=False)
    if importance is not None:
        row = importance.float() / (importance.float().mean() + torch.finfo(torch.float32).tiny)
        importance = flatten_for_calibration(row.unsqueeze(0), "weight", args)
    search = search_of(options, max(1, steps) + 1)
    return grid_search(observations, args, search, importance, float32_error=True)


def qparams_of_weight(low: torch.Tensor, high: torch.Tensor, args: ObserverArgs) -> dict[str, torch.Tensor]:
    """Scale, zero point and, for strategy tensor_group, global scale of one weight's ranges."""
    shared = global_scale_of(low, high) if strategy_of(args) == "tensor_group" else None
    scale, zero_point = scale_and_zero_point(low, high, args, shared, dtype_named(args.scale_dtype))
    found = {"scale": scale, "zero_point": zero_point}
    return found if shared is None else {**found, "global_scale": shared}


def range_of_observations(observations: torch.Tensor) -> Range:
    """Minimum and maximum of each group in the observations' dtype."""
    return observations.amin((0, -1)), observations.amax((0, -1))


def global_scale_of(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """448 * 6 / absmax, divided in the ranges' dtype: float32, shape (1,)."""
    absmax = torch.maximum(high.amax(), -low.amin()).clamp(min=0).reshape(1)
    absmax = absmax.clamp(min=torch.finfo(absmax.dtype).tiny)
    scale = torch.nan_to_num(GLOBAL_SCALE_NUMERATOR / absmax, nan=1.0, posinf=1.0, neginf=1.0)
    return scale.to(torch.float32)


def scale_and_zero_point(
    low: torch.Tensor,
    high: torch.Tensor,
    args: ObserverArgs,
    global_scale: torch.Tensor | None,
    scale_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in the ranges' dtype (float32 with a global scale), zero points in `zero_point_dtype`."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    smallest, largest = (torch.tensor(end) for end in quantized_range(args))
    if args.symmetric:
        absmax = torch.maximum(low.abs(), high.abs())
        scale = absmax / ((largest - smallest).to(absmax.dtype) / 2)
        zero_point = torch.zeros(scale.shape, dtype=low.dtype)
        if is_mx(args):
            scale = (
                mx_scale(absmax, args.num_bits).to(absmax.dtype).masked_fill(~absmax.isfinite(), torch.inf)
            )
    else:
        scale = (high - low) / (largest - smallest).to(high.dtype)
        zero_point = torch.clamp(smallest - (low / scale), smallest, largest)
    if global_scale is not None:
        scale = global_scale * scale
    if scale_dtype is not None and not is_mx(args):
        scale = _round_to_dtype(scale, scale_dtype).to(scale.dtype)
    scale = torch.where(scale == 0, torch.tensor(_eps(scale_dtype or scale.dtype), dtype=scale.dtype), scale)
    zero_point = _round_to_dtype(zero_point, zero_point_dtype(args))
    return (scale.reshape(1), zero_point.reshape(1)) if scale.ndim == 0 else (scale, zero_point)


def grid_search(
    observations: torch.Tensor,
    args: ObserverArgs,
    search: Search,
    importance: torch.Tensor | None,
    *,
    float32_error: bool,
) -> Range:
    """The best range of each group in the observations' dtype.

    `float32_error` is the peer's imatrix: error and importance in float32; else errors are summed in the
    observations' dtype. Block scales of strategy tensor_group are not rounded while it searches.
    """
    scale_dtype = None if plain(args.strategy) == "tensor_group" else dtype_named(args.scale_dtype)
    low, high = (end * search.expand for end in range_of_observations(observations))
    error_dtype = torch.float32 if float32_error else observations.dtype
    target = observations.to(error_dtype)
    best_low, best_high, stale = low.clone(), high.clone(), 0
    least = torch.full(low.shape, torch.finfo(error_dtype).max, dtype=error_dtype)
    for factor in search.factors:
        smaller, larger = low * factor, high * factor
        scale, zero_point = scale_and_zero_point(smaller, larger, args, None, scale_dtype)
        dequantized = fake_quantize(observations, scale.unsqueeze(-1), zero_point.unsqueeze(-1), args)
        error = (dequantized.to(error_dtype) - target).abs().pow(search.norm)
        total = (error if importance is None else error.mul_(importance)).sum((0, -1))
        better = total < least
        stale = 0 if bool(better.any()) else stale + 1
        least, best_low = torch.where(better, total, least), torch.where(better, smaller, best_low)
        best_high = torch.where(better, larger, best_high)
        if search.patience and stale >= search.patience:
            break
    return best_low, best_high


def fake_quantize(
    value: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, args: ObserverArgs
) -> torch.Tensor:
    """Quantize in the value's dtype and dequantize in the scale's."""
    scaled = value / scale
    scaled += zero_point.to(value.dtype)
    dequantized = round_to_format(scaled, args).to(scale.dtype) - zero_point.to(scale.dtype)
    return dequantized * scale


def dtype_named(name: object) -> torch.dtype | None:
    """The dtype of quantization arguments, given as a dtype, as text or not at all."""
    if name is None or isinstance(name, torch.dtype):
        return name
    dtype = getattr(torch, plain(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: got {name!r}, need the name of a torch dtype")
    return dtype


def zero_point_dtype(args: ObserverArgs) -> torch.dtype:
    """The dtype of zero points: what the arguments say, else that of the quantized values."""
    given = dtype_named(args.zp_dtype)
    return given or (torch.float8_e4m3fn if is_float(args) else torch.int8)


def _round_to_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        return value.clamp(limits.min, limits.max).to(dtype)
    whole = torch.iinfo(dtype)
    return torch.round(value.clamp(whole.min, whole.max)).to(dtype)


def _eps(dtype: torch.dtype) -> float:
    if dtype == torch.float8_e4m3fn:
        return E4M3_EPS
    return torch.finfo(dtype).eps if dtype.is_floating_point else 1.0
