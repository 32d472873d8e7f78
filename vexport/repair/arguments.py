"""Arguments of config groups that are not those of the stored tensors."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

from compressed_tensors.compressors.format import infer_module_format
from torch.nn import Linear

from vexport.checkpoint.quantization import KEY
from vexport.checks.config import FORMAT_NAMES
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.layers import Layer, fits, layers_of
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.source import Source
from vexport.formats.arguments import Strategy
from vexport.formats.dequantize import ct_scheme
from vexport.repair.changes import LOSSLESS, Changes, Repair, inside
from vexport.types import Json

NAME = "arguments"
GROUP_SIZES = (16, 32, 64, 128, 256)
# strategy, group size, symmetric
CHOICES: tuple[tuple[Strategy, int | None, bool], ...] = (
    ("tensor", None, True),
    ("channel", None, True),
    ("channel", None, False),
    ("block", None, True),
    ("tensor_group", 16, True),
    *(("group", size, symmetric) for size in GROUP_SIZES for symmetric in (True, False)),
)


def run(view: CheckpointView, source: Source | None) -> Changes:
    """The config with arguments that fit, for groups of which no layer fits and one reading fits all."""
    config: dict[str, Json] = copy.deepcopy(dict(view.index.config))
    repairs = [
        repair
        for group in view.config_groups
        if (right := _right(group, _layers(view, group))) is not None
        for repair in _corrected(config, group, right)
    ]
    return Changes(config=config, repairs=tuple(repairs)) if repairs else Changes()


def _layers(view: CheckpointView, group: ConfigGroup) -> list[Layer]:
    layers = layers_of(view).values()
    return [
        layer
        for layer in layers
        if layer.is_quantized and layer.group is not None and layer.group.name == group.name
    ]


def _right(group: ConfigGroup, layers: Sequence[Layer]) -> ConfigGroup | None:
    """The only reading that fits all layers; None where the group's own fits one, or none or several do."""
    if not layers or any(fits(group, layer.parameters) for layer in layers):
        return None
    readings = {
        repr(reading.weights): reading
        for reading in _readings(group)
        if all(fits(reading, layer.parameters) for layer in layers)
    }
    return next(iter(readings.values())) if len(readings) == 1 else None


def _readings(group: ConfigGroup) -> Iterator[ConfigGroup]:
    """The group as it is and with other arguments, in its own format or the one that they imply."""
    blocks = group.weights.block_structure
    readings = [group.weights]
    for strategy, size, symmetric in CHOICES:
        if strategy != "block" or blocks:
            other = replace(group.weights, strategy=strategy, group_size=size, symmetric=symmetric)
            readings.append(replace(other, block_structure=blocks if strategy == "block" else None))
    for weights in readings:
        reading = replace(group, weights=replace(weights, observer_kwargs={}))
        implied = _implied_format(reading)
        if implied is not None and group.format in FORMAT_NAMES:
            yield reading
        if implied is not None:
            yield replace(reading, format=implied)


def _implied_format(group: ConfigGroup) -> str | None:
    """The format that compressed-tensors would store; None where it refuses the arguments."""
    try:
        return str(infer_module_format(Linear, ct_scheme(group)).value)
    except (NotImplementedError, ValueError):
        return None


def _corrected(config: dict[str, Json], group: ConfigGroup, right: ConfigGroup) -> Iterator[Repair]:
    raw = inside(config, KEY, "config_groups", group.name)
    weights, where = inside(raw, "weights"), f"config_groups.{group.name}"
    if right.format != group.format:
        raw["format"] = right.format
        yield _repair(f"{where}.format", group.format, right.format)
    for key in ("strategy", "group_size", "symmetric"):
        old, new = getattr(group.weights, key), getattr(right.weights, key)
        if old != new:
            weights[key] = new
            yield _repair(f"{where}.weights.{key}", str(old), str(new))


def _repair(where: str, got: str, now: str) -> Repair:
    cost = f"{LOSSLESS}: the tensors allow no other reading"
    return Repair(family=NAME, where=f"config.json: quantization_config.{where}", got=got, now=now, cost=cost)
