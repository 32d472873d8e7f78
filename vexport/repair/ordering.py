"""Activation ordering that vLLM refuses and that left every column where it was."""

import copy
from collections.abc import Iterator

from vexport.checkpoint.quantization import KEY
from vexport.checkpoint.tensors import read_tensor
from vexport.checks.config import REFUSED_ORDERING
from vexport.checks.vllm.layers import layers_of
from vexport.checks.vllm.view import CheckpointView, ConfigGroup
from vexport.fidelity.source import Source
from vexport.repair.changes import LOSSLESS, Changes, Repair, inside
from vexport.repair.layout import is_in_order
from vexport.types import Json

NAME = "ordering"
INDEX = "weight_g_idx"


def run(view: CheckpointView, source: Source | None) -> Changes:
    """The config without orderings that order nothing; `layout` removes the tensors."""
    config: dict[str, Json] = copy.deepcopy(dict(view.index.config))
    repairs = [
        repair
        for group in view.config_groups
        if group.weights.actorder in REFUSED_ORDERING and _in_order(view, group)
        for repair in _removed(config, group)
    ]
    return Changes(config=config, repairs=tuple(repairs)) if repairs else Changes()


def _in_order(view: CheckpointView, group: ConfigGroup) -> bool:
    """Whether all layers of a group say where their columns are, and that is in order."""
    own = [layer for layer in layers_of(view).values() if layer.is_quantized and layer.group == group]
    return bool(own) and all(
        INDEX in layer.parameters and is_in_order(read_tensor(view.reader, layer.parameters[INDEX]), group)
        for layer in own
    )


def _removed(config: dict[str, Json], group: ConfigGroup) -> Iterator[Repair]:
    inside(config, KEY, "config_groups", group.name, "weights")["actorder"] = None
    yield Repair(
        family=NAME,
        where=f"config.json: quantization_config.config_groups.{group.name}.weights.actorder",
        got=str(group.weights.actorder),
        now="null",
        cost=f"{LOSSLESS}: every column is in its place",
    )
