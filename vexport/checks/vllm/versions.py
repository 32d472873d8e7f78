"""What other versions of vLLM do differently with a checkpoint; all else here is true of `PINNED`.

Which version has what comes from the files that scripts/generate_versions.py reads from the wheels. Where a
rule names its first version, that is no literal of the source: it was read in `source`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vexport.architectures.versions import VersionFacts, facts_of, known_versions
from vexport.checks.vllm.view import ConfigGroup, FusedLinear
from vexport.formats import MXFP4, PACKED
from vexport.formats.partition import EXPERT
from vexport.types import Severity
from vexport.version import Version

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


def _is_routed(fused: FusedLinear) -> bool:
    return EXPERT.search(f"{next(iter(fused.members))}.") is not None


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
