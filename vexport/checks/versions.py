"""Check whether the selected version of vLLM supports a checkpoint.

The option `--vllm` selects the version. By default it is `PINNED`, or a later version if only that
version has the model's class. The features of each version come from files that
scripts/generate_versions.py creates from the wheels. The other checks contain the rules of
`PINNED`.
"""

from collections.abc import Iterator

from vexport.architectures.fusion import is_head
from vexport.architectures.versions import VersionFacts, facts_of, known_versions
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.view import CheckpointView
from vexport.formats import MXFP4, PACKED
from vexport.formats.gpus import GENERATIONS
from vexport.formats.integer import VLLM_GROUPS
from vexport.records import Finding
from vexport.rules import versions as rules
from vexport.version import PINNED, Version, short_version

DESCRIPTION = "the chosen version of vLLM (--vllm) supports the schemes, bit widths and model class"

# Classes of linear layers that run with Humming's kernel on every GPU (_POSSIBLE_WFP8A16_KERNELS in
# vllm/model_executor/kernels/linear/__init__.py).
HUMMING_CLASSES = ("CompressedTensorsW8A16Fp8",)


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on differences between the target version of vLLM and the pinned version."""
    target, version = view.model.target_version, view.model.version
    name, pinned = short_version(version), short_version(PINNED)
    if target != version:
        oldest, *_, newest = map(short_version, known_versions())
        yield Finding.at(
            rules.UNKNOWN_VERSION,
            f"vLLM {short_version(target)}",
            judged_by=name,
            oldest=oldest,
            newest=newest,
        )
    if version == PINNED:
        return
    model = view.model.class_name
    if model in facts_of(version).absent:
        where = f"{view.config_path}: architectures"
        yield Finding.at(rules.MODEL_CLASS, where, model=model, version=name, newer=pinned)
    method = view.quantization.method
    if method is None:
        yield from _groups(view, version)
        if not facts_of(version).humming_heads:
            yield from _heads(view, version)
    elif not facts_of(version).has_rules_for(method.name):
        yield Finding.at(
            rules.UNKNOWN_METHOD,
            view.quantization.place,
            version=name,
            judged_by=pinned,
            method=method.name,
        )


def _groups(view: CheckpointView, version: Version) -> Iterator[Finding]:
    found = [view.lookup.group_of(fused) for fused in view.model.fused_layers]
    used = {group.name for group in found if group is not None}
    name = short_version(version)
    for group in (group for group in view.quantization.config_groups if group.name in used):
        where = f"{view.quantization.place}.config_groups.{group.name}"
        if refused := _unsupported_zero_points(group, facts_of(version)):
            yield Finding.at(rules.ZERO_POINTS, where, version=name, zero_points=refused)
        elif group.storage is MXFP4 and not _has_class(MXFP4.vllm_scheme(group), version):
            yield Finding.at(rules.MXFP4_INPUTS, where, version=name)


def _heads(view: CheckpointView, version: Version) -> Iterator[Finding]:
    """Yield findings on quantized output heads that run with Humming's kernels.

    It is an error if the kernel is selected on one of the target's GPUs, or on every GPU that loads
    the scheme. If no GPU is given and other GPUs run the head, it is a warning.
    """
    facts = facts_of(version)
    newer = min(
        each for each in known_versions() if each > version and facts_of(each).humming_heads
    )
    for fused in view.model.fused_layers:
        group = view.lookup.group_of(fused) if is_head(fused.name) else None
        if group is None or not view.layers.is_quantized(fused):
            continue
        loading = [
            sm
            for sm in view.target.sm or sorted(GENERATIONS)
            if facts.selected_class(group.storage.vllm_scheme(group), sm)
        ]
        failing = [sm for sm in loading if _runs_with_humming(group, facts, sm)]
        if failing:
            fails = view.target.sm or failing == loading
            rule = rules.QUANTIZED_HEAD if fails else rules.QUANTIZED_HEAD.as_warning
            yield Finding.at(
                rule,
                fused.name,
                version=short_version(version),
                gpus=[f"SM {sm}" for sm in failing],
                newer=short_version(newer),
            )


def _runs_with_humming(group: ConfigGroup, facts: VersionFacts, sm: int) -> bool:
    """Return True if vLLM selects Humming's kernel for a layer on a GPU that loads the scheme."""
    if group.storage is PACKED:
        weights = group.weights
        return weights.group_size not in VLLM_GROUPS.get(weights.num_bits, ())
    return facts.selected_class(group.storage.vllm_scheme(group), sm) in HUMMING_CLASSES


def _has_class(name: str, version: Version) -> bool:
    selected = facts_of(version).schemes.get(name, {})
    return name in selected.values()


def _unsupported_zero_points(group: ConfigGroup, facts: VersionFacts) -> str | None:
    """Describe a group's zero points if the version does not support them, else return None.

    Sources: schemes/compressed_tensors_wNa16.py and wNa8.py.
    """
    bits, inputs = group.weights.num_bits, group.input_activations
    if group.storage is not PACKED or group.weights.symmetric:
        return None
    if inputs is not None and not inputs.is_float:
        # vLLM versions with more than two widths of asymmetric weights also support zero points in
        # schemes with integer inputs.
        known = len(facts.asymmetric_widths) > 2
        return None if known else "zero points of packed integers with integer inputs"
    return None if bits in facts.asymmetric_widths else f"zero points of {bits} bits"
