"""Keys of quantization_config that the pinned vLLM refuses and that nothing rests on."""

import copy
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from vexport.checkpoint.quantization import KEY, OLDER_KEY, TEXT
from vexport.checks.vllm.quant_methods import METHOD
from vexport.checks.vllm.view import CheckpointView
from vexport.formats.arguments import QuantArgs
from vexport.repair.changes import LOSSLESS, Changes, Repair, inside
from vexport.types import Json

if TYPE_CHECKING:
    from vexport.fidelity.source import Source

NAME = "config"
ARGUMENTS = ("weights", "input_activations", "output_activations")
KNOWN = frozenset(field.name for field in fields(QuantArgs))
# Tensors of compressed sparse weights in compressed-tensors; without them nothing is sparse.
SPARSE_PARAMETERS = ("compressed", "bitmask", "row_offsets", "meta")


def run(view: CheckpointView, source: "Source | None") -> Changes:
    """The config without what vLLM refuses."""
    config: dict[str, Json] = copy.deepcopy(dict(view.index.config))
    moved = tuple(_moved(config, view))
    quantization = config.get(KEY)
    if not isinstance(quantization, dict) or not isinstance(quantization.get("config_groups"), dict):
        return Changes()
    place = f"{view.config_path}: {KEY}"
    repairs = (
        *moved,
        *_method(quantization, place),
        *_unknown_arguments(quantization, place),
        *_sparsity(quantization, place, view),
    )
    return Changes(config=config, repairs=repairs) if repairs else Changes()


def _moved(config: dict[str, Json], view: CheckpointView) -> Iterator[Repair]:
    """vLLM finds the config in its older places too; other loaders look in one, and so do later repairs."""
    stored = view.stored_quantization
    if stored is None or config.get(KEY) is not None:
        return
    for holder in (config, config.get(TEXT)):
        if isinstance(holder, dict):
            holder.pop(OLDER_KEY, None)
            holder.pop(KEY, None)
    config[KEY] = dict(stored.values)
    yield _repair(stored.place, "the quantization config", KEY)


def _method(quantization: dict[str, Json], place: str) -> Iterator[Repair]:
    if quantization.get("quant_method") != METHOD:
        yield _repair(f"{place}.quant_method", repr(quantization.get("quant_method")), METHOD)
        quantization["quant_method"] = METHOD


def _unknown_arguments(quantization: dict[str, Json], place: str) -> Iterator[Repair]:
    for name, group in inside(quantization, "config_groups").items():
        for side in ARGUMENTS if isinstance(group, dict) else ():
            arguments = group.get(side) if isinstance(group, dict) else None
            unknown = sorted(arguments.keys() - KNOWN) if isinstance(arguments, dict) else []
            for key in unknown:
                assert isinstance(arguments, dict)
                value = arguments.pop(key)
                yield _repair(f"{place}.config_groups.{name}.{side}.{key}", repr(value), "removed")


def _sparsity(quantization: dict[str, Json], place: str, view: CheckpointView) -> Iterator[Repair]:
    sparsity = quantization.get("sparsity_config")
    stored = any(name.rpartition(".")[2] in SPARSE_PARAMETERS for name in view.index.tensors)
    if isinstance(sparsity, dict) and sparsity and not stored:
        del quantization["sparsity_config"]
        yield _repair(
            f"{place}.sparsity_config", "a config for sparse weights, of which there are none", "removed"
        )


def _repair(where: str, got: str, now: str) -> Repair:
    return Repair(family=NAME, where=where, got=got, now=now, cost=LOSSLESS)
