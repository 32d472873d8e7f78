"""Check whether the selected version of vLLM supports a checkpoint.

The option `--vllm` selects the version. By default it is `PINNED`, or a later version if only that
version has the model's class. The features of each version come from files that
scripts/generate_versions.py creates from the wheels. The other checks contain the rules of
`PINNED`.
"""

from collections.abc import Iterator

from vexport.architectures.versions import VersionFacts, facts_of, known_versions
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.view import CheckpointView
from vexport.formats import MXFP4, PACKED
from vexport.records import Finding
from vexport.rules import versions as rules
from vexport.version import PINNED, Version, short_version

DESCRIPTION = "the chosen version of vLLM (--vllm) supports the schemes, bit widths and model class"


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
