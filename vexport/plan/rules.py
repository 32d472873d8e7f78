"""Rules of a plan: which rule applies to a linear layer, and what calibration the plan needs."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vexport.architectures.fusion import HEADS, is_head
from vexport.architectures.linears import Place
from vexport.errors import InputError, nearest_hint, raise_all
from vexport.formats.plan import FusionGroup, Plan, Treatment
from vexport.formats.schemes import KEEP, Scheme, get_scheme
from vexport.records import Finding, Smoothing
from vexport.records.calibration import Rounding
from vexport.records.observer_names import BY_IMPORTANCE, EXPANDED, IMPORTANCE, MIN_MAX
from vexport.records.patterns import matches as pattern_matches
from vexport.rules import rules as book
from vexport.rules.quantize import NO_CALIBRATION
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
# Number of text rows whose gradients are computed, for smoothing and for the weights that a refit
# gives to tokens. The rows are spread evenly over the text.
SMOOTHING_ROWS, TOKEN_WEIGHT_ROWS = 16, 4
# Calibration tokens for each column of a weight. Mean KL in nats of SmolLM2-135M with only
# down_proj rounded (W4A16_G64), on held-out text of the same kind and of another kind:
#   nearest                 .129   .121
#   refit, 1 token          .0350  .0454
#   refit, 2 tokens         .0302  .0387
#   refit, 4 tokens         .0281  .0373
#   refit, 7 tokens         .0253  .0350
#   GPTQ, 1 token           .0443  .0584
# With 2 tokens, the KL is 11 to 19 percent higher than with 7. Below MIN_TOKENS_PER_COLUMN, vexport
# therefore warns about any text. From 4 to 7 tokens, the KL falls by 6 to 10 percent. Below
# TOKENS_PER_COLUMN, vexport therefore warns about text with fewer than DEFAULT_TOKENS tokens.
TOKENS_PER_COLUMN, MIN_TOKENS_PER_COLUMN = 6, 2
# The defaults of --samples and --seq-len.
DEFAULT_TOKENS = 128 * 512
# Layers that some models do not have. An `ignore` pattern or a `keep` rule for these layers may
# match nothing. In a regular expression, their names follow a dot, `.*` or `[.]`.
OPTIONAL_LAYERS = re.compile(
    r"(?:.*[.*\]])?(?:lm_head|embed_out|embed_tokens|embed_positions|word_embeddings|wte|wpe|\w*router\w*|\w*gate|\w*norm\w*)$"
)


def choose_treatment(
    rules: Sequence["Rule"], name: str, place: Place, *, has_text: bool, in_tower: bool = False
) -> Treatment | None:
    """Return the treatment of a linear layer by the first rule that matches it.

    Returns None if the layer stays unquantized. The rule `Linear` matches only linear layers inside
    decoder layers, and in a tower that the plan includes. If vLLM builds a layer unquantized, only
    a rule with the layer's name matches it, and `build_plan` refuses the rule. If a rule sets no
    rounding and there is calibration text, weights of fewer than 8 bits are refitted. Layers in a
    tower are always rounded to nearest.
    """
    rule = next((rule for rule in rules if _applies(rule, name, place)), None)
    if rule is None or rule.scheme == KEEP:
        return None
    rounding = rule.method or default_rounding(rule.scheme, has_text=has_text)
    if in_tower:
        rounding = "nearest"
    # A rule with `scheme: auto` may name an input observer. The observer is ignored if the selected
    # scheme has no static input scales.
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
    """Return the default rounding of a scheme: refit for fewer than 8 bits with text, else nearest.

    Weights of 8 bits lose so little accuracy that a refit is not worth its time.
    """
    return (
        "refit" if has_text and get_scheme(scheme).args.weights.num_bits < FEW_BITS else "nearest"
    )


def default_observer(scheme: str, rounding: Rounding) -> str:
    """Return the default observer of a scheme's weights, which depends on the rounding.

    vexport/docs/results.md has the measurements.
    """
    chosen = get_scheme(scheme)
    weights = chosen.args.weights
    # A search for scales gains little for 8 bits, and for scales that must be powers of two.
    gains_little = weights.num_bits >= FEW_BITS or chosen.format.exponent_scales
    if rounding == "nearest" or gains_little or weights.strategy not in IMPORTANCE_STRATEGIES:
        return MIN_MAX[0]
    return EXPANDED if weights.strategy == "tensor_group" else IMPORTANCE


def _applies(rule: "Rule", name: str, place: Place) -> bool:
    """Return True if a rule applies to a layer, regardless of earlier rules."""
    if rule.match == LINEAR and place not in ("decoder", "tower"):
        return False
    if rule.match.startswith(REGEX_PREFIX) and place == "unquantizable":
        return False
    return matches(rule.match, name)


def hidden_rules(rules: Sequence["Rule"], places: Mapping[str, Place]) -> Iterator[Finding]:
    """Yield a warning for each rule that has no effect because earlier rules match all its layers.

    Also yield a warning for each `ignore` pattern of a recipe that matches no layer. Patterns for
    layers that many models do not have, such as routers, get no warning.
    """
    effective = {
        next((number for number, rule in enumerate(rules) if _applies(rule, name, place)), None)
        for name, place in places.items()
    }
    for number, rule in enumerate(rules):
        count = sum(_applies(rule, name, place) for name, place in places.items())
        if count and number not in effective and not rule.is_from_recipe:
            where = f"rule {number + 1} ({rule.match})"
            yield Finding.at(book.HIDDEN, where, count=count)
        elif rule.is_from_recipe and _matches_nothing(rule, places):
            yield Finding.at(book.NO_LAYER_IGNORED, f"ignore {rule.match}")


def _matches_nothing(rule: "Rule", names: Collection[str]) -> bool:
    """Return True if an `ignore` pattern matches no layer, and is not for `OPTIONAL_LAYERS`."""
    return not _is_optional(rule.match) and not any(matches(rule.match, name) for name in names)


def _is_optional(pattern: str) -> bool:
    """Return True if a rule's pattern is for `OPTIONAL_LAYERS`: `lm_head`, `re:.*lm_head.*`."""
    names = pattern.removeprefix(REGEX_PREFIX).strip("^$").removesuffix(".*")
    return OPTIONAL_LAYERS.match(names) is not None


def matches(pattern: str, name: str) -> bool:
    """Return True if a rule's pattern matches a linear layer's name."""
    if pattern == LINEAR:
        return True
    if pattern.startswith(REGEX_PREFIX):
        return pattern_matches(pattern, name)
    return name == pattern or name.endswith(f".{pattern}")


def require_matching_rules(rules: Sequence["Rule"], names: Mapping[str, Place]) -> None:
    """Raise InputErrors for rules that match no layer.

    Rules from a recipe's `ignore`, and rules that keep `OPTIONAL_LAYERS`, may match no layer. If a
    rule matches an output head, the error says that the model has none of its own.
    """
    lacks_head = not any(map(is_head, names))
    required_rules = [
        rule
        for rule in rules
        if not rule.is_from_recipe and (rule.scheme != KEEP or not _is_optional(rule.match))
    ]
    raise_all(
        [
            _unmatched(rule.match, names, lacks_head=lacks_head)
            for rule in required_rules
            if not any(matches(rule.match, name) for name in names)
        ]
    )


def _unmatched(pattern: str, names: Mapping[str, Place], *, lacks_head: bool) -> InputError:
    """Return the error of a pattern that matches no layer, with the nearest name or last part."""
    where = f"pattern {pattern!r}"
    if lacks_head and _matches_head(pattern):
        return InputError.of(book.TIED_HEAD, where)
    known = dict.fromkeys([LINEAR, *(name.rpartition(".")[2] for name in names), *names])
    return InputError.of(book.NO_LAYER, where, hint=nearest_hint(pattern, known))


def _matches_head(pattern: str) -> bool:
    """Return True if a rule's pattern is an output head's name, or matches one."""
    return is_head(pattern) or any(matches(pattern, f"language_model.{head}") for head in HEADS)


def smoothing_strength(
    groups: Sequence[FusionGroup], strength: float | None, *, has_text: bool
) -> float:
    """Return the strength of smoothing.

    The result is 0 if nothing is quantized, or else a given `strength`. If `strength` is None, the
    result is `STRENGTH` if there is text and quantization of a group's inputs loses much accuracy,
    or else 0. Layers in a tower are not smoothed.
    """
    groups = [group for group in groups if not group.in_tower]
    if strength is not None:
        return strength if groups else 0.0
    return STRENGTH if has_text and any(map(_has_lossy_inputs, groups)) else 0.0


def smoothed_groups(groups: Sequence[FusionGroup]) -> tuple[FusionGroup, ...]:
    """Return the groups whose inputs lose much accuracy when they are quantized.

    If there are no such groups, return all groups, because smoothing also helps weights. Layers in
    a tower are not smoothed.
    """
    groups = [group for group in groups if not group.in_tower]
    return tuple(filter(_has_lossy_inputs, groups)) or tuple(groups)


def select_smoothing(plan: Plan, found: Mapping[str, Smoothing]) -> Mapping[str, Smoothing]:
    """Return the smoothing of each stored tensor that a plan changes, by the tensor's name.

    `found` is the smoothing that was measured before `scheme: auto` chose among its candidates. It
    may include layers that this plan does not smooth. The result is the same as if the smoothing
    had been measured for this plan alone.
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
    """Return True if the inputs of a group lose much accuracy when they are quantized."""
    return _inputs_are_lossy(group.scheme, with_text=group.rounding != "nearest")


def _inputs_are_lossy(scheme: Scheme, *, with_text: bool) -> bool:
    """Return True if a scheme's inputs lose much accuracy, with weights rounded `with_text`.

    Integers round a value to 0 if it is small compared with the token's largest input. 4-bit floats
    round a value to 0 if it is small compared with the largest value of its block. 4-bit inputs
    count only if the weights are rounded with the help of calibration text.
    """
    inputs = scheme.args.input_activations
    if inputs is None or inputs.num_bits > 8:
        return False
    return not inputs.is_float or (inputs.num_bits == 4 and with_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationNeed:
    """Reason why a plan needs samples: the part of the plan, and the purpose of the samples."""

    where: str
    samples: str

    def missing(self) -> InputError:
        """Return the error if there are no samples."""
        return InputError.of(NO_CALIBRATION, self.where, samples=self.samples)


def calibration_need(plan: Plan) -> CalibrationNeed | None:
    """Return why a plan needs calibration, or None if samples would change nothing.

    Samples are needed for statistics, for smoothing, and for a rounding other than nearest.
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
    """Return whether calibration text is `needed`, `helps` or is `not needed` for these schemes.

    Text that is not needed helps if weights have fewer than 8 bits, because they can be refitted,
    and if inputs lose much accuracy, because they can be smoothed.
    """
    if needed:
        return "needed"
    helps = any(
        scheme.args.weights.num_bits < 8 or _inputs_are_lossy(scheme, with_text=True)
        for scheme in schemes
    )
    return "helps" if helps else "not needed"


def statistics_need(plan: Plan) -> CalibrationNeed | None:
    """Return why a plan needs ranges or importance of inputs, or None if it needs no statistics."""
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


def without_tower(plan: Plan) -> Plan:
    """Return a plan without the groups in a tower."""
    return replace(plan, groups=tuple(group for group in plan.groups if not group.in_tower))


def only_tower(plan: Plan) -> Plan:
    """Return a plan with nothing but its groups in a tower."""
    groups = tuple(group for group in plan.groups if group.in_tower)
    return replace(plan, groups=groups, kv_cache=None, attention=(), smoothing=0.0)


def rounds_with_text(plan: Plan) -> bool:
    """Return True if the plan rounds weights with the help of calibration text."""
    return any(group.rounding != "nearest" for group in plan.groups)


def needs_search(plan: Plan) -> bool:
    """Return True if an observer of the plan searches for scales instead of using the range."""
    return any(group.observer not in MIN_MAX for group in plan.groups)


def enough_tokens(columns: int) -> int:
    """Return how many calibration tokens a weight with `columns` columns needs."""
    return min(TOKENS_PER_COLUMN * columns, max(DEFAULT_TOKENS, MIN_TOKENS_PER_COLUMN * columns))
