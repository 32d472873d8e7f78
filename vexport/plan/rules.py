"""The choice of the rule for a linear layer."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vexport.errors import InputError, raise_all
from vexport.formats.schemes import KEEP, get_scheme
from vexport.layers.linears import Place
from vexport.records import Finding
from vexport.records.observer_names import EXPANDED, IMPORTANCE, MIN_MAX, OptionValue
from vexport.records.patterns import matches as pattern_matches
from vexport.records.rounding import Rounding
from vexport.scenario.rules import WITH_IMPORTANCE

if TYPE_CHECKING:
    from vexport.scenario import Rule

ALL = "Linear"
PATTERN = "re:"
# Weights of fewer bits are rounded by calibration text.
FEW_BITS = 8
# A rule that keeps what some models do not have matches nothing without being wrong.
MAY_BE_ABSENT = re.compile(
    r"(?:.*\.)?(?:lm_head|embed_out|embed_tokens|embed_positions|word_embeddings|wte|wpe|\w*router\w*|\w*gate|\w*norm\w*)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """The scheme, observers and rounding that a rule gives a layer."""

    scheme: str
    observer: str
    rounding: Rounding
    observer_kwargs: Mapping[str, OptionValue] = field(hash=False)
    input_observer: str | None
    input_observer_kwargs: Mapping[str, OptionValue] = field(hash=False)
    strength: float | None
    ridge: float | None


def choose_rule(rules: Sequence["Rule"], name: str, place: Place, *, has_text: bool) -> Treatment | None:
    """Return the treatment by the first rule that matches a linear layer; None where it stays unquantized.

    What is outside the decoder layers is quantized only by a rule that names it rather than all linear
    layers; what vLLM builds unquantized only by one that names it without a pattern (and is then refused).
    A rule that names no rounding refits weights of fewer than 8 bits where there is calibration text.
    """
    rule = next((rule for rule in rules if _applies(rule, name, place)), None)
    if rule is None or rule.scheme == KEEP:
        return None
    rounding = rule.method or default_rounding(rule.scheme, has_text=has_text)
    # Of the schemes that `auto` chooses among only some may have static input scales.
    observes_inputs = get_scheme(rule.scheme).args.calibrated
    return Treatment(
        scheme=rule.scheme,
        observer=rule.observer or default_observer(rule.scheme, rounding),
        rounding=rounding,
        observer_kwargs=rule.observer_kwargs,
        input_observer=rule.input_observer if observes_inputs else None,
        input_observer_kwargs=rule.input_observer_kwargs if observes_inputs else {},
        strength=getattr(rule.rounding, "strength", None),
        ridge=getattr(rule.rounding, "ridge", None),
    )


def default_rounding(scheme: str, *, has_text: bool) -> Rounding:
    """Return the rounding where no rule says it: weights of 8 bits lose too little to be worth the time."""
    return "refit" if has_text and get_scheme(scheme).args.weights.num_bits < FEW_BITS else "nearest"


def default_observer(scheme: str, rounding: Rounding) -> str:
    """Return the observer of weights where no rule says it, for the rounding.

    vexport/docs/results.md has the measurements.
    """
    chosen = get_scheme(scheme)
    weights = chosen.args.weights
    # A power of two leaves a search little to choose.
    coarse = weights.num_bits >= FEW_BITS or chosen.format.exponent_scales
    if rounding == "nearest" or coarse or weights.strategy not in WITH_IMPORTANCE:
        return MIN_MAX[0]
    return EXPANDED if weights.strategy == "tensor_group" else IMPORTANCE


def _applies(rule: "Rule", name: str, place: Place) -> bool:
    """Return whether a rule decides about a layer if none before it does."""
    if rule.match == ALL and place != "decoder":
        return False
    if rule.match.startswith(PATTERN) and place == "unquantizable":
        return False
    return matches(rule.match, name)


def hidden_rules(rules: Sequence["Rule"], places: Mapping[str, Place]) -> Iterator[Finding]:
    """A warning for each rule that decides about no layer, because earlier rules match all of its layers."""
    deciding = {
        next((number for number, rule in enumerate(rules) if _applies(rule, name, place)), None)
        for name, place in places.items()
    }
    for number, rule in enumerate(rules):
        count = sum(_applies(rule, name, place) for name, place in places.items())
        if count and number not in deciding:
            yield Finding(
                check="rules",
                severity="warning",
                where=f"rule {number + 1} ({rule.match})",
                expected="a layer that no earlier rule matches",
                got=f"{count} layer{'s' if count > 1 else ''}, each matched by an earlier rule",
                fix="move the rule up, or remove it: the first match wins",
            )
        elif rule.of_recipe and _is_missed(rule, places):
            yield Finding(
                check="rules",
                severity="warning",
                where=f"ignore {rule.match}",
                expected="a layer that it matches",
                got="none in this model",
                fix="nothing where this model has no such layers, else correct the pattern",
            )


def _is_missed(rule: "Rule", names: Collection[str]) -> bool:
    """Return whether it matches nothing that most models have."""
    usual = MAY_BE_ABSENT.match(rule.match.removeprefix(PATTERN).rstrip("$"))
    return usual is None and not any(matches(rule.match, name) for name in names)


def matches(pattern: str, name: str) -> bool:
    """Return whether a rule's pattern covers a linear layer's name."""
    if pattern == ALL:
        return True
    if pattern.startswith(PATTERN):
        return pattern_matches(pattern, name)
    return name == pattern or name.endswith(f".{pattern}")


def require_matching_rules(rules: Sequence["Rule"], names: Mapping[str, Place]) -> None:
    """InputErrors for the rules that match no layer at all."""
    bound = [
        rule
        for rule in rules
        if not rule.of_recipe and (rule.scheme != KEEP or MAY_BE_ABSENT.match(rule.match) is None)
    ]
    raise_all(
        [
            InputError(
                f"rule {rule.match!r}",
                got="no layer that it matches",
                need="the name of a linear layer, the end of one, `re:...` or Linear",
                fix="correct the pattern or remove the rule",
            )
            for rule in bound
            if not any(matches(rule.match, name) for name in names)
        ]
    )
