"""Find a single wrong word of a config group that disagrees with the tensors of all its layers.

Such a word makes the checks report each layer. One finding on the word takes the place of these
findings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vexport.checks.vllm.groups import ConfigGroup, StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.formats import FORMATS
from vexport.formats.arguments import QuantArgs, Strategy
from vexport.records import Finding, Json
from vexport.rules import config as rules

INTEGER_WIDTHS, FLOAT_WIDTHS = tuple(range(2, 9)), (4, 8)
STRATEGIES: tuple[Strategy, ...] = ("tensor", "channel", "group", "tensor_group", "block")
GROUP_SIZES = (16, 32, 64, 128, 256)
SHAPE = "weight_shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongWord:
    """Word of a config group, and the only value that fits the tensors of all its layers.

    `key` is the word's place in the group, such as `weights.type`. `old` and `new` are its values.
    """

    group: ConfigGroup
    key: str
    old: Json
    new: Json
    layers: tuple[StoredLayer, ...]


def wrong_words(view: CheckpointView) -> Iterator[WrongWord]:
    """Yield the wrong word of each config group that has one.

    A word is wrong if each layer of the group stores a tensor that the config does not allow, and
    if exactly one other value of exactly one word makes vLLM run the group and fits all its layers.
    If several values do, only the values that vexport writes itself count. A missing tensor is no
    evidence against a word, because the tensor may be lost. Other methods have other words.
    """
    for group in view.quantization.config_groups if view.quantization.method is None else ():
        stored = (layer for layer in view.layers.by_name.values() if layer.is_quantized)
        layers = tuple(layer for layer in stored if layer.group is group)
        if not layers or any(_allows(view, group, layer) for layer in layers):
            continue
        right = [
            (key, new, other)
            for key, new, other in _others(group)
            if other.refusal is None and all(_agrees(view, other, layer) for layer in layers)
        ]
        if len(right) > 1:
            right = [each for each in right if _is_written(each[2])]
        if len(right) == 1:
            key, new, other = right[0]
            yield WrongWord(group=group, key=key, old=_word(group, key), new=new, layers=layers)


def _others(group: ConfigGroup) -> Iterator[tuple[str, Json, ConfigGroup]]:
    """Yield the group with each other value of each word: its key, the value, and the group."""
    values: dict[str, tuple[Json, ...]] = {
        "type": ("int", "float"),
        "num_bits": FLOAT_WIDTHS if group.weights.is_float else INTEGER_WIDTHS,
        "strategy": STRATEGIES,
        "group_size": GROUP_SIZES if group.weights.group_size else (),
        "symmetric": (True, False),
    }
    for key, options in values.items():
        for value in options:
            if value != getattr(group.weights, key):
                weights = replace(group.weights, **{key: value})  # type: ignore[arg-type]
                yield f"weights.{key}", value, replace(group, weights=weights)
    for name in dict.fromkeys(each.name for each in FORMATS):
        if name != group.format:
            yield "format", name, replace(group, format=name)
    if group.input_activations is not None:
        for dynamic in (True, False):
            if dynamic != group.input_activations.dynamic:
                inputs = replace(group.input_activations, dynamic=dynamic)
                yield (
                    "input_activations.dynamic",
                    dynamic,
                    replace(group, input_activations=inputs),
                )


def _is_written(group: ConfigGroup) -> bool:
    return group.storage.unwritable_arguments(group) is None


def _word(group: ConfigGroup, key: str) -> Json:
    side, _, word = key.rpartition(".")
    holder: ConfigGroup | QuantArgs | None = getattr(group, side) if side else group
    value: Json = getattr(holder, word)
    return value


def _agrees(view: CheckpointView, group: ConfigGroup, layer: StoredLayer) -> bool:
    shape = view.layers.shape_of(replace(layer, group=group))
    needed = set() if shape is None else {*group.parameters(shape)} - group.storage.unread
    return bool(needed) and needed <= layer.parameters.keys() and _allows(view, group, layer)


def _allows(view: CheckpointView, group: ConfigGroup, layer: StoredLayer) -> bool:
    """Return True if a group implies each stored tensor of a layer. Others may be missing.

    The layer's size comes from config.json, or from its tensors if config.json has no size. A
    stored `weight_shape` must have this size as well.
    """
    stored = layer.parameters.keys() - {"bias"} - group.storage.unread
    shape = view.layers.shape_of(replace(layer, group=group))
    expected = {} if shape is None else group.parameters(shape)
    if not stored <= expected.keys():
        return False
    if not all(
        form.accepts(layer.parameters[name]) for name, form in expected.items() if name in stored
    ):
        return False
    size = layer.filled(SHAPE)
    return size is None or [*map(int, view.reader.floats(size).reshape(-1))] == [*(shape or ())]


def with_causes(view: CheckpointView, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, with those on the layers of a misdescribed group as one finding."""
    kept = list(findings)
    for wrong in wrong_words(view):
        place = f"{view.quantization.place}.config_groups.{wrong.group.name}"
        inside = {name for layer in wrong.layers for name in (layer.name, layer.fused.name)}
        follow = [
            each
            for each in kept
            if each.severity != "info"
            and (
                each.where == place
                and each.check == "config"
                or inside & {each.where, each.where.rpartition(".")[0]}
            )
        ]
        if any(each.severity == "error" for each in follow):
            first = kept.index(follow[0])
            kept = [each for each in kept if each not in follow]
            kept.insert(first, _finding(wrong, place, follow))
    return kept


def _finding(wrong: WrongWord, place: str, follow: Sequence[Finding]) -> Finding:
    errors = [each for each in follow if each.severity == "error"]
    ways = (way for each in errors for way in each.loader_faults)
    # The loaders may only overrule this finding if they decide about all that it stands for.
    decided = all(each.loader_faults for each in errors)
    # vLLM's reason to refuse the group is more specific than its effect on a layer.
    example = next((each for each in errors if each.where == place), errors[0])
    found = Finding.at(
        rules.WRONG_WORD,
        f"{place}.{wrong.key}",
        places=tuple(dict.fromkeys(each.where for each in follow if each.where != place)),
        old=wrong.old,
        new=wrong.new,
        key=wrong.key,
        group=wrong.group.name,
        layers=len(wrong.layers),
        place=wrong.group.name if example.where == place else example.where,
        found=example.got,
    )
    return replace(found, loader_faults=tuple(dict.fromkeys(ways)) if decided else ())
