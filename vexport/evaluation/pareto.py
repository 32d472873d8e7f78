"""Which of several schemes to take: those that no other dominates, and whether the data decides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vexport.types import ComparedScheme

# Speeds that differ by less are taken as the same: repeated starts of one engine differ by as much.
SAME_SPEED = 0.03
# Sizes that differ by less do not decide which of two to take.
SAME_SIZE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The scheme to take, empty where the data does not decide, and why."""

    scheme: str
    reasons: tuple[str, ...]


def marked(rows: Sequence[ComparedScheme]) -> tuple[ComparedScheme, ...]:
    """The rows with the first that dominates each.

    One that failed dominates nothing, and one that has not passed none that has.
    """
    return tuple(
        replace(row, dominated_by=next((other.scheme for other in rows if _dominates(other, row)), ""))
        for row in rows
    )


def _dominates(one: ComparedScheme, other: ComparedScheme) -> bool:
    if one is other or one.outcome in (None, "FAIL") or other.outcome is None:
        return False
    if other.outcome == "PASS" and one.outcome != "PASS":
        return False
    if one.mean_kl is None or other.mean_kl is None or one.mean_kl > other.mean_kl:
        return False
    return _no_dearer(one, other) and not (one.mean_kl == other.mean_kl and _no_dearer(other, one))


def _no_dearer(one: ComparedScheme, other: ComparedScheme, same_size: float = 0.0) -> bool:
    """Whether `one` is no larger, and no slower at any number of requests; both speeds must be known."""
    ours, theirs = dict(one.rates), dict(other.rates)
    faster = all(ours[at] >= (1 - SAME_SPEED) * theirs[at] for at in ours if at in theirs)
    smaller = one.num_bytes <= (1 + same_size) * other.num_bytes
    return smaller and ours.keys() == theirs.keys() and faster


def decide(
    rows: Sequence[ComparedScheme], baseline: ComparedScheme | None = None, speed: str = "measured"
) -> Decision:
    """Of the schemes that pass, the smallest and fastest, if one is both; of about equals the least KL.

    What passed has lost no more than was accepted: among those cost decides, not the rest of the loss.
    `speed` says what the speeds are; what the `baseline` is faster in is said too.
    """
    passed = [row for row in rows if row.outcome == "PASS"]
    if not passed:
        return Decision(scheme="", reasons=(_none_passed(rows),))
    cheap = [row for row in passed if all(_no_dearer(row, other, SAME_SIZE) for other in passed)]
    cheapest = min(cheap, key=lambda row: math.inf if row.mean_kl is None else row.mean_kl, default=None)
    if cheapest is None:
        return Decision(scheme="", reasons=(_split(passed, speed),))
    why = [*_why(cheapest, passed, rows, speed), *_slower(cheapest, baseline)]
    return Decision(scheme=cheapest.scheme, reasons=tuple(why))


def _none_passed(rows: Sequence[ComparedScheme]) -> str:
    open_ = [row.scheme for row in rows if row.outcome == "INCONCLUSIVE"]
    if open_:
        return f"no scheme passed, and {', '.join(open_)} inconclusive: evaluate more documents or text"
    return "no scheme passed: try one with more bits, rounding by calibration text, or `scheme: auto`"


def _split(passed: Sequence[ComparedScheme], speed: str) -> str:
    """What each of several schemes is best in."""
    best = {"the smallest": min(passed, key=lambda row: row.num_bytes).scheme}
    shared = set.intersection(*(set(dict(row.rates)) for row in passed))
    for at in sorted(shared):
        best[f"the fastest with {at} at once"] = max(passed, key=lambda row: dict(row.rates)[at]).scheme
    if not shared:
        return "the speed of some that passed is not known, so that only accuracy and size are compared: " + (
            f"{best['the smallest']} is the smallest"
        )
    told = ", ".join(f"{scheme} is {what}" for what, scheme in best.items())
    return f"the data does not decide: {told}; it depends on how many requests run at once (speed {speed})"


def _why(
    chosen: ComparedScheme, passed: Sequence[ComparedScheme], rows: Sequence[ComparedScheme], speed: str
) -> list[str]:
    fast = f" and at least as fast at every number of requests ({speed})" if chosen.rates else ""
    unknown = "" if chosen.rates else "; speed is not known"
    if len(passed) == 1:
        found = [f"{chosen.scheme} is the only scheme that passes"]
    else:
        least = min(row.num_bytes for row in passed)
        small = "the smallest" if chosen.num_bytes == least else f"within {SAME_SIZE:.0%} of the smallest"
        found = [f"Of {len(passed)} schemes that pass, {chosen.scheme} is {small}{fast}{unknown}"]
    nearer = [row for row in passed if _loses_less(row, chosen)]
    if nearer:
        best = min(nearer, key=lambda row: row.mean_kl or 0.0)
        found.append(f"{best.scheme} loses less: KL {best.mean_kl:.3g}, not {chosen.mean_kl:.3g}")
    for row in rows:
        if row.outcome == "INCONCLUSIVE" and not _no_dearer(chosen, row):
            found.append(f"{row.scheme} is smaller or faster and inconclusive: more documents would tell")
    return found


def _slower(chosen: ComparedScheme, baseline: ComparedScheme | None) -> list[str]:
    theirs = dict(baseline.rates) if baseline else {}
    at = [number for number, rate in chosen.rates if rate < (1 - SAME_SPEED) * theirs.get(number, 0.0)]
    told = ", ".join(f"{number} at once" for number in at)
    return [f"The unquantized model is faster with {told}"] if at else []


def _loses_less(row: ComparedScheme, chosen: ComparedScheme) -> bool:
    return row.mean_kl is not None and chosen.mean_kl is not None and row.mean_kl < chosen.mean_kl
