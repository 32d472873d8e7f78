"""Does the vLLM that was asked for have what the checkpoint needs? All other checks are true of `PINNED`.

Which version has what comes from the files that scripts/generate_versions.py reads from the wheels. Where a
rule names its first version, that is no literal of the source: it was read in `source`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vexport.architectures.versions import VersionFacts, facts_of, known_versions, nearest_version
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.layers import FusedLinear
from vexport.checks.vllm.view import CheckpointView
from vexport.formats import MXFP4, PACKED
from vexport.types import Finding, Severity
from vexport.version import PINNED, Version, short_version

NAME = "versions"
DESCRIPTION = "the vLLM version asked for (--vllm) has the schemes, widths and model class that are needed"
# Every version whose wheel was read.
KNOWN: Sequence[Version] = known_versions()
ODD_WIDTHS = (3, 5, 6, 7)
NARROW_WIDTHS = (2, *ODD_WIDTHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What vLLM does where a version `has` it, and what it does otherwise."""

    what: str
    applies: Callable[[ConfigGroup, FusedLinear], bool]
    otherwise: str
    severity: Severity = "error"
    has: Callable[[VersionFacts, ConfigGroup], bool]
    source: str

    def since(self, group: ConfigGroup) -> Version | None:
        """The first known version that has it for a group."""
        return next((version for version in KNOWN if self.has(facts_of(version), group)), None)


def from_version(first: Version) -> Callable[[VersionFacts, ConfigGroup], bool]:
    """What no literal of the source tells, from a version on."""
    return lambda facts, group: known_version(facts) >= first


def known_version(facts: VersionFacts) -> Version:
    """Major and minor number."""
    major, minor, *_ = facts.vllm.split(".")
    return int(major), int(minor)


def _is_packed(group: ConfigGroup) -> bool:
    return group.storage is PACKED


def _is_mxfp4(group: ConfigGroup) -> bool:
    return group.storage is MXFP4


def _inputs(group: ConfigGroup) -> tuple[str, int] | None:
    inputs = group.input_activations
    return (inputs.type, inputs.num_bits) if inputs else None


DIFFERENCES: Sequence[Difference] = (
    Difference(
        what="zero points for widths other than 4 and 8 bits",
        applies=lambda group, fused: (
            _is_packed(group) and not group.weights.symmetric and group.weights.num_bits in NARROW_WIDTHS
        ),
        otherwise="refuses asymmetric weights of that width",
        has=lambda facts, group: group.weights.num_bits in facts.asymmetric_widths,
        source="schemes/compressed_tensors_wNa16.py, WNA16_ZP_SUPPORTED_TYPES_MAP",
    ),
    Difference(
        what="zero points of packed integers with integer inputs",
        applies=lambda group, fused: (
            _is_packed(group) and not group.weights.symmetric and _inputs(group) in (("int", 8), ("int", 4))
        ),
        otherwise="has no parameter for zero points",
        has=from_version((0, 31)),
        source="schemes/compressed_tensors_wNa8.py",
    ),
    Difference(
        what="MXFP4 weights with FP8 inputs",
        applies=lambda group, fused: _is_mxfp4(group) and _inputs(group) == ("float", 8),
        otherwise="takes them for MXFP4 inputs: FP4 activations where it has FP4 kernels",
        severity="warning",
        has=lambda facts, group: "CompressedTensorsW4A8Mxfp4" in facts.schemes,
        source="schemes/compressed_tensors_w4a8_mxfp4.py",
    ),
)


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on what the version that was asked for does differently from the pinned one."""
    asked = view.target.vllm
    version = nearest_version(asked)
    if asked != version:
        yield _unknown(asked, version)
    if version == PINNED:
        return
    yield from _class(view, version)
    if view.method is not None:
        yield _method(view.method.name, view.quantization_place, version)
    fused_linears = [
        (group, fused) for fused in view.fused_linears if (group := view.group_of(fused)) is not None
    ]
    for difference in DIFFERENCES:
        named = [(group, fused.name) for group, fused in fused_linears if difference.applies(group, fused)]
        lacking = [(group, name) for group, name in named if not difference.has(facts_of(version), group)]
        if lacking:
            names = [name for _, name in lacking]
            yield _differs(difference, names, version, difference.since(lacking[0][0]))


def _class(view: CheckpointView, version: Version) -> Iterator[Finding]:
    if view.class_name in facts_of(version).absent:
        has = short_version(PINNED)
        yield Finding(
            check=NAME,
            severity="error",
            where=f"{view.config_path}: architectures",
            expected=f"a model class of vLLM {short_version(version)}",
            got=f"{view.class_name}, which it does not have",
            fix=f"serve it with vLLM {has}",
        )


def _method(name: str, where: str, version: Version) -> Finding:
    """Rules of other methods are known for one version only."""
    pinned = short_version(PINNED)
    return Finding(
        check=NAME,
        severity="warning",
        where=where,
        expected=f"vLLM {pinned}, whose rules for {name} are known",
        got=f"vLLM {short_version(version)}: checked by the rules of {pinned}",
        fix="load it in that version: vexport load --dry --vllm-python",
    )


def _differs(
    difference: Difference, names: Sequence[str], version: Version, since: Version | None
) -> Finding:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    first = f" (from {short_version(since)} on)" if since else ""
    return Finding(
        check=NAME,
        severity=difference.severity,
        where=f"{names[0]}{more}",
        expected=f"a vLLM that has {difference.what}{first}",
        got=f"vLLM {short_version(version)}, which {difference.otherwise}",
        fix="serve it with another version, or use another scheme",
    )


def _unknown(asked: Version, used: Version) -> Finding:
    return Finding(
        check=NAME,
        severity="warning",
        where=f"vLLM {short_version(asked)}",
        expected="one of the versions whose rules are known, "
        f"{short_version(KNOWN[0])} to {short_version(KNOWN[-1])}",
        got=f"unknown: checked by the rules of {short_version(used)}",
        fix="load it in that version: vexport load --dry --vllm-python",
    )
