"""Repair arguments and KV cache scales, list all families of repairs, and measure weight changes.

This module needs torch.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from compressed_tensors.compressors.format import infer_module_format
from torch.nn import Linear

from vexport.architectures.linears import attention_layers
from vexport.checkpoint.index import QUANTIZATION_CONFIG
from vexport.checks.config import FORMAT_NAMES
from vexport.checks.kv_cache import cache_scales
from vexport.checks.vllm.groups import ConfigGroup, StoredLayer, fits
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import dequantized, read_parameters
from vexport.fidelity.source import ComparedSource, SourceTensors
from vexport.formats.arguments import Strategy, parse_args
from vexport.formats.config import K_SCALE, KV_CACHES, kv_layout
from vexport.formats.dequantize import ct_scheme
from vexport.numerics.metrics import quantization_error
from vexport.records import Json, Repair, WeightChange
from vexport.repair import Family, config
from vexport.repair.global_scales import reciprocals, unequal_inputs, unequal_weights
from vexport.repair.write import LOSSLESS, Changes, Edit, object_at

GROUP_SIZES = (16, 32, 64, 128, 256)
# Strategy, group size, symmetric.
CHOICES: tuple[tuple[Strategy, int | None, bool], ...] = (
    ("tensor", None, True),
    ("channel", None, True),
    ("channel", None, False),
    ("block", None, True),
    ("tensor_group", 16, True),
    *(("group", size, symmetric) for size in GROUP_SIZES for symmetric in (True, False)),
)


ASSUMED_WIDTH = "type and num_bits in the config describe the stored codes"
NOT_SCALED = "keys and values need no scale (only calibration shows their range)"


def arguments(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """Correct the arguments of a config group if its tensors allow exactly one correction.

    A group is corrected if no layer fits its arguments, and if exactly one other set of arguments
    fits all of its layers.
    """
    changed: dict[str, Json] = copy.deepcopy(dict(view.index.config))
    repairs: list[Repair] = []
    for group in view.quantization.config_groups:
        stored = [each for each in view.layers.by_name.values() if each.is_quantized]
        layers = [each for each in stored if each.group is group]
        if layers and not any(fits(group, layer.parameters) for layer in layers):
            candidates = {
                repr(candidate.weights): candidate
                for candidate in _candidate_groups(group)
                if all(_is_consistent(view, candidate, layer) for layer in layers)
            }
            if len(candidates) == 1:
                (right,) = candidates.values()
                repairs += _corrected(changed, group, right, is_compared=source is not None)
    return Changes(config=changed, repairs=tuple(repairs)) if repairs else Changes()


def _is_consistent(view: CheckpointView, candidate: ConfigGroup, layer: StoredLayer) -> bool:
    """Return True if a layer's tensors fit these arguments and imply the stored `weight_shape`.

    If the shape is not stored, only the fit is checked. A packed weight with twice as many bits and
    half as many columns then fits as well.
    """
    if not fits(candidate, layer.parameters):
        return False
    stored = layer.parameters.get("weight_shape")
    if stored is None or not stored.num_bytes:
        return True
    values = read_parameters(view, {"weight_shape": stored})["weight_shape"]
    return tuple(values.reshape(-1).tolist()) == candidate.shape(layer.parameters)


def _candidate_groups(group: ConfigGroup) -> Iterator[ConfigGroup]:
    """Yield the group with each possible set of arguments.

    Each set is combined with the group's format, and with the format that compressed-tensors would
    choose for these arguments.
    """
    blocks = group.weights.block_structure
    candidates = [group.weights]
    for strategy, size, symmetric in CHOICES:
        if strategy != "block" or blocks:
            other = replace(group.weights, strategy=strategy, group_size=size, symmetric=symmetric)
            candidates.append(
                replace(other, block_structure=blocks if strategy == "block" else None)
            )
    for weights in candidates:
        candidate = replace(group, weights=replace(weights, observer_kwargs={}))
        implied = _implied_format(candidate)
        if implied is not None and group.format in FORMAT_NAMES:
            yield candidate
        if implied is not None:
            yield replace(candidate, format=implied)


def _implied_format(group: ConfigGroup) -> str | None:
    try:
        return str(infer_module_format(Linear, ct_scheme(group)).value)
    except (NotImplementedError, ValueError):
        return None


def _corrected(
    config: dict[str, Json], group: ConfigGroup, right: ConfigGroup, *, is_compared: bool
) -> Iterator[Repair]:
    raw = object_at(config, QUANTIZATION_CONFIG, "config_groups", group.name)
    weights, where = object_at(raw, "weights"), f"config_groups.{group.name}"
    if right.format != group.format:
        raw["format"] = right.format
        yield _argument_repair(
            f"{where}.format", group.format, right.format, is_compared=is_compared
        )
    for key in ("strategy", "group_size", "symmetric"):
        old, new = getattr(group.weights, key), getattr(right.weights, key)
        if old != new:
            weights[key] = new
            yield _argument_repair(
                f"{where}.weights.{key}", str(old), str(new), is_compared=is_compared
            )


def _argument_repair(where: str, got: str, now: str, *, is_compared: bool) -> Repair:
    return Repair(
        family="arguments",
        where=f"config.json: quantization_config.{where}",
        got=got,
        now=now,
        cost=f"{LOSSLESS}, because the shapes of the tensors allow no other value",
        assumption=None if is_compared else ASSUMED_WIDTH,
    )


def kv_cache(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """Add scales of 1.0 for the KV cache of all attention layers.

    Nothing changes if some layers have scales, because 1.0 would not be consistent with them.
    """
    scheme = parse_args((view.quantization.values or {}).get("kv_cache_scheme"))
    if isinstance(scheme, str) or scheme.dynamic:
        return Changes()
    per_head = scheme.strategy == KV_CACHES["fp8_per_head"].strategy
    fused, names = view.model.fused_layers, view.model.names
    layers = attention_layers(fused, _rows(view), names, per_head=per_head)
    if any(tensor is not None for _, _, tensor in cache_scales(view)):
        return Changes()
    edits = []
    for layer in layers:
        near = [name for name in view.index.tensors if name.startswith(f"{layer.name}.")][-1]
        for spec in kv_layout(layer):
            edits.append(
                Edit(tensors={K_SCALE: spec}, near=near, make=partial(_scales_of_one, spec.shape))
            )
    cost = (
        "unknown without calibration: keys and values above 448 saturate, and small values lose "
        "bits (vLLM would silently use 1.0, too)"
    )
    got = "a static kv_cache_scheme, but no k_scale or v_scale"
    now = "1.0 for keys and values"
    repairs = (
        Repair(
            family="KV cache", where=each.name, got=got, now=now, cost=cost, assumption=NOT_SCALED
        )
        for each in layers
    )
    return Changes(edits=tuple(edits), repairs=tuple(repairs))


def _rows(view: CheckpointView) -> dict[str, int | None]:
    rows: dict[str, int | None] = {}
    for fused in view.model.fused_layers:
        members = view.layers.members_with_sizes(fused, view.lookup.group_of(fused))
        rows.update(dict.fromkeys(fused.members))
        rows.update({member.name: member.out_features for member in members or ()})
    return rows


def _scales_of_one(shape: tuple[int, ...]) -> Mapping[str, torch.Tensor]:
    return {K_SCALE: torch.ones(shape, dtype=torch.float32)}


def weight_change(
    before: CheckpointView, after: CheckpointView, layer: str, source: ComparedSource | None
) -> WeightChange | None:
    """Return how far a repair moved a layer's weight.

    Returns None if the repaired weight cannot be dequantized.
    """
    old, new = dequantized(before, layer), dequantized(after, layer)
    if new is None:
        return None
    exact = _in_source(after, source, layer)
    against = None
    if exact is not None and exact.shape == new.shape:
        against = (
            None if old is None else quantization_error(exact, old).sqnr_db,
            quantization_error(exact, new).sqnr_db,
        )
    moved = quantization_error(old, new) if old is not None and old.shape == new.shape else None
    return WeightChange(
        relative=moved.relative if moved else None,
        snr_db=moved.sqnr_db if moved else None,
        source_snr_db=against,
    )


def _in_source(
    view: CheckpointView, source: ComparedSource | None, layer: str
) -> torch.Tensor | None:
    if source is None:
        return None
    pieces = SourceTensors(view, source.index, source.reader).pieces(view.layers.by_name[layer])
    return torch.cat(tuple(pieces)) if pieces else None


# The order matters: each family sees the changes of the families before it.
FAMILIES: Sequence[Family] = (
    config.keys,
    arguments,
    config.words,
    config.targets,
    reciprocals,
    unequal_weights,
    unequal_inputs,
    kv_cache,
)
