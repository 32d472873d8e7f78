"""What other versions of vLLM do differently with a checkpoint; all else here is true of `PINNED`.

The differences were read in the source of each version's wheel, in
vllm/model_executor/layers/quantization/compressed_tensors and the registry of model classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vexport.checks.vllm.view import ConfigGroup, FusedLinear
from vexport.formats import MXFP4, PACKED
from vexport.formats.arguments import GROUPED
from vexport.formats.partition import EXPERT
from vexport.types import Severity
from vexport.version import PINNED, Version

# Every version whose source was read.
KNOWN: Sequence[Version] = tuple((0, minor) for minor in range(20, PINNED[1] + 1))
ODD_WIDTHS = (3, 5, 6, 7)
NARROW_WIDTHS = (2, *ODD_WIDTHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What vLLM does from version `since` on, and what it did otherwise before."""

    what: str
    applies: Callable[[ConfigGroup, FusedLinear], bool]
    otherwise: str
    severity: Severity = "error"
    since: Version
    source: str


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
        what="packed integers of 3, 5, 6 and 7 bits, whose values cross the borders of words",
        applies=lambda group, fused: _is_packed(group) and group.weights.num_bits in ODD_WIDTHS,
        otherwise="refuses the width, or reads words of whole values",
        since=(0, 25),
        source="schemes/compressed_tensors_wNa16.py, WNA16_SUPPORTED_TYPES_MAP",
    ),
    Difference(
        what="packed integers of 2 bits",
        applies=lambda group, fused: _is_packed(group) and group.weights.num_bits == 2,
        otherwise="refuses the width",
        since=(0, 23),
        source="compressed_tensors.py, _is_wNa8o8_int",
    ),
    Difference(
        what="zero points for widths other than 4 and 8 bits",
        applies=lambda group, fused: (
            _is_packed(group) and not group.weights.symmetric and group.weights.num_bits in NARROW_WIDTHS
        ),
        otherwise="refuses asymmetric weights of that width",
        since=(0, 31),
        source="schemes/compressed_tensors_wNa16.py, WNA16_ZP_SUPPORTED_TYPES_MAP",
    ),
    Difference(
        what="packed integers with integer inputs (W4A8)",
        applies=lambda group, fused: _is_packed(group) and _inputs(group) in (("int", 8), ("int", 4)),
        otherwise="finds no scheme for them",
        since=(0, 26),
        source="schemes/compressed_tensors_wNa8.py and _wNa4.py",
    ),
    Difference(
        what="zero points of packed integers with integer inputs",
        applies=lambda group, fused: (
            _is_packed(group) and not group.weights.symmetric and _inputs(group) in (("int", 8), ("int", 4))
        ),
        otherwise="has no parameter for zero points",
        since=(0, 31),
        source="schemes/compressed_tensors_wNa8.py",
    ),
    Difference(
        what="packed routed experts of other widths than 4 and 8 bits or with zero points",
        applies=lambda group, fused: (
            _is_packed(group)
            and _is_routed(fused)
            and (group.weights.num_bits not in (4, 8) or not group.weights.symmetric)
        ),
        otherwise="refuses them: only symmetric int4 and int8",
        since=(0, 29),
        source="compressed_tensors_moe/compressed_tensors_moe_wna16.py",
    ),
    Difference(
        what="activation ordering of weights that are quantized by row",
        applies=lambda group, fused: (
            group.weights.actorder is not None and group.weights.strategy not in GROUPED
        ),
        otherwise="pins compressed-tensors 0.15.0.1, whose validator refuses it without groups",
        since=(0, 23),
        source="validate_model_after in compressed_tensors/quantization/quant_args.py",
    ),
    Difference(
        what="MXFP4 weights with FP8 inputs",
        applies=lambda group, fused: _is_mxfp4(group) and _inputs(group) == ("float", 8),
        otherwise="takes them for MXFP4 inputs: FP4 activations where it has FP4 kernels",
        severity="warning",
        since=(0, 32),
        source="schemes/compressed_tensors_w4a8_mxfp4.py",
    ),
    Difference(
        what="MXFP4 inputs",
        applies=lambda group, fused: _is_mxfp4(group) and _inputs(group) == ("float", 4),
        otherwise="runs MXFP4 weights with 16-bit activations on every GPU",
        severity="warning",
        since=(0, 22),
        source="schemes/compressed_tensors_w4a4_mxfp4.py",
    ),
)


def rules_of(version: Version) -> Version:
    """The known version whose rules are used for one: itself, or the nearest before it, or the oldest."""
    return max((known for known in KNOWN if known <= version), default=KNOWN[0])
