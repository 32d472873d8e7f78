"""Support observers that were written for llm-compressor's older documentation.

Older observers return scales instead of ranges. A subclass overrides `calculate_qparams` (or
another method in `SCALE_METHODS`), which receives parts of a tensor:

- strategy tensor: the whole tensor, `reduce_dims` None
- channel: the whole weight, `reduce_dims` (1,)
- group, tensor_group: the columns of a group, `tensor_id` the group's number, `reduce_dims` (1,)
  for weights and (0, 1) for activations
- block: a block of the weight, `reduce_dims` (0, 1), `tensor_id` (block row, block column)
- token, attn_head: the whole tensor, `reduce_dims` all dimensions except tokens or heads

vexport uses the returned scales, rounded as the format stores them. In addition, it computes the
range that yields these scales. Fused layers, statistics over ranks and input scales use this range.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import distributed

from vexport.numerics import E2M1_MAX, E4M3_MAX
from vexport.observers.base import ScalePair
from vexport.observers.flatten import WEIGHT, blocks_of
from vexport.observers.qparams import (
    ObserverArgs,
    is_nvfp4,
    quantized_range,
    stored_dtype,
    strategy_of,
)
from vexport.observers.search import Range

if TYPE_CHECKING:
    from vexport.observers.llmcompressor.observer import Observer

VEXPORT_PACKAGE = "vexport.observers"
# Tensor id of ranges that are observed without a `tensor_id`, as in llm-compressor.
DEFAULT_ID = "default"
# Methods that return scale and zero point, or the range for computing them.
SCALE_METHODS = (
    "calculate_qparams",
    "get_qparams_along_dim",
    "calculate_updated_min_max",
    "calculate_mse_min_max",
    "get_qparams",
)
# Methods that determine the global scale.
GLOBAL_SCALE_METHODS = ("calculate_gparam", "get_gparam")
# Methods of intermediate generations, which vexport never calls, and their replacements.
REPLACED_METHODS: Mapping[str, str] = {
    "get_min_max": "update_statistics_from_observed",
    "get_current_min_max": "update_statistics_from_observed",
    "get_global_min_max": "get_global_scale",
    "get_current_global_min_max": "get_global_scale",
}
NEWER_METHOD = "update_statistics_from_observed"
# Attribute in which llm-compressor's observers declare how ranks reduce their statistics.
SYNC_ATTRIBUTE = "_act_sync_dict"


def is_overridden(kind: type, name: str) -> bool:
    """Return True if a class outside vexport defines the method `name` of `kind`."""
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    if owner is None or owner.__module__.startswith(VEXPORT_PACKAGE):
        return False
    return owner.__module__ not in ("torch.nn.modules.module", "builtins")


def overridden_older_methods(kind: type) -> frozenset[str]:
    """Return the older methods that a class outside vexport overrides, including `forward`.

    An override of `get_qparams` counts as older if it takes the observed tensor.
    """
    names = {
        name
        for name in (*SCALE_METHODS, *GLOBAL_SCALE_METHODS, "forward")
        if is_overridden(kind, name)
    }
    newer = {
        name
        for name in names
        if name == "get_qparams" and not accepts(class_function(kind, name), "observed")
    }
    return frozenset(names - newer)


def class_function(kind: type, name: str) -> Callable[..., object]:
    """Return a class's function by name, also if a base class defines it."""
    found: Callable[..., object] = next(
        vars(each)[name] for each in kind.__mro__ if name in vars(each)
    )
    return found


def accepts(method: Callable[..., object], parameter: str) -> bool:
    """Return True if a method takes an argument of this name."""
    parameters = inspect.signature(method).parameters
    return parameter in parameters or any(
        each.kind is each.VAR_KEYWORD for each in parameters.values()
    )


def is_older_constructor(kind: type) -> bool:
    """Return True if a constructor takes `quantization_args` but no `base_name`."""
    parameters = inspect.signature(kind).parameters
    return "quantization_args" in parameters and "base_name" not in parameters


def declared_reductions(kind: type) -> Mapping[str, object] | None:
    """Return the reductions that a class declares in `_act_sync_dict`, or None if it declares none.

    As in llm-compressor, the dictionary maps names of attributes to operations of
    torch.distributed. If the dictionary is empty, no attribute is reduced.
    """
    if not is_overridden(kind, SYNC_ATTRIBUTE):
        return None
    declared: Mapping[str, object] = getattr(kind, SYNC_ATTRIBUTE)
    return declared


def as_cpu_tensor(value: object) -> torch.Tensor | None:
    """Return a statistic as a tensor that ranks can exchange, or None if this rank has no value."""
    return None if value is None else torch.as_tensor(value).cpu()


def reduce_values(values: Sequence[torch.Tensor], operation: object, name: str) -> torch.Tensor:
    """Reduce the ranks' values of a statistic, in its dtype.

    Raises:
        ValueError: If the operation is not MIN, MAX, SUM or AVG.
    """
    stacked = torch.stack(list(values))
    if operation == distributed.ReduceOp.MIN:
        return stacked.amin(0)
    if operation == distributed.ReduceOp.MAX:
        return stacked.amax(0)
    if operation == distributed.ReduceOp.SUM:
        return stacked.sum(0).to(stacked.dtype)
    if operation == distributed.ReduceOp.AVG:
        return stacked.to(torch.float64).mean(0).to(stacked.dtype)
    raise ValueError(
        f"{SYNC_ATTRIBUTE}: got {operation} for {name}, need ReduceOp.MIN, MAX, SUM or AVG"
    )


def convert_like(local: object, value: torch.Tensor) -> object:
    """Convert a reduced value to the local value's device, or to its type if it is a number."""
    if isinstance(local, torch.Tensor):
        return value.to(local.device)
    return value if local is None else type(local)(value.item())  # type: ignore[call-arg]


def require_used_overrides(kind: type) -> None:
    """Raise ValueError if a class overrides a method that is never called.

    If the class calls the method itself, the method is a helper, and its override is allowed.
    """
    older = overridden_older_methods(kind) - {"forward"}
    problems = [
        f"{name}: this method is not called any more; override {new} instead"
        for name, new in REPLACED_METHODS.items()
        if is_overridden(kind, name) and not _calls(kind, name)
    ]
    if is_overridden(kind, NEWER_METHOD):
        problems += [
            f"{name} and {NEWER_METHOD}: both decide the scales; keep {NEWER_METHOD}, or remove it"
            for name in sorted(older & set(SCALE_METHODS))
            if not _calls(kind, name)
        ]
    if problems:
        raise ValueError(f"observer {kind.__name__}: {'; '.join(problems)}")


def _calls(kind: type, name: str) -> bool:
    """Return True if a class outside vexport uses the attribute `name` in another method."""
    methods = (
        method
        for each in kind.__mro__
        if not each.__module__.startswith((VEXPORT_PACKAGE, "torch."))
        for key, method in vars(each).items()
        if key != name
    )
    codes = (
        getattr(inspect.unwrap(method), "__code__", None) for method in methods if callable(method)
    )
    return any(name in code.co_names for code in codes if code is not None)


def call_for_pair(
    method: Callable[..., object], observed: torch.Tensor, given: Mapping[str, object]
) -> ScalePair:
    """Return the pair of tensors that an older method returns for a tensor.

    The arguments in `given` are passed if they are not None and the method accepts them. The oldest
    methods accept neither `tensor_id` nor `global_scale`.
    """
    return as_tensor_pair(method(observed, **accepted(method, given)), method.__name__)


def accepted(method: Callable[..., object], given: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments in `given` that are not None and that a method accepts."""
    return {
        name: value for name, value in given.items() if value is not None and accepts(method, name)
    }


def copies(ends: Range) -> Range:
    """Return copies of both ends of a range."""
    low, high = (end.detach().clone() for end in ends)
    return low, high


def is_same(value: object, own: torch.Tensor | None) -> bool:
    """Return True if `value` is a tensor with the type and all values of `own`."""
    if not isinstance(value, torch.Tensor) or own is None:
        return False
    if (value.dtype, value.device) != (own.dtype, own.device):
        return False
    return torch.equal(value, own)


def is_same_answer(answer: object, inherited: object) -> bool:
    """Return True if a method of a subclass returned the result of `super()` unchanged."""
    if isinstance(answer, tuple | list) and isinstance(inherited, tuple | list):
        pairs = zip(answer, inherited, strict=False)
        return len(answer) == len(inherited) and all(own is given for own, given in pairs)
    return answer is inherited


def with_shape(end: object, shape: tuple[int, ...] | None, where: str) -> torch.Tensor:
    """Return an end of a range with the shape of the scales, if the shape is known.

    Raises ValueError if the end is no tensor, or if its shape does not fit.
    """
    if not isinstance(end, torch.Tensor):
        raise ValueError(f"{where}: got {type(end).__name__}, need a tensor")
    if shape is None or end.shape == shape:
        return end
    if end.numel() == torch.Size(shape).numel():
        return end.reshape(shape)
    if end.numel() == 1 or (end.ndim == len(shape) and _broadcasts(end.shape, shape)):
        return end.reshape(end.shape if end.numel() > 1 else ()).expand(shape)
    raise ValueError(f"{where}: got shape {tuple(end.shape)}, need {tuple(shape)}")


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return all(size in (1, full) for size, full in zip(shape, to, strict=True))


def as_tensor_pair(answer: object, method: str) -> ScalePair:
    """Return the result of an older method: scale and zero point, or the two ends of a range.

    Raises ValueError if the result is not a pair of tensors.
    """
    if isinstance(answer, tuple | list) and len(answer) == 2:
        scale, zero_point = answer
        if isinstance(scale, torch.Tensor) and isinstance(zero_point, torch.Tensor):
            return scale, zero_point
    need = "two ends of a range" if method.endswith("min_max") else "a scale and a zero point"
    raise ValueError(f"{method}: got {type(answer).__name__}, need {need}, both tensors")


def is_group_map(g_idx: torch.Tensor | None, observed: torch.Tensor, args: ObserverArgs) -> bool:
    """Return True if `g_idx` assigns columns to groups.

    A map that contains -1 is not filled yet and is ignored, as in compressed-tensors. Raises
    ValueError if the map has the wrong length.
    """
    if (
        g_idx is None
        or strategy_of(args) not in ("group", "tensor_group")
        or bool((g_idx == -1).any())
    ):
        return False
    if g_idx.numel() != observed.shape[-1]:
        raise ValueError(
            f"g_idx: got {g_idx.numel()} columns, need {observed.shape[-1]}, as many as are "
            f"observed"
        )
    return True


def column_order(
    g_idx: torch.Tensor | None, observed: torch.Tensor, args: ObserverArgs
) -> torch.Tensor | None:
    """Return the order that puts the columns of each group next to each other.

    `g_idx` (columns,) holds the group of each column. Returns None if there is no map.
    """
    if not is_group_map(g_idx, observed, args):
        return None
    assert g_idx is not None
    return torch.argsort(g_idx.flatten(), stable=True)


def group_widths(g_idx: torch.Tensor | None, columns: int, size: int) -> list[int]:
    """Return the number of columns of each group, in order. The last group may be smaller."""
    if g_idx is None or bool((g_idx == -1).any()):
        return [min(size, columns - start) for start in range(0, columns, size)]
    counts: list[int] = torch.unique(g_idx, return_counts=True)[1].tolist()
    return counts


def has_equal_groups(
    g_idx: torch.Tensor | None, observed: torch.Tensor, args: ObserverArgs
) -> bool:
    """Return False if `g_idx` has a group with another number of columns than `group_size`."""
    if not args.group_size or not is_group_map(g_idx, observed, args):
        return True
    return set(group_widths(g_idx, observed.shape[-1], args.group_size)) <= {args.group_size}


def scales_by_older_methods(
    observer: "Observer",
    observed: torch.Tensor,
    g_idx: torch.Tensor | None,
    global_scale: torch.Tensor | None,
) -> ScalePair:
    """Return scale and zero point of a tensor, computed part by part with the older methods.

    The module docstring lists the parts of each strategy. Scale and zero point have shape
    qparam_shape, or (1,) if all dimensions are reduced.
    """
    strategy, is_weight = observer.strategy, observer.base_name == WEIGHT
    if strategy == "tensor":
        given = {"global_scale": global_scale}
        return _reshaped(call_for_pair(observer.calculate_qparams, observed, given), 1)
    if strategy == "channel":
        return _scales_along_dim(observer, observed, 0)
    if strategy == "block":
        return _scales_by_block(observer, observed)
    if strategy in ("group", "tensor_group"):
        flat = observed if is_weight else observed.reshape(-1, observed.shape[-1])
        return _scales_by_group(observer, flat, g_idx, global_scale)
    if strategy == "attn_head":
        return _reshaped(_scales_along_dim(observer, observed, 1), -1, 1, 1)
    tokens = observed if observed.ndim > 2 else observed.unsqueeze(0)
    return _reshaped(_scales_along_dim(observer, tokens, 1), -1)


def _reshaped(pair: ScalePair, *shape: int) -> ScalePair:
    return pair[0].reshape(shape), pair[1].reshape(shape)


def _scales_along_dim(
    observer: "Observer", observed: torch.Tensor, dim: int, **given: object
) -> ScalePair:
    return call_for_pair(observer.get_qparams_along_dim, observed, {"dim": dim, **given})


def _scales_by_group(
    observer: "Observer",
    observed: torch.Tensor,
    g_idx: torch.Tensor | None,
    global_scale: torch.Tensor | None,
) -> ScalePair:
    size = observer.args.group_size
    assert size is not None
    order = column_order(g_idx, observed, observer.args)
    ordered = observed if order is None else observed.index_select(-1, order)
    parts = torch.split(ordered, group_widths(g_idx, observed.shape[-1], size), dim=1)
    pairs = list[ScalePair]()
    for number, part in enumerate(parts):
        given = {"tensor_id": number, "global_scale": global_scale}
        if observer.base_name == WEIGHT:
            pair = _scales_along_dim(observer, part, 0, **given)
            rows = observed.shape[0]
        else:
            pair = call_for_pair(observer.calculate_qparams, part, {"reduce_dims": (0, 1), **given})
            rows = 1
        pairs.append(pair)
    scale, zero_point = (
        torch.cat([each.reshape(-1, 1).expand(rows, 1) for each in ends], dim=1)
        for ends in zip(*pairs, strict=True)
    )
    return (scale, zero_point) if observer.base_name == WEIGHT else (scale[0], zero_point[0])


def _scales_by_block(observer: "Observer", weight: torch.Tensor) -> ScalePair:
    blocks = blocks_of(weight, observer.args)
    rows, columns = blocks.shape[:2]
    pairs = [
        call_for_pair(
            observer.calculate_qparams, blocks[place], {"reduce_dims": (0, 1), "tensor_id": place}
        )
        for place in product(range(rows), range(columns))
    ]
    scale, zero_point = (
        torch.cat([each.reshape(1) for each in ends]).reshape(rows, columns)
        for ends in zip(*pairs, strict=True)
    )
    return scale, zero_point


def checked_scales(
    pair: ScalePair,
    shape: Iterable[int],
    args: ObserverArgs,
    global_scale: torch.Tensor | None,
    *,
    is_relative: bool,
    where: str,
) -> ScalePair:
    """Return scale (float32) and zero point (int32) of `shape`, rounded as the format stores them.

    If the method computed the scale without the global scale (`is_relative` is False), the scale is
    multiplied by the global scale. Raises ValueError if the number of scales or zero points is
    wrong, or if a scale is negative.
    """
    expected = tuple(shape)
    scale, zero_point = (each.detach() for each in pair)
    if scale.numel() != torch.Size(expected).numel():
        raise ValueError(f"{where}: got scales of shape {tuple(scale.shape)}, need {expected}")
    scale = scale.to(torch.float32).reshape(expected)
    if bool((scale < 0).any()):
        raise ValueError(f"{where}: got a scale below zero, need scales of zero or more")
    if zero_point.numel() not in (1, scale.numel()):
        raise ValueError(
            f"{where}: got zero points of shape {tuple(zero_point.shape)}, need {expected}"
        )
    zero_point = zero_point.to(torch.float32).broadcast_to(
        expected if zero_point.numel() == 1 else zero_point.shape
    )
    zero_point = zero_point.reshape(expected).round().to(torch.int32)
    if global_scale is not None:
        scale = scale if is_relative else scale * global_scale
        scale = scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    else:
        scale = scale.to(stored_dtype(args)).to(torch.float32)
    return scale, torch.zeros_like(zero_point) if args.symmetric else zero_point


def implied_range(pair: ScalePair, args: ObserverArgs, global_scale: torch.Tensor | None) -> Range:
    """Return the range (low, high), float32, for which `scale_and_zero_point` returns `pair`."""
    smallest, largest = quantized_range(args)
    scale, zero_point = pair[0].to(torch.float32), pair[1].to(torch.float32)
    if global_scale is not None:
        scale = scale / global_scale
    if args.symmetric:
        high = scale * ((largest - smallest) / 2)
        return -high, high
    return (smallest - zero_point) * scale, (largest - zero_point) * scale


def extremes_of_global_scale(global_scale: torch.Tensor) -> Range:
    """Return the extremes for which `global_scale_of` returns this global scale. They have no
    dimensions.
    """
    absmax = (E4M3_MAX * E2M1_MAX / global_scale.to(torch.float32)).reshape(())
    return -absmax, absmax


def flatten_dimensions(
    observed: torch.Tensor, reduce_dims: Iterable[int] | None
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a tensor reshaped to an observation (1, kept, 1, reduced), and the shape of its range.

    Each reduced dimension has size 1 in the shape of the range. Without `reduce_dims`, all
    dimensions are reduced and the shape is ().
    """
    every = range(observed.ndim)
    reduced = {dim % observed.ndim for dim in reduce_dims} if reduce_dims else set(every)
    kept = [dim for dim in every if dim not in reduced]
    shape = (
        ()
        if not reduce_dims
        else tuple(1 if dim in reduced else observed.shape[dim] for dim in every)
    )
    moved = observed.permute(*kept, *sorted(reduced))
    number = torch.Size([observed.shape[dim] for dim in kept]).numel()
    return moved.reshape(1, number, 1, -1), shape


def is_relative_to_global(observer: "Observer", older: frozenset[str]) -> bool:
    """Return True if the scales of an older method are already relative to the global scale.

    This is the case if the method receives the global scale. Also returns True for formats other
    than NVFP4, and if no older method determines the scales.
    """
    if not is_nvfp4(observer.args):
        return True
    methods = ("forward", "get_qparams", "get_qparams_along_dim", "calculate_qparams")
    deciding = next((name for name in methods if name in older), None)
    return deciding is None or accepts(class_function(type(observer), deciding), "global_scale")
