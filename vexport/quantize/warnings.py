"""Warn about unquantized layers in a checkpoint, and about layers rounded with too little text."""

from collections.abc import Iterator

from vexport.architectures import with_stars
from vexport.formats.plan import Plan
from vexport.plan.rules import enough_tokens
from vexport.plan.shapes import KEPT
from vexport.records import CalibrationRecord, Finding
from vexport.records.calibration import RoundingReport
from vexport.records.values import join_limited

# If both the share of quantized weights and the share of quantized linear layers are below this
# limit, a warning is given.
MIN_QUANTIZED_SHARE = 0.5
# Maximum number of groups that a warning names. Further groups are only counted.
MAX_NAMED = 4


def unsupported_warnings(plan: Plan) -> Iterator[str]:
    """Yield warnings for layers that a rule matches but whose shapes do not fit the scheme.

    Each warning is for the layers with the same treatment: unquantized, or in smaller groups.
    """
    by_remedy: dict[str, list[Finding]] = {}
    for note in plan.notes:
        if note.check == "shape":
            by_remedy.setdefault(note.fix, []).append(note)
    for remedy, (first, *others) in by_remedy.items():
        more = f" and {len(others):,} more" if others else ""
        treatment = "stay unquantized" if remedy == KEPT else remedy
        yield f"{first.where}{more} {treatment}: {first.got}"


def little_quantized_warnings(plan: Plan, layers: int, parameters: int) -> Iterator[str]:
    """Warn if few weights are quantized.

    `parameters` is the number of quantized weights, in `layers` linear layers.
    """
    of_layers = layers + len(plan.kept_linears)
    if (
        parameters < MIN_QUANTIZED_SHARE * plan.parameters
        and layers < MIN_QUANTIZED_SHARE * of_layers
    ):
        share = f"{parameters / plan.parameters:.0%}"
        yield (
            f"only {share} of the weights are quantized; `vexport plan SOURCE` shows the "
            f"schemes that fit"
        )


def fallback_warnings(rounding: RoundingReport | None) -> Iterator[str]:
    """Yield a warning for each reason why a rule's rounding was replaced by nearest."""
    reasons: dict[str, list[str]] = {}
    for group in rounding.fallbacks if rounding else ():
        reasons.setdefault(group.fallback or "", []).append(group.name)
    for reason, names in reasons.items():
        yield f"{join_limited(names, ', ', MAX_NAMED)} rounded to nearest: {reason}"


def fallback_findings(rounding: RoundingReport | None) -> Iterator[Finding]:
    """Yield a warning for each group rounded to nearest although a rule requires more."""
    for group in rounding.fallbacks if rounding else ():
        yield Finding(
            check="rounding",
            claim=None,
            severity="warning",
            where=group.name,
            expected="weights rounded with the help of calibration text",
            got=f"weights rounded to nearest: {group.fallback}",
            fix="calibrate with more rows, or give these layers a rule with rounding: nearest",
        )


def little_text_warnings(
    calibration: CalibrationRecord | None, rounding: RoundingReport | None
) -> Iterator[str]:
    """Yield a warning that names all kinds of layers with too little calibration text."""
    if calibration is None or rounding is None:
        return
    columns_of_kind = {
        with_stars(group.name): group.columns
        for group in rounding.groups
        if group.rounding != "nearest" and calibration.tokens < enough_tokens(group.columns)
    }
    if not columns_of_kind:
        return
    kinds = ", ".join(f"{kind} ({columns:,} columns)" for kind, columns in columns_of_kind.items())
    needed = enough_tokens(max(columns_of_kind.values()))
    yield (
        f"{calibration.tokens:,} tokens of calibration text are too few for {kinds}: "
        f"use at least {needed:,} tokens (--samples, --seq-len), or the rounding overfits the text"
    )
