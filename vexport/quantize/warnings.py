"""Warn about unquantized layers in a checkpoint, and about layers rounded with too little text."""

from collections.abc import Iterator, Mapping

from vexport.architectures import with_stars
from vexport.formats.plan import Plan
from vexport.plan.rules import enough_tokens
from vexport.plan.shapes import KEPT
from vexport.records import CalibrationRecord, Finding
from vexport.records.calibration import RoundingReport
from vexport.records.values import join_limited
from vexport.rules.architecture import UNKNOWN_EXPERTS
from vexport.rules.rounding import FALLBACK

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


def unknown_expert_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if experts stay unquantized because vexport does not know their layout."""
    for note in plan.notes:
        if note.rule == UNKNOWN_EXPERTS.id:
            yield f"{note.where} stay unquantized: {note.got}"


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
        yield Finding.at(FALLBACK, group.name, reason=group.fallback)


def little_text_warnings(
    calibration: CalibrationRecord | None, rounding: RoundingReport | None
) -> Iterator[str]:
    """Yield a warning that names all kinds of layers with too little calibration text."""
    if calibration is None or rounding is None:
        return
    rounded = {
        group.name: group.columns for group in rounding.groups if group.rounding != "nearest"
    }
    if line := _little_text_line(f"{calibration.tokens:,} tokens", calibration.tokens, rounded):
        yield line


def little_text_of_plan(plan: Plan, tokens: int, *, at_most: bool = False) -> str | None:
    """Return the warning of `little_text_warnings` before the text is used, or None.

    With `at_most`, `tokens` is an upper bound of the number of tokens.
    """
    rounded = {
        group.name: group.members[0].in_features
        for group in plan.groups
        if group.rounding != "nearest"
    }
    amount = f"at most {tokens:,} tokens" if at_most else f"{tokens:,} tokens"
    return _little_text_line(amount, tokens, rounded)


def _little_text_line(amount: str, tokens: int, columns_of: Mapping[str, int]) -> str | None:
    columns_of_kind = {
        with_stars(name): columns
        for name, columns in columns_of.items()
        if tokens < enough_tokens(columns)
    }
    if not columns_of_kind:
        return None
    kinds = ", ".join(f"{kind} ({columns:,} columns)" for kind, columns in columns_of_kind.items())
    needed = enough_tokens(max(columns_of_kind.values()))
    return (
        f"{amount} of calibration text are too few for {kinds}: "
        f"use at least {needed:,} tokens (--samples, --seq-len), or the rounding overfits the text"
    )
