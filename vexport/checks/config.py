"""Check that vLLM can read the quantization config and compute its online rotations."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from vexport.architectures.fusion import FusedLayer, moe_layer
from vexport.checks.kv_cache import cache_scheme
from vexport.checks.vllm.groups import (
    INPUT,
    OUTPUT,
    ConfigGroup,
    OnlineTransform,
    parse_group,
    targets_attention,
)
from vexport.checks.vllm.quant_methods import COMPRESSED_TENSORS, METHODS, method_name
from vexport.checks.vllm.view import CheckpointView
from vexport.formats import FORMATS
from vexport.formats.arguments import QuantArgs, contradictions, described, parse_args
from vexport.records import Finding, Json
from vexport.records.patterns import REGEX, expression
from vexport.rules import config as rules
from vexport.rules import transforms as transform_rules
from vexport.version import short_version

if TYPE_CHECKING:
    from vexport.checks.vllm.quant_methods.base import QuantMethod

NAME = "config"
DESCRIPTION = "quantization_config exists, and vLLM supports every config group"
TRANSFORMS = "vLLM supports the online rotations (transform_config), and their matrices are stored"
# vLLM's names of the storage formats (compressed_tensors.CompressionFormat).
FORMAT_NAMES = frozenset(
    {"dense", "mixed-precision", "naive-quantized", *(each.name for each in FORMATS)}
)
# If inputs and outputs are both static INT8, vLLM runs a separate scheme (_is_wNa8o8_int). vLLM
# ignores all other kinds of quantized outputs.
ACTIVATION_KEYS = ("input_activations", "output_activations")
# Activation orders that vLLM no longer supports (compressed_tensors.py,
# _quantization_scheme_map_from_config).
UNSUPPORTED_ACTORDER = ("group", "dynamic")


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on the quantization config."""
    config, place = view.quantization.values, view.quantization.place
    quantized = bool(view.layers.quantized)
    if config is None:
        if quantized or view.index.tensors:
            missing = rules.NO_QUANTIZATION_CONFIG if quantized else rules.UNQUANTIZED
            yield Finding.at(missing, place)
        return
    other = unsupported_method(view)
    if other is not None:
        if other not in view.model.facts.methods:
            version = short_version(view.model.target_version)
            methods = COMPRESSED_TENSORS, *METHODS
            yield Finding.at(
                rules.UNKNOWN_METHOD, place, value=other, version=version, methods=methods
            )
        return
    # This is not an error because a CI job may check the source on purpose.
    if view.index.tensors and not quantized and cache_scheme(view) is None:
        yield Finding.at(rules.UNQUANTIZED, place)
    if view.quantization.method is not None:
        yield from _method_findings(view, view.quantization.method)
        return
    yield from _compressed_tensors(view, config)


def _compressed_tensors(view: CheckpointView, config: Mapping[str, Json]) -> Iterator[Finding]:
    place = view.quantization.place
    method = config.get("quant_method")
    if not isinstance(method, str) or method.lower().replace("_", "-") != COMPRESSED_TENSORS:
        where = f"{place}.quant_method"
        yield Finding.at(rules.QUANT_METHOD, where, value=method, method=COMPRESSED_TENSORS)
        return
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or (not groups and view.layers.quantized):
        yield Finding.at(rules.CONFIG_GROUPS, f"{place}.config_groups", value=groups)
        return
    yield from _unreadable_groups(view, groups)
    yield from _sparsity(view, config)
    ignore = config.get("ignore", [])
    if isinstance(ignore, str):
        yield Finding.at(rules.STRING_OF_NAMES, f"{place}.ignore", value=ignore)
    elif not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        yield Finding.at(rules.LIST_OF_NAMES, f"{place}.ignore", value=ignore)
    problems = tuple(_patterns(view))
    yield from problems or _groups(view)


def _method_findings(view: CheckpointView, method: "QuantMethod") -> Iterator[Finding]:
    place = view.quantization.place
    for problem in method.problems:
        yield replace(problem, where=f"{place}.{problem.where}")
    used = [view.lookup.group_of(fused) for fused in view.layers.quantized]
    for name, refusal in dict.fromkeys(
        (group.name, group.refusal) for group in used if group is not None
    ):
        if refusal is not None:
            yield Finding.at(rules.UNSUPPORTED_ARGUMENTS, place, reason=f"{name}: {refusal}")


def _unreadable_groups(view: CheckpointView, groups: Mapping[str, Json]) -> Iterator[Finding]:
    for name, raw in groups.items():
        parsed = parse_group(name, raw, view.quantization.format)
        if isinstance(parsed, str) and not targets_attention(raw):
            where = f"{view.quantization.place}.config_groups.{name}"
            yield Finding.at(rules.INVALID_GROUP, where, reason=parsed)


def has_quantized_outputs(view: CheckpointView) -> bool:
    """Return True if vLLM runs a group in its scheme for static INT8 outputs.

    vexport does not check this scheme.
    """
    groups = (view.quantization.values or {}).get("config_groups")
    return any(
        isinstance(raw, dict)
        and all(_is_static_int8(parse_args(raw.get(side))) for side in ACTIVATION_KEYS)
        for raw in (groups.values() if isinstance(groups, dict) else ())
    )


def _is_static_int8(args: QuantArgs | str) -> bool:
    if isinstance(args, str):
        return False
    return (args.type, args.num_bits, args.strategy, args.dynamic) == ("int", 8, "tensor", False)


def _groups(view: CheckpointView) -> Iterator[Finding]:
    users = [
        (group.name, fused)
        for fused in view.model.fused_layers
        if (group := view.lookup.group_of(fused)) is not None
    ]
    used = {name for name, _ in users}
    routed = {name for name, fused in users if fused.experts is not None}
    for group in view.quantization.config_groups:
        where = f"{view.quantization.place}.config_groups.{group.name}"
        refusal = group.refusal if group.name in used else next(contradictions(group), None)
        order = group.weights.actorder
        is_reported = refusal is not None and f"actorder {order}" in refusal
        if order in UNSUPPORTED_ACTORDER and not is_reported:
            yield Finding.at(rules.ACTIVATION_ORDER, where, order=order)
        runs_experts = group.name not in routed or group.storage.runs_experts(group)
        if refusal is not None or not runs_experts:
            yield _refused_group(group, where, refusal)
        elif group.name in used and (inputs := group.storage.unquantized_inputs(group)):
            yield Finding.at(rules.IGNORED_INPUTS, where, inputs=inputs)


def _refused_group(group: ConfigGroup, where: str, refusal: str | None) -> Finding:
    arguments = described(group)
    if group.format not in FORMAT_NAMES:
        # vLLM's reason for an unknown combination only repeats the format.
        only_format = refusal is None or refusal.endswith(f"format {group.format}")
        return Finding.at(
            rules.UNKNOWN_FORMAT,
            where,
            format=group.format,
            version=short_version(),
            reason=arguments if only_format else refusal,
        )
    if refusal is None:
        return Finding.at(rules.EXPERT_ARGUMENTS, where, arguments=arguments, format=group.format)
    return Finding.at(rules.UNSUPPORTED_ARGUMENTS, where, reason=refusal)


def _sparsity(view: CheckpointView, config: Mapping[str, Json]) -> Iterator[Finding]:
    """Report a sparsity config that vLLM refuses.

    Source: _parse_sparsity_config of CompressedTensorsConfig.
    """
    sparsity = config.get("sparsity_config")
    usable = isinstance(sparsity, dict) and "format" in sparsity and not sparsity.get("targets")
    if sparsity and not usable:
        where = f"{view.quantization.place}.sparsity_config"
        yield Finding.at(rules.SPARSITY, where, value=sparsity)


def _patterns(view: CheckpointView) -> Iterator[Finding]:
    lists: dict[str, tuple[str, ...]] = {"ignore": view.quantization.ignore}
    for group in view.quantization.config_groups:
        lists[f"config_groups.{group.name}.targets"] = group.targets
    for key, entries in lists.items():
        for entry in entries:
            if entry.startswith(REGEX) and isinstance(
                problem := expression(entry.removeprefix(REGEX)), str
            ):
                where = f"{view.quantization.place}.{key}"
                yield Finding.at(rules.PATTERN, where, pattern=entry, reason=problem)


def unsupported_method(view: CheckpointView) -> str | None:
    """Return the name of a quantization method that vexport does not check, or None."""
    name = method_name(view.quantization.values) if view.quantization.values is not None else None
    return None if name in METHODS else name


def transforms(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on the online transforms in the config.

    Transforms that are merged into the weights are not checked, because vLLM does not compute them.
    """
    where = f"{view.quantization.place}.transform_config"
    for transform in view.quantization.transforms:
        if transform.location not in (INPUT, OUTPUT):
            place = f"{where}.{transform.scheme}"
            yield Finding.at(transform_rules.LOCATION, place, location=transform.location)
            continue
        yield from _matrix(view, transform)
        for fused in view.model.fused_layers:
            yield from _transformed_layer(view, transform, fused)
    several = [ranks for ranks in view.target.tp if ranks > 1]
    if several and view.quantization.transforms:
        yield Finding.at(
            transform_rules.SEVERAL_RANKS,
            f"{where} (tp {'/'.join(map(str, several))})",
            tp=several,
            names=sorted({transform.submodule for transform in view.quantization.transforms}),
        )


def _matrix(view: CheckpointView, transform: OnlineTransform) -> Iterator[Finding]:
    """Report a transform without a stored matrix.

    Every producer stores the matrix. If it is missing, vLLM multiplies by uninitialized memory
    (SharedWeightParameter), or rotates a layer's inputs although its weight has no opposite
    rotation.
    """
    name = f"{transform.submodule}.weight"
    if not any(tensor.endswith(f".{name}") for tensor in view.index.tensors):
        yield Finding.at(transform_rules.NO_MATRIX, name, kind=transform.kind)


def _transformed_layer(
    view: CheckpointView, transform: OnlineTransform, fused: FusedLayer
) -> Iterator[Finding]:
    rotated = [member for member in fused.members if transform.applies(member)]
    if not rotated:
        return
    name = transform.submodule
    if moe_layer(rotated[0]) is not None:
        yield Finding.at(transform_rules.EXPERTS, fused.name, name=name)
    elif transform.location == INPUT and len(rotated) < len(fused.members):
        yield Finding.at(transform_rules.PART_OF_FUSED_LAYER, fused.name, name=name, layers=rotated)
    if any("bias" in view.model.modules[member] for member in rotated):
        yield Finding.at(transform_rules.BIAS, fused.name, name=name)
