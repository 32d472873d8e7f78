"""Does the vLLM that was asked for have what the checkpoint needs? All other checks are true of `PINNED`.

Which version has what comes from the files that scripts/generate_versions.py reads from the wheels.
"""

from collections.abc import Iterator

from vexport.architectures.versions import VersionFacts, facts_of, known_versions, nearest_version
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.formats import MXFP4, PACKED
from vexport.records import Finding
from vexport.version import PINNED, short_version

NAME = "versions"
DESCRIPTION = "the vLLM version asked for (--vllm) has the schemes, widths and model class that are needed"
LOAD = "load it in that version: vexport load --dry --vllm-python"
SERVE = "serve it with another version, or use another scheme"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on what the version that was asked for does differently from the pinned one."""
    asked, version = view.target.vllm, nearest_version(view.target.vllm)
    name, pinned = f"vLLM {short_version(version)}", short_version(PINNED)
    if asked != version:
        oldest, *_, newest = map(short_version, known_versions())
        expected = f"one of the versions whose rules are known, {oldest} to {newest}"
        got = f"unknown: checked by the rules of {short_version(version)}"
        yield warning(NAME, f"vLLM {short_version(asked)}", expected=expected, got=got, fix=LOAD)
    if version == PINNED:
        return
    if view.class_name in facts_of(version).absent:
        where, got = f"{view.config_path}: architectures", f"{view.class_name}, which it does not have"
        fix = f"serve it with vLLM {pinned}"
        yield error(NAME, where, expected=f"a model class of {name}", got=got, fix=fix)
    if view.method is not None:
        expected = f"vLLM {pinned}, whose rules for {view.method.name} are known"
        got = f"{name}: checked by the rules of {pinned}"
        yield warning(NAME, view.quantization_place, expected=expected, got=got, fix=LOAD)
        return
    used = {group.name for fused in view.fused_linears if (group := view.group_of(fused)) is not None}
    for group in (group for group in view.config_groups if group.name in used):
        where = f"{view.quantization_place}.config_groups.{group.name}"
        if refused := _refused(group, facts_of(version)):
            expected = f"a vLLM that has {refused}"
            yield error(NAME, where, expected=expected, got=f"{name}, which refuses them", fix=SERVE)
        elif group.storage is MXFP4 and MXFP4.vllm_scheme(group) not in facts_of(version).schemes:
            expected = "a vLLM that has MXFP4 weights with FP8 inputs"
            got = f"{name}, which takes the inputs for MXFP4's, where it has FP4 kernels"
            yield warning(NAME, where, expected=expected, got=got, fix=SERVE)


def _refused(group: ConfigGroup, facts: VersionFacts) -> str | None:
    """The zero points of a group that a version lacks (schemes/compressed_tensors_wNa16.py, wNa8.py)."""
    bits, inputs = group.weights.num_bits, group.input_activations
    if group.storage is not PACKED or group.weights.symmetric:
        return None
    if inputs is not None and not inputs.is_float:
        # The wider table came with the parameter for zero points in schemes with integer inputs.
        known = len(facts.asymmetric_widths) > 2
        return None if known else "zero points of packed integers with integer inputs"
    return None if bits in facts.asymmetric_widths else f"zero points of {bits} bits"
