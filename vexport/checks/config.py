"""Check that vLLM can read the quantization config and compute its online rotations."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from vexport.architectures.config import shown
from vexport.architectures.fusion import FusedLayer, moe_layer
from vexport.checks.kv_cache import cache_scheme
from vexport.checks.vllm.findings import error, warning
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
from vexport.records import Claim, Finding, Json
from vexport.records.patterns import REGEX, expression
from vexport.version import short_version

if TYPE_CHECKING:
    from vexport.checks.vllm.quant_methods.base import QuantMethod

NAME = "config"
DESCRIPTION = "quantization_config exists, and vLLM supports every config group"
TRANSFORMS_NAME = "transforms"
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
    config = view.quantization.values
    quantized = bool(view.layers.quantized)
    if config is None:
        yield from _without_config(view, quantized=quantized)
        return
    other = unsupported_method(view)
    if other is not None:
        yield from _unsupported_method_finding(view, other)
        return
    if view.index.tensors and not quantized and cache_scheme(view) is None:
        yield _unquantized_checkpoint(
            view, "no layer with quantized tensors and no quantized KV cache"
        )
    if view.quantization.method is not None:
        yield from _method_findings(view, view.quantization.method)
        return
    method = config.get("quant_method")
    if not isinstance(method, str) or method.lower().replace("_", "-") != COMPRESSED_TENSORS:
        fix = f"set quant_method to {COMPRESSED_TENSORS}"
        expected = f"{COMPRESSED_TENSORS}, because the other keys belong to this method"
        got = "no such key, or null" if method is None else shown(method)
        yield _finding(view, "quant_method", expected, got, fix)
        return
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or (not groups and quantized):
        fix = "export the checkpoint again"
        yield _finding(view, "config_groups", "at least one group", shown(groups), fix)
        return
    yield from _unreadable_groups(view, groups)
    yield from _sparsity(view, config)
    ignore = config.get("ignore", [])
    if isinstance(ignore, str):
        where = f"{view.quantization.place}.ignore"
        got = f"the string {shown(ignore)}: vLLM takes each letter as a name"
        fix = "put the string into a list"
        yield warning(NAME, where, claim=None, expected="a list of names", got=got, fix=fix)
    elif not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        fix = "write a list of names, or [] to ignore no layer"
        yield _finding(view, "ignore", "a list of names", shown(ignore), fix)
    problems = tuple(_patterns(view))
    yield from problems or _groups(view)


def _without_config(view: CheckpointView, *, quantized: bool) -> Iterator[Finding]:
    if quantized:
        expected = "a quantization_config, because the checkpoint has quantized tensors"
        yield _finding(view, "", expected, "no such key", "export the checkpoint again")
    elif view.index.tensors:
        yield _unquantized_checkpoint(view, "no such key: vLLM would run every layer in 16 bits")


def _unquantized_checkpoint(view: CheckpointView, got: str) -> Finding:
    """Return a warning that the checkpoint is not quantized.

    This is not an error because a CI job may check the source on purpose.
    """
    expected = "a quantized checkpoint"
    fix = "check the quantized checkpoint instead, if this is the unquantized model"
    return warning(
        NAME, view.quantization.place, claim="precision", expected=expected, got=got, fix=fix
    )


def _method_findings(view: CheckpointView, method: "QuantMethod") -> Iterator[Finding]:
    """Yield findings on another method's config.

    They report keys that vLLM refuses or misreads, and arguments that it does not support.
    """
    for problem in method.problems:
        yield replace(problem, check=NAME, where=f"{view.quantization.place}.{problem.where}")
    used = [view.lookup.group_of(fused) for fused in view.layers.quantized]
    for name, refusal in dict.fromkeys(
        (group.name, group.refusal) for group in used if group is not None
    ):
        if refusal is not None:
            expected = f"arguments that vLLM supports ({method.source})"
            fix = "quantize the source again (`vexport quantize`)"
            yield _finding(view, "", expected, f"{name}: {refusal}", fix)


def _unreadable_groups(view: CheckpointView, groups: Mapping[str, Json]) -> Iterator[Finding]:
    for name, raw in groups.items():
        parsed = (
            None if targets_attention(raw) else parse_group(name, raw, view.quantization.format)
        )
        if isinstance(parsed, str):
            expected = "arguments that compressed-tensors accepts"
            fix = "correct the config group"
            yield _finding(view, f"config_groups.{name}", expected, parsed, fix)


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
    kind = (
        None if isinstance(args, str) else (args.type, args.num_bits, args.strategy, args.dynamic)
    )
    return kind == ("int", 8, "tensor", False)


def _groups(view: CheckpointView) -> Iterator[Finding]:
    """Report config groups that vLLM refuses, and input_activations that it ignores."""
    users = [
        (group.name, fused)
        for fused in view.model.fused_layers
        if (group := view.lookup.group_of(fused)) is not None
    ]
    used = {name for name, _ in users}
    routed = {name for name, fused in users if fused.experts is not None}
    for group in view.quantization.config_groups:
        key = f"config_groups.{group.name}"
        refusal = group.refusal if group.name in used else next(contradictions(group), None)
        ordering = f"actorder {group.weights.actorder}"
        is_reported = refusal is not None and ordering in refusal
        if group.weights.actorder in UNSUPPORTED_ACTORDER and not is_reported:
            expected = "no activation ordering, or actorder weight"
            fix = "quantize again with one of these orderings"
            yield _finding(view, key, expected, ordering, fix)
        if refusal is None and group.name in routed and not group.storage.runs_experts(group):
            refusal = f"a combination that vLLM does not run for routed experts: {described(group)}"
            refusal += f", format {group.format}"
        if refusal is not None and group.format not in FORMAT_NAMES:
            # The description of an unknown combination contains the format, too.
            format_name = f"format {group.format}"
            reason = described(group) if refusal.endswith(format_name) else refusal
            refusal = f"{format_name}, which vLLM {short_version()} does not support: {reason}"
        if refusal is not None:
            expected = "arguments and a format that vLLM supports"
            fix = "correct the arguments or the format, or quantize again"
            yield _finding(view, key, expected, refusal, fix)
        elif group.name in used:
            yield from _unquantized_inputs(view, group)


def _unquantized_inputs(view: CheckpointView, group: ConfigGroup) -> Iterator[Finding]:
    """Report input_activations that vLLM ignores, so that the inputs stay in 16 bits."""
    inputs = group.storage.unquantized_inputs(group)
    if inputs is None:
        return
    where = f"{view.quantization.place}.config_groups.{group.name}"
    expected = "input_activations that vLLM quantizes"
    got = f"inputs that vLLM leaves in 16 bits: {inputs}"
    fix = "remove input_activations and the input scales, or quantize again (same accuracy)"
    yield warning(NAME, where, claim="precision", expected=expected, got=got, fix=fix)


def _sparsity(view: CheckpointView, config: Mapping[str, Json]) -> Iterator[Finding]:
    """Report a sparsity config that vLLM refuses.

    Source: _parse_sparsity_config of CompressedTensorsConfig.
    """
    sparsity = config.get("sparsity_config")
    usable = isinstance(sparsity, dict) and "format" in sparsity and not sparsity.get("targets")
    if sparsity and not usable:
        expected = "no sparsity_config, because vLLM no longer loads sparse weights"
        fix = "export the checkpoint without sparsity compression"
        yield _finding(view, "sparsity_config", expected, shown(sparsity), fix)


def _patterns(view: CheckpointView) -> Iterator[Finding]:
    """Report invalid regular expressions in targets and ignore."""
    lists: dict[str, tuple[str, ...]] = {"ignore": view.quantization.ignore}
    for group in view.quantization.config_groups:
        lists[f"config_groups.{group.name}.targets"] = group.targets
    for key, entries in lists.items():
        for entry in entries:
            problem = expression(entry.removeprefix(REGEX)) if entry.startswith(REGEX) else None
            if isinstance(problem, str):
                got = f"{entry}: {problem}"
                yield _finding(view, key, "valid regular expressions", got, "correct the pattern")


def _finding(view: CheckpointView, key: str, expected: str, got: str, fix: str) -> Finding:
    where = view.quantization.place + (f".{key}" if key else "")
    return error(NAME, where, claim="refused", expected=expected, got=got, fix=fix)


def unsupported_method(view: CheckpointView) -> str | None:
    """Return the name of a quantization method that vexport does not check, or None."""
    name = method_name(view.quantization.values) if view.quantization.values is not None else None
    return None if name in METHODS else name


def _unsupported_method_finding(view: CheckpointView, method: str) -> Iterator[Finding]:
    """Report that vLLM does not support the checkpoint's quantization method."""
    if method in view.model.facts.methods:
        return
    vllm = short_version(view.model.target_version)
    expected = f"{COMPRESSED_TENSORS}, or another method that vexport checks: {', '.join(METHODS)}"
    got = f"{shown(method)}, which vLLM {vllm} does not support"
    fix = "quantize the source with a supported method"
    yield error(NAME, view.quantization.place, claim="refused", expected=expected, got=got, fix=fix)


def transforms(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on the online transforms in the config.

    Transforms that are merged into the weights are not checked, because vLLM does not compute them.
    """
    where = f"{view.quantization.place}.transform_config"
    for transform in view.quantization.transforms:
        if transform.location not in (INPUT, OUTPUT):
            expected = "transforms of the inputs or outputs of linear layers (vLLM has no others)"
            got = f"a transform at {transform.location}"
            yield _transform_finding(f"{where}.{transform.scheme}", expected, got, claim="values")
            continue
        yield from _matrix(view, transform)
        for fused in view.model.fused_layers:
            yield from _transformed_layer(view, transform, fused)
    several = [ranks for ranks in view.target.tp if ranks > 1]
    if several and view.quantization.transforms:
        expected = "no online transforms, because vLLM only computes them on a single rank"
        names = sorted({transform.submodule for transform in view.quantization.transforms})
        got = (
            f"the transforms {', '.join(names)}" if len(names) > 1 else f"the transform {names[0]}"
        )
        fix = "serve it on one GPU, or merge the rotations into the weights"
        yield error(
            TRANSFORMS_NAME,
            f"{where} (tp {'/'.join(map(str, several))})",
            claim="refused",
            expected=expected,
            got=got,
            fix=fix,
            tp=several,
        )


def _matrix(view: CheckpointView, transform: OnlineTransform) -> Iterator[Finding]:
    """Report a transform without a stored matrix.

    Every producer stores the matrix. If it is missing, vLLM multiplies by uninitialized memory
    (SharedWeightParameter), or rotates a layer's inputs although its weight has no opposite
    rotation.
    """
    if not any(name.endswith(f".{transform.submodule}.weight") for name in view.index.tensors):
        expected = f"the matrix of the {transform.kind} transform, stored with one of its layers"
        yield _transform_finding(
            f"{transform.submodule}.weight", expected, "no such tensor", claim="values"
        )


def _transformed_layer(
    view: CheckpointView, transform: OnlineTransform, fused: FusedLayer
) -> Iterator[Finding]:
    """Report a transform that vLLM cannot apply to a fused layer."""
    rotated = [member for member in fused.members if transform.applies(member)]
    if not rotated:
        return
    if moe_layer(rotated[0]) is not None:
        expected = "no online transform of routed experts, because vLLM does not compute it"
        yield _transform_finding(
            fused.name, expected, f"the transform {transform.submodule}", claim="values"
        )
    elif transform.location == INPUT and len(rotated) < len(fused.members):
        expected = "the same input transform for all layers that vLLM fuses"
        yield _transform_finding(
            fused.name,
            expected,
            f"{transform.submodule} only for {' and '.join(rotated)}",
            claim="refused",
        )
    if any("bias" in view.model.modules[member] for member in rotated):
        expected = "no bias in layers with an online transform (vLLM asserts this)"
        got = f"a bias, and the transform {transform.submodule}"
        yield _transform_finding(fused.name, expected, got, claim="refused")


def _transform_finding(where: str, expected: str, got: str, *, claim: Claim) -> Finding:
    return error(
        TRANSFORMS_NAME,
        where,
        claim=claim,
        expected=expected,
        got=got,
        fix="use only rotations that are merged into the weights (R1, R2)",
    )
