"""Rules of a plan: which rule applies to a linear layer, and what calibration the plan needs."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vexport.architectures.linears import Place
from vexport.errors import InputError, raise_all
from vexport.formats.plan import FusionGroup, Plan, Treatment
from vexport.formats.schemes import KEEP, Scheme, get_scheme
from vexport.records import Finding, Smoothing
from vexport.records.calibration import Rounding
from vexport.records.observer_names import BY_IMPORTANCE, EXPANDED, IMPORTANCE, MIN_MAX
from vexport.records.patterns import matches as pattern_matches
from vexport.scenario.rules import IMPORTANCE_STRATEGIES

if TYPE_CHECKING:
    from vexport.scenario import Rule

LINEAR = "Linear"
REGEX_PREFIX = "re:"
# Weights with fewer bits are rounded with the help of calibration text.
FEW_BITS = 8
# Best strength for most models (SmoothQuant, arXiv 2211.10438, section 5.1), also in our
# measurements.
STRENGTH = 0.5
# Numbers of evenly spread rows of text. Their gradients determine smoothing and token weights.
SMOOTHING_ROWS, WEIGHING_ROWS = 16, 4
# An `ignore` pattern may match nothing: some models do not have the layers it names.
OPTIONAL_LAYERS = re.compile(
    r"(?:.*\.)?(?:lm_head|embed_out|embed_tokens|embed_positions|word_embeddings|wte|wpe|\w*router\w*|\w*gate|\w*norm\w*)$"
)


def choose_treatment(
    rules: Sequence["Rule"], name: str, place: Place, *, has_text: bool
) -> Treatment | None:
    """Return the treatment of a linear layer by the first rule that matches it.

    Returns None if the layer stays unquantized. A layer outside the decoder layers is quantized
    only by a rule that names it, and not by a rule for all linear layers. A layer that vLLM builds
    unquantized matches only a rule that names it without a pattern, and is then refused. If a rule
    has no rounding and there is calibration text, weights of fewer than 8 bits are refitted.
    """
    rule = next((rule for rule in rules if _applies(rule, name, place)), None)
    if rule is None or rule.scheme == KEEP:
        return None
    rounding = rule.method or default_rounding(rule.scheme, has_text=has_text)
    # Only some of the schemes that `auto` selects from have static input scales.
    scheme = get_scheme(rule.scheme)
    observes_inputs = scheme.args.calibrated
    return Treatment(
        scheme=scheme,
        observer=rule.observer or default_observer(rule.scheme, rounding),
        rounding=rounding,
        observer_kwargs=rule.observer_kwargs,
        input_observer=rule.input_observer if observes_inputs else None,
        input_observer_kwargs=rule.input_observer_kwargs if observes_inputs else {},
        strength=getattr(rule.rounding, "strength", None),
        ridge=getattr(rule.rounding, "ridge", None),
    )


def default_rounding(scheme: str, *, has_text: bool) -> Rounding:
    """Return the rounding for rules that name none.

    Weights of 8 bits lose too little for refitting to be worth the time.
    """
    return (
        "refit" if has_text and get_scheme(scheme).args.weights.num_bits < FEW_BITS else "nearest"
    )


def default_observer(scheme: str, rounding: Rounding) -> str:
    """Return the observer of weights for rules that name none, depending on the rounding.

    vexport/docs/results.md has the measurements.
    """
    chosen = get_scheme(scheme)
    weights = chosen.args.weights
    # With power-of-two scales, a search has little to choose from.
    coarse = weights.num_bits >= FEW_BITS or chosen.format.exponent_scales
    if rounding == "nearest" or coarse or weights.strategy not in IMPORTANCE_STRATEGIES:
        return MIN_MAX[0]
    return EXPANDED if weights.strategy == "tensor_group" else IMPORTANCE


def _applies(rule: "Rule", name: str, place: Place) -> bool:
    """Return True if a rule applies to a layer, regardless of earlier rules."""
    if rule.match == LINEAR and place != "decoder":
        return False
    if rule.match.startswith(REGEX_PREFIX) and place == "unquantizable":
        return False
    return matches(rule.match, name)


def hidden_rules(rules: Sequence["Rule"], places: Mapping[str, Place]) -> Iterator[Finding]:
    """Yield a warning for each rule without effect, because earlier rules match all its layers.

    Patterns of a recipe's `ignore` get a warning if they match no layer, except layers that some
    models lack.
    """
    effective = {
        next((number for number, rule in enumerate(rules) if _applies(rule, name, place)), None)
        for name, place in places.items()
    }
    for number, rule in enumerate(rules):
        count = sum(_applies(rule, name, place) for name, place in places.items())
        if count and number not in effective and not rule.is_from_recipe:
            yield Finding(
                check="rules",
                severity="warning",
                where=f"rule {number + 1} ({rule.match})",
                expected="a layer that no earlier rule matches",
                got=f"{count} layer{'s' if count > 1 else ''}, each matched by an earlier rule",
                fix="move the rule up, or remove it: the first match wins",
            )
        elif rule.is_from_recipe and _matches_nothing(rule, places):
            yield Finding(
                check="rules",
                severity="warning",
                where=f"ignore {rule.match}",
                expected="at least one layer that it matches",
                got="no such layer in this model",
                fix="correct the pattern, unless the model is supposed to have no such layer",
            )


def _matches_nothing(rule: "Rule", names: Collection[str]) -> bool:
    """Return True if a rule matches no layer, although most models have such layers."""
    optional = OPTIONAL_LAYERS.match(rule.match.removeprefix(REGEX_PREFIX).rstrip("$"))
    return optional is None and not any(matches(rule.match, name) for name in names)


def matches(pattern: str, name: str) -> bool:
    """Return True if a rule's pattern matches a linear layer's name."""
    if pattern == LINEAR:
        return True
    if pattern.startswith(REGEX_PREFIX):
        return pattern_matches(pattern, name)
    return name == pattern or name.endswith(f".{pattern}")


def require_matching_rules(rules: Sequence["Rule"], names: Mapping[str, Place]) -> None:
    """Raise InputErrors for rules that match no layer."""
    required_rules = [
        rule
        for rule in rules
        if not rule.is_from_recipe
        and (rule.scheme != KEEP or OPTIONAL_LAYERS.match(rule.match) is None)
    ]
    raise_all(
        [
            InputError(
                f"rule {rule.match!r}",
                got="no matching layer in this model",
                need="the name of a linear layer, its last parts, re:REGEX or Linear",
                fix="correct the pattern or remove the rule",
            )
            for rule in required_rules
            if not any(matches(rule.match, name) for name in names)
        ]
    )


def smoothing_strength(
    groups: Sequence[FusionGroup], strength: float | None, *, has_text: bool
) -> float:
    """Return the strength of smoothing.

    A given `strength` is returned unchanged. Otherwise the result is `STRENGTH` if there is text
    and the inputs of a group lose much by quantization, or else 0.
    """
    if strength is not None:
        return strength if groups else 0.0
    return STRENGTH if has_text and any(map(_has_lossy_inputs, groups)) else 0.0


def smoothed_groups(groups: Sequence[FusionGroup]) -> tuple[FusionGroup, ...]:
    """Return the groups with inputs that lose much, or all groups if there are none.

    Weights profit from smoothing, too.
    """
    return tuple(filter(_has_lossy_inputs, groups)) or tuple(groups)


def select_smoothing(plan: Plan, found: Mapping[str, Smoothing]) -> Mapping[str, Smoothing]:
    """Select the part of the smoothing that a plan needs, by stored tensor.

    `found` has the smoothing of all candidates. The result equals a search for this plan's groups
    alone.
    """
    if not plan.smoothing:
        return {}
    wanted = {member.weight for group in smoothed_groups(plan.groups) for member in group.members}
    folded = {name for name, smoothing in found.items() if not wanted.isdisjoint(smoothing.readers)}
    read = {reader for name in folded for reader in found[name].readers}
    return {
        name: Smoothing(
            rows=smoothing.rows if name in folded else "",
            columns=smoothing.columns if name in read else "",
            readers=smoothing.readers if name in folded else (),
        )
        for name, smoothing in found.items()
        if name in folded | read
    }


def _has_lossy_inputs(group: FusionGroup) -> bool:
    """Return True if the inputs of a group lose much by quantization.

    Integers lose values that are small compared with the largest input of a token. 4-bit inputs
    lose values that are small in their block.
    """
    inputs = group.scheme.args.input_activations
    if inputs is None or inputs.num_bits > 8:
        return False
    return not inputs.is_float or (inputs.num_bits == 4 and group.rounding != "nearest")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationNeed:
    """First part of a plan that needs samples, and their purpose."""

    where: str
    samples: str

    def missing(self) -> InputError:
        """Return the error if there are no samples."""
        return InputError(
            self.where,
            got="no calibration data",
            need=self.samples,
            fix="add --calibration DATA (in a scenario `calibration:`); `default` is the text that "
            "ships with vexport",
        )


def calibration_need(plan: Plan) -> CalibrationNeed | None:
    """Return why a plan needs calibration, or None if samples would change nothing.

    Reasons are statistics, smoothing, and weights that are rounded by their inputs.
    """
    need = statistics_need(plan)
    if need:
        return need
    if plan.smoothing:
        return CalibrationNeed(
            where="smoothing", samples="samples to find large channels of inputs"
        )
    rounded = next((group.rounding for group in plan.groups if group.rounding != "nearest"), None)
    if rounded is None:
        return None
    return CalibrationNeed(
        where=f"rounding {rounded}", samples="samples to measure the inputs of each layer"
    )


def text_use(schemes: Iterable[Scheme], *, needed: bool) -> str:
    """Return how calibration text matters for these schemes: `needed`, `helps` or `not needed`.

    If it is not `needed`, it still helps to round weights to fewer than 8 bits.
    """
    if needed:
        return "needed"
    few_bits = any(scheme.args.weights.num_bits < 8 for scheme in schemes)
    return "helps" if few_bits else "not needed"


def statistics_need(plan: Plan) -> CalibrationNeed | None:
    """Return why a plan needs ranges or the importance of inputs, or None if it needs neither."""
    static = [f"scheme {scheme.name}" for scheme in plan.used_schemes if scheme.args.calibrated]
    if plan.attention:
        static.append("KV cache")
    if static:
        return CalibrationNeed(where=static[0], samples="samples to compute its static scales")
    for group in plan.groups:
        if group.rounding == "nearest" and group.observer in BY_IMPORTANCE:
            where = f"observer {group.observer}"
            return CalibrationNeed(
                where=where, samples="samples to measure the importance of input channels"
            )
    return None


def needs_rounding(plan: Plan) -> bool:
    """Return True if the plan rounds weights with the help of calibration text."""
    return any(group.rounding != "nearest" for group in plan.groups)


def needs_search(plan: Plan) -> bool:
    """Return True if an observer of the plan searches for scales instead of using the range."""
    return any(group.observer not in MIN_MAX for group in plan.groups)
