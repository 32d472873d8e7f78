"""Can vLLM read the quantization config at all?"""

import re
from collections.abc import Iterator, Mapping

from vexport.architectures.fusion import moe_layer
from vexport.checks.vllm.arguments import ConfigGroup, contradictions, of_attention, parse_args, parse_group
from vexport.checks.vllm.methods import METHOD, findings, other_method
from vexport.checks.vllm.routed import refusal
from vexport.checks.vllm.scheme import scheme_of
from vexport.checks.vllm.subject import Subject, error, warning
from vexport.checks.vllm.target import Version
from vexport.types import Finding, Json

NAME = "config"
DESCRIPTION = "quantization_config is there and every config group is one that vLLM accepts"
# vLLM's names of the storage formats (compressed_tensors.CompressionFormat).
FORMATS = frozenset(
    {
        "dense",
        "float-quantized",
        "int-quantized",
        "mixed-precision",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "pack-quantized",
    }
)
# With both of them in static INT8 vLLM runs another scheme (_is_wNa8o8_int); other outputs it passes over.
SIDES = ("input_activations", "output_activations")
OUTPUTS = "static INT8, which vLLM runs in a scheme that vexport does not judge (CompressedTensorsWNA8O8Int)"
# Activation ordering that vLLM no longer runs (compressed_tensors.py, _quantization_scheme_map_from_config).
REFUSED_ORDERING = ("group", "dynamic")
ORDERED_UNTIL: Version = (0, 30)


def run(subject: Subject) -> Iterator[Finding]:
    """Findings on the quantization config."""
    config = subject.quantization
    if config is None:
        if any(unit.is_quantized for unit in subject.units):
            yield _finding(
                subject, "", "a quantization_config for the quantized tensors", "no such key", "export again"
            )
        return
    other = other_method(subject)
    if other is not None:
        yield from findings(subject, other, NAME)
        return
    method = config.get("quant_method")
    if not isinstance(method, str) or method.lower().replace("_", "-") != METHOD:
        fix = f"set quant_method to {METHOD}"
        yield _finding(subject, "quant_method", f"{METHOD}, as the other keys say", repr(method), fix)
        return
    if method != METHOD:
        where = f"{subject.quantization_place}.quant_method"
        fix = "set quant_method: other loaders than vLLM's compare it"
        yield warning(NAME, where, expected=METHOD, got=repr(method), fix=fix)
    groups = config.get("config_groups")
    quantized = any(unit.is_quantized for unit in subject.units)
    if not isinstance(groups, dict) or (not groups and quantized):
        yield _finding(subject, "config_groups", "at least one group", repr(groups), "export again")
        return
    yield from _unreadable(subject, groups)
    yield from _sparsity(subject, config)
    yield from _ignore(subject, config)
    problems = tuple(_patterns(subject))
    yield from problems or _groups(subject)


def _unreadable(subject: Subject, groups: Mapping[str, Json]) -> Iterator[Finding]:
    for name, raw in groups.items():
        parsed = None if of_attention(raw) else parse_group(name, raw, subject.format)
        if isinstance(parsed, str):
            expected = "arguments that compressed-tensors accepts"
            yield _finding(subject, f"config_groups.{name}", expected, parsed, "correct the group")
        elif isinstance(raw, dict) and all(_is_static_int8(raw.get(side)) for side in SIDES):
            place, expected = f"config_groups.{name}.output_activations", "no quantized outputs"
            fix = "ask vLLM itself with `vexport load`, or quantize without them"
            yield _finding(subject, place, expected, OUTPUTS, fix)


def _is_static_int8(raw: Json) -> bool:
    args = parse_args(raw)
    if isinstance(args, str):
        return False
    return (args.type, args.num_bits, args.strategy, args.dynamic) == ("int", 8, "tensor", False)


def _ignore(subject: Subject, config: Mapping[str, Json]) -> Iterator[Finding]:
    ignore = config.get("ignore", [])
    if isinstance(ignore, str):
        where, expected = f"{subject.quantization_place}.ignore", "a list of names"
        got = f"{ignore!r}, of which vLLM takes each letter for a name"
        yield warning(NAME, where, expected=expected, got=got, fix="put it into a list")
    elif not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        yield _finding(subject, "ignore", "a list of names", repr(ignore), "set it, to [] for none")


def _groups(subject: Subject) -> Iterator[Finding]:
    users = [(group.name, unit) for unit in subject.units if (group := subject.group_of(unit)) is not None]
    used = {name for name, _ in users}
    routed = {name for name, unit in users if moe_layer(next(iter(unit.members))) is not None}
    for group in subject.config_groups:
        place = f"config_groups.{group.name}"
        if group.weights.actorder in REFUSED_ORDERING and subject.target.vllm >= ORDERED_UNTIL:
            got = f"actorder {group.weights.actorder}"
            yield _finding(
                subject, place, "no activation ordering, or actorder weight", got, "quantize again"
            )
        found = scheme_of(group) if group.name in used else _contradiction(group)
        if not isinstance(found, str) and group.name in routed:
            found = refusal(group)
        if isinstance(found, str):
            yield _finding(
                subject,
                place,
                "arguments and a format that one of vLLM's schemes runs",
                found,
                "correct them",
            )


def _contradiction(group: ConfigGroup) -> str | None:
    """What is refused even of a group that no layer gets."""
    args = (group.weights, *([group.input_activations] if group.input_activations else []))
    return next((reason for each in args for reason in contradictions(each)), None)


def _sparsity(subject: Subject, config: Mapping[str, Json]) -> Iterator[Finding]:
    """Source: _parse_sparsity_config of CompressedTensorsConfig."""
    sparsity = config.get("sparsity_config")
    if sparsity and not isinstance(sparsity, dict):
        yield _finding(subject, "sparsity_config", "no such key", repr(sparsity), "remove it")
    if isinstance(sparsity, dict) and (sparsity.get("targets") or sparsity and "format" not in sparsity):
        got = (
            f"one with targets {sparsity.get('targets')}" if sparsity.get("targets") else "one without format"
        )
        expected = "no sparsity, which vLLM no longer loads"
        yield _finding(subject, "sparsity_config", expected, got, "export without sparsity compression")


def _patterns(subject: Subject) -> Iterator[Finding]:
    """Regular expressions that Python refuses, in targets and ignore."""
    lists = {"ignore": subject.ignore}
    lists |= {f"config_groups.{group.name}.targets": group.targets for group in subject.config_groups}
    for place, entries in lists.items():
        for entry in entries:
            try:
                re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
            except re.error as problem:
                yield _finding(subject, place, "regular expressions", f"{entry}: {problem}", "correct it")


def _finding(subject: Subject, place: str, expected: str, got: str, fix: str) -> Finding:
    where = subject.quantization_place + (f".{place}" if place else "")
    return error(NAME, where, expected=expected, got=got, fix=fix)
