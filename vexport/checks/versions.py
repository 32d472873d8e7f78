"""Check whether the selected version of vLLM supports a checkpoint.

The option `--vllm` selects the version. By default it is `PINNED`, or a later version if only that
version has the model's class. The features of each version come from files that
scripts/generate_versions.py creates from the wheels. The other checks contain the rules of
`PINNED`.
"""

from collections.abc import Iterator

from vexport.architectures.versions import VersionFacts, facts_of, known_versions
from vexport.checks.vllm.findings import error, warning
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.view import CheckpointView
from vexport.formats import MXFP4, PACKED
from vexport.records import Finding
from vexport.version import PINNED, Version, short_version

NAME = "versions"
DESCRIPTION = "the chosen version of vLLM (--vllm) supports the schemes, bit widths and model class"
FIX_LOAD = "load it in that version: `vexport load CHECKPOINT --dry --vllm-python PATH`"
FIX_VERSION = "serve it with another version of vLLM, or use another scheme"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on differences between the target version of vLLM and the pinned version."""
    target, version = view.model.target_version, view.model.version
    name, pinned = f"vLLM {short_version(version)}", short_version(PINNED)
    if target != version:
        oldest, *_, newest = map(short_version, known_versions())
        expected = f"a version of vLLM that vexport has rules for ({oldest} to {newest})"
        got = f"another version, checked by the rules of vLLM {short_version(version)}"
        yield warning(
            NAME,
            f"vLLM {short_version(target)}",
            claim=None,
            expected=expected,
            got=got,
            fix=FIX_LOAD,
        )
    if version == PINNED:
        return
    if view.model.class_name in facts_of(version).absent:
        where = f"{view.config_path}: architectures"
        got = f"{view.model.class_name}, which {name} does not have"
        fix = f"serve it with vLLM {pinned}"
        yield error(
            NAME, where, claim="refused", expected=f"a model class of {name}", got=got, fix=fix
        )
    method = view.quantization.method
    if method is not None:
        if not facts_of(version).has_rules_for(method.name):
            expected = f"a version of vLLM for which vexport has rules for {method.name}"
            got = f"{name}, checked by the rules of vLLM {pinned}"
            yield warning(
                NAME,
                view.quantization.place,
                claim=None,
                expected=expected,
                got=got,
                fix=FIX_LOAD,
            )
        return
    found = [view.lookup.group_of(fused) for fused in view.model.fused_layers]
    used = {group.name for group in found if group is not None}
    for group in (group for group in view.quantization.config_groups if group.name in used):
        where = f"{view.quantization.place}.config_groups.{group.name}"
        if refused := _unsupported_zero_points(group, facts_of(version)):
            expected = f"a version of vLLM that supports {refused}"
            yield error(
                NAME,
                where,
                claim="refused",
                expected=expected,
                got=f"{name}, which does not support {refused}",
                fix=FIX_VERSION,
            )
        elif group.storage is MXFP4 and not _has_class(MXFP4.vllm_scheme(group), version):
            expected = "a version of vLLM that supports MXFP4 weights with FP8 inputs"
            got = f"{name}, which quantizes the inputs to MXFP4 on GPUs with FP4 kernels"
            yield warning(
                NAME, where, claim="precision", expected=expected, got=got, fix=FIX_VERSION
            )


def _has_class(name: str, version: Version) -> bool:
    """Return True if a version has a class for linear layers."""
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
