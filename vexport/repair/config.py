"""Repair config.json alone: keys that vLLM refuses, targets, and the ignore list."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from vexport.architectures.fusion import FusedLayer, is_head, moe_layer
from vexport.architectures.ignore import ignored
from vexport.checkpoint.index import COMPRESSION_CONFIG, QUANTIZATION_CONFIG, TEXT
from vexport.checks.vllm.groups import ConfigGroup, fits
from vexport.checks.vllm.quant_methods import COMPRESSED_TENSORS
from vexport.checks.vllm.view import CheckpointView
from vexport.checks.vllm.wrong_words import wrong_words
from vexport.formats.arguments import QuantArgs
from vexport.formats.config import targets_of
from vexport.records import Json, Repair
from vexport.repair.write import LOSSLESS, Changes, object_at
from vexport.words import as_json

if TYPE_CHECKING:
    from vexport.fidelity.source import ComparedSource

ARGUMENTS = ("weights", "input_activations", "output_activations")
KNOWN_ARGUMENTS = frozenset(field.name for field in fields(QuantArgs))
# Parameters in which compressed-tensors stores sparse weights. A checkpoint without such tensors
# has no sparse weights.
SPARSE_PARAMETERS = ("compressed", "bitmask", "row_offsets", "meta")
MOST_NAMES = 4
OTHER_WORDS_ARE_RIGHT = "the other arguments of the config group describe the stored codes"
KEYS_HAVE_NO_EFFECT = "the removed keys have no effect on how the tensors are read"


def keys(view: CheckpointView, source: "ComparedSource | None") -> Changes:
    """Move the quantization config to its usual place, and remove unused keys that vLLM refuses."""
    config: dict[str, Json] = copy.deepcopy(dict(view.index.config))
    moved = tuple(_move_keys(config, view))
    quantization = config.get(QUANTIZATION_CONFIG)
    if not isinstance(quantization, dict) or not isinstance(
        quantization.get("config_groups"), dict
    ):
        return Changes()
    place = f"{view.config_path}: {QUANTIZATION_CONFIG}"
    repairs = (
        *moved,
        *_method(quantization, place),
        *_unknown_arguments(quantization, place, is_compared=source is not None),
        *_sparsity(quantization, place, view),
    )
    return Changes(config=config, repairs=repairs) if repairs else Changes()


def _move_keys(config: dict[str, Json], view: CheckpointView) -> Iterator[Repair]:
    """Move the quantization config to the key that all loaders read.

    vLLM also reads the older places. Other loaders and later repairs read only this key.
    """
    stored = view.quantization.stored
    if stored is None or config.get(QUANTIZATION_CONFIG) is not None:
        return
    for holder in (config, config.get(TEXT)):
        if isinstance(holder, dict):
            holder.pop(COMPRESSION_CONFIG, None)
            holder.pop(QUANTIZATION_CONFIG, None)
    config[QUANTIZATION_CONFIG] = dict(stored.values)
    yield _key_repair(stored.place, "the quantization config", QUANTIZATION_CONFIG)


def _method(quantization: dict[str, Json], place: str) -> Iterator[Repair]:
    if quantization.get("quant_method") != COMPRESSED_TENSORS:
        yield _key_repair(
            f"{place}.quant_method", repr(quantization.get("quant_method")), COMPRESSED_TENSORS
        )
        quantization["quant_method"] = COMPRESSED_TENSORS


def _unknown_arguments(
    quantization: dict[str, Json], place: str, *, is_compared: bool
) -> Iterator[Repair]:
    for name, group in object_at(quantization, "config_groups").items():
        if not isinstance(group, dict):
            continue
        for side in ARGUMENTS:
            arguments = group.get(side)
            if isinstance(arguments, dict):
                for key in sorted(arguments.keys() - KNOWN_ARGUMENTS):
                    where = f"{place}.config_groups.{name}.{side}.{key}"
                    repair = _key_repair(where, repr(arguments.pop(key)), "removed")
                    yield repair if is_compared else replace(repair, assumption=KEYS_HAVE_NO_EFFECT)


def _sparsity(quantization: dict[str, Json], place: str, view: CheckpointView) -> Iterator[Repair]:
    sparsity = quantization.get("sparsity_config")
    stored = any(name.rpartition(".")[2] in SPARSE_PARAMETERS for name in view.index.tensors)
    if isinstance(sparsity, dict) and sparsity and not stored:
        del quantization["sparsity_config"]
        yield _key_repair(
            f"{place}.sparsity_config",
            "a config for sparse weights, but no sparse weights",
            "removed",
        )


def _key_repair(where: str, got: str, now: str) -> Repair:
    return Repair(family="config", where=where, got=got, now=now, cost=LOSSLESS)


def words(view: CheckpointView, source: "ComparedSource | None") -> Changes:
    """Correct the word of a config group that disagrees with the tensors of all its layers."""
    config: dict[str, Json] = copy.deepcopy(dict(view.index.config))
    repairs = []
    for wrong in wrong_words(view):
        raw = object_at(config, QUANTIZATION_CONFIG, "config_groups", wrong.group.name)
        side, _, word = wrong.key.rpartition(".")
        (object_at(raw, side) if side else raw)[word] = wrong.new
        place = f"config.json: {QUANTIZATION_CONFIG}.config_groups.{wrong.group.name}.{wrong.key}"
        cost = f"{LOSSLESS}, because the tensors allow no other value"
        assumption = None if source is not None else OTHER_WORDS_ARE_RIGHT
        repairs.append(
            Repair(
                family="config",
                where=place,
                got=as_json(wrong.old),
                now=as_json(wrong.new),
                cost=cost,
                assumption=assumption,
            )
        )
    return Changes(config=config, repairs=tuple(repairs)) if repairs else Changes()


def targets(view: CheckpointView, source: "ComparedSource | None") -> Changes:
    """Make the ignore list and the targets agree with the tensors."""
    if not view.quantization.config_groups:
        return Changes()
    repaired = _with_names(view, "ignore", _without_quantized(view))
    for group in view.quantization.config_groups:
        repaired = _with_names(
            repaired, "targets", _targets(repaired, group), "config_groups", group.name
        )
    repaired = _with_names(
        repaired, "ignore", (*repaired.quantization.ignore, *_unquantized(repaired))
    )
    repairs = tuple(_list_repairs(view, repaired))
    return Changes(config=repaired.index.config, repairs=repairs) if repairs else Changes()


def _without_quantized(view: CheckpointView) -> tuple[str, ...]:
    """Return the ignore list without entries that match quantized layers.

    Unquantized layers that a removed entry matched are added by name. Experts are not added here,
    because `_unquantized` adds a pattern for them.
    """
    layers = view.layers.by_name.values()
    quantized = [layer.name for layer in layers if layer.is_quantized]
    kept: dict[str, None] = {}
    for entry in view.quantization.ignore:
        if not any(view.lookup.is_ignored(name, [entry]) for name in quantized):
            kept[entry] = None
            continue
        plain = (
            each.name for each in layers if not each.is_quantized and moe_layer(each.name) is None
        )
        kept.update(dict.fromkeys(name for name in plain if view.lookup.is_ignored(name, [entry])))
    return tuple(kept)


def _targets(view: CheckpointView, group: ConfigGroup) -> tuple[str, ...]:
    """Return a group's targets, extended by fitting layers that vLLM does not assign to it.

    A layer that fits several groups may belong to any of them. It is not changed, and the check
    `targets` reports it.
    """
    alone, architecture = len(view.quantization.config_groups) == 1, view.model.architecture
    fitting = [fused for fused in view.model.fused_layers if _is_first_fit(view, fused, group)]
    misassigned = [
        fused
        for fused in fitting
        if _is_misassigned(view, fused) and not _fits_others(view, fused, group)
    ]
    if not misassigned:
        return group.targets
    if alone and not all(is_head(fused.name) for fused in misassigned):
        return tuple(targets_of(fitting, architecture, (), alone=True))
    names = {fused.name for fused in fitting}
    others = [each for each in view.layers.quantized if each.name not in names]
    return (
        *group.targets,
        *targets_of(misassigned, architecture, others, alone=False),
    )


def _is_first_fit(view: CheckpointView, fused: FusedLayer, group: ConfigGroup) -> bool:
    members = [view.model.modules[name] for name in fused.members]
    groups = view.quantization.config_groups
    owners = (each for each in groups if all(fits(each, parameters) for parameters in members))
    owner = next(owners, None)
    return owner is not None and owner.name == group.name


def _fits_others(view: CheckpointView, fused: FusedLayer, group: ConfigGroup) -> bool:
    members = [view.model.modules[name] for name in fused.members]
    return any(
        (other.weights, other.input_activations) != (group.weights, group.input_activations)
        and all(fits(other, parameters) for parameters in members)
        for other in view.quantization.config_groups
    )


def _is_misassigned(view: CheckpointView, fused: FusedLayer) -> bool:
    group = view.lookup.group_of(fused)
    return group is None or not all(fits(group, view.model.modules[name]) for name in fused.members)


def _unquantized(view: CheckpointView) -> Iterator[str]:
    """Yield the names or patterns of unquantized layers to add to `ignore`.

    A layer is added if a target matches it, or if `ignore` lists other members of its fused layer.
    """
    missing: set[str] = set()
    for fused in view.model.fused_layers:
        named = {view.quantization.matched_ignore.match(name) for name in view.lookup.names(fused)}
        is_targeted = view.lookup.group_of(fused) is not None or len(named) > 1
        if is_targeted and not view.layers.is_quantized(fused):
            missing.update(fused.members)
    yield from (
        name
        for name in ignored(view.model.fused_layers, missing, (), view.model.names)
        if name not in view.quantization.ignore
    )


def _with_names(
    view: CheckpointView, key: str, names: Sequence[str], *place: str
) -> CheckpointView:
    config: dict[str, Json] = copy.deepcopy(dict(view.index.config))
    object_at(config, QUANTIZATION_CONFIG, *place)[key] = list(names)
    return CheckpointView(replace(view.index, config=config), view.reader)


def _list_repairs(old: CheckpointView, new: CheckpointView) -> Iterator[Repair]:
    if old.quantization.ignore != new.quantization.ignore:
        yield _list_repair("ignore", old.quantization.ignore, new.quantization.ignore)
    for before, after in zip(
        old.quantization.config_groups, new.quantization.config_groups, strict=True
    ):
        if before.targets != after.targets:
            yield _list_repair(
                f"config_groups.{before.name}.targets", before.targets, after.targets
            )


def _list_repair(place: str, old: Sequence[str], new: Sequence[str]) -> Repair:
    removed = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    return Repair(
        family="targets",
        where=f"config.json: quantization_config.{place}",
        got=f"{_listed(removed)}, which does not match how the layers are stored"
        if removed
        else "an incomplete list",
        now=f"with {_listed(added)}" if added else f"without {_listed(removed)}",
        cost=f"{LOSSLESS}, because no tensor changes",
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return f"{shown} and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else shown
