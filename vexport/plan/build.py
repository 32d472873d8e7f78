"""From headers, rules and the architecture's fused modules to a plan; no tensor data is read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vexport.architectures import resolve
from vexport.architectures.config import text_config
from vexport.architectures.fusion import fuse, moe_layer
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.quantization import find_quantization
from vexport.errors import InputError
from vexport.formats.schemes import get_scheme
from vexport.layers.blocks import output_bytes
from vexport.layers.ignore import ignored, ignored_head
from vexport.layers.linears import (
    Names,
    Place,
    attention_layers,
    find_linears,
    is_unknown_experts,
    names_of,
    refused_caches,
)
from vexport.layers.shapes import (
    OTHER_RANKS,
    SHAPE,
    is_uneven,
    kept_instead,
    refusal,
    refused_ranks,
    unsupported,
)
from vexport.plan.group_sizes import Origin, advice_on, fitting_sizes, layers_alone, with_smaller_groups
from vexport.plan.rules import Treatment, choose_rule, hidden_rules, require_matching_rules
from vexport.records import Finding, FusionGroup, KvCache, LinearPlan, OnUnsupportedShape, Plan, Smoothing

if TYPE_CHECKING:
    from vexport.scenario import Rule

# The strength that is best for most models (SmoothQuant, arXiv 2211.10438, section 5.1), and on ours.
STRENGTH = 0.5
# Rows of text, spread over all, whose gradients show how channels are smoothed, or how much tokens count.
SMOOTHING_ROWS, WEIGHING_ROWS = 16, 4


def smoothing_strength(groups: Sequence[FusionGroup], asked: float | None, *, has_text: bool) -> float:
    """Return the given strength; without it the default where text was named and some inputs lose much, else
    0.
    """
    if asked is not None:
        return asked if groups else 0.0
    return STRENGTH if has_text and any(map(_gains, groups)) else 0.0


def smoothed_groups(groups: Sequence[FusionGroup]) -> tuple[FusionGroup, ...]:
    """The groups whose inputs lose much, or all where none does: weights have their part of it too."""
    return tuple(filter(_gains, groups)) or tuple(groups)


def smoothing_for(plan: Plan, found: Mapping[str, Smoothing]) -> Mapping[str, Smoothing]:
    """Return the part that a plan asks for of what was found for all candidates, by stored tensor.

    It is what looking for these groups alone would find.
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


def _gains(group: FusionGroup) -> bool:
    """Integers lose what is small next to the largest input of a token, 4 bits what is in a block."""
    inputs = get_scheme(group.scheme).args.input_activations
    if inputs is None or inputs.num_bits > 8:
        return False
    return not inputs.is_float or (inputs.num_bits == 4 and group.rounding != "nearest")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of a plan besides its rules: tensor parallel sizes, what becomes of unsupported shapes, the
    KV cache, whether there is calibration text and how much inputs are smoothed by it (None: as the schemes
    need). With `smaller_groups` layers take the largest group size that fits before any is refused or kept.
    `origin` is what the advice of refusals names: options or keys of a scenario.
    """

    ranks: Sequence[int] = (1,)
    on_unsupported_shape: OnUnsupportedShape = "refuse"
    smaller_groups: bool = False
    kv_cache: KvCache | None = None
    has_text: bool = False
    smoothing: float | None = None
    origin: Origin = "options"

    @property
    def takes_smaller_groups(self) -> bool:
        """Return whether layers of unsupported shape are quantized in smaller groups."""
        return self.smaller_groups or self.on_unsupported_shape == "smaller-group"

    @property
    def lenient(self) -> "PlanSettings":
        """The same, where a layer that nothing fits is kept."""
        return replace(self, on_unsupported_shape="keep", smaller_groups=self.takes_smaller_groups)


def build_plan(index: SourceIndex, rules: Sequence["Rule"], settings: PlanSettings = PlanSettings()) -> Plan:
    """Decide for every tensor of a checkpoint whether and how it is quantized.

    Layers that vLLM fuses form one group. What vLLM would not run is a refusal in the plan, not an
    exception; with `on_unsupported_shape` keep, layers whose shape does not fit stay unquantized, with
    smaller-group they take another group size; notes say so. Raises InputError for a source that cannot be a
    source (quantized, unknown class).
    """
    _require_plain(index)
    architecture, notes = resolve(index.architecture, index.config)
    names = names_of(index, architecture)
    linears = {linear.name: linear for linear in find_linears(index, names)}
    places = {name: names.place(name) for name in linears}
    require_matching_rules(rules, places)
    modules = fuse(linears, architecture)
    chosen = {
        name: choose_rule(rules, name, place, has_text=settings.has_text) for name, place in places.items()
    }
    misruled = [*_mixed(modules, chosen), *_unquantizable(chosen, places)]
    groups = [] if misruled else list(_groups(modules, chosen, linears))
    groups, fitted, unfit = _fitted(groups, names, settings, index)
    text = text_config(index.config)
    attention = attention_layers(linears.values(), names, text, settings.kv_cache)
    uncached = refused_caches(attention, linears.values()) if settings.kv_cache else ()
    refusals = [*misruled, *unfit, *uncached]
    quantized = {member.name for group in groups for member in group.members}
    if groups or not refusals:
        refusals = [*refused_ranks(modules, linears, quantized, names, settings.ranks, text), *refusals]
    opaque = [tensor.name for tensor in index.tensors.values() if is_unknown_experts(tensor, names)]
    weights = {member.weight for group in groups for member in group.members}
    kept = tuple(name for members in modules.values() for name in members if name not in quantized)
    return Plan(
        source=str(index.root),
        architecture=index.architecture,
        groups=tuple(groups),
        kept=tuple(name for name in index.tensors if name not in weights),
        kept_linears=kept,
        ignore=(*ignored(modules, set(kept), opaque, names), *ignored_head(linears)),
        source_bytes=index.num_bytes,
        output_bytes=output_bytes(index, groups, attention),
        parameters=index.num_parameters,
        refusals=tuple(refusals),
        notes=(*notes, *fitted, *_opaque_experts(opaque)),
        kv_cache=settings.kv_cache,
        attention=attention,
        smoothing=smoothing_strength(groups, settings.smoothing, has_text=settings.has_text),
    )


def hidden_rule_notes(index: SourceIndex, rules: Sequence["Rule"]) -> tuple[Finding, ...]:
    """A warning for each rule a user wrote that earlier rules leave without a layer."""
    if len(rules) < 2:
        return ()
    architecture, _ = resolve(index.architecture, index.config)
    names = names_of(index, architecture)
    places = {linear.name: names.place(linear.name) for linear in find_linears(index, names)}
    return tuple(hidden_rules(rules, places))


def require_accepted(plan: Plan) -> None:
    """Raise InputError with the first refusal of a plan and how many more there are, if there is one."""
    if not plan.refusals:
        return
    first, *rest = plan.refusals
    more = f" ({len(rest)} more: see `vexport plan`)" if rest else ""
    need = "" if first.check == SHAPE else first.expected  # a reason is a sentence, see plan/shapes.py
    raise InputError(first.where, got=first.got, need=need, fix=first.fix + more)


def _groups(
    modules: Mapping[str, tuple[str, ...]],
    chosen: Mapping[str, Treatment | None],
    linears: Mapping[str, LinearPlan],
) -> Iterator[FusionGroup]:
    for name, members in modules.items():
        treatment = chosen[members[0]]
        if treatment is not None:
            yield FusionGroup(
                name=name,
                scheme=treatment.scheme,
                observer=treatment.observer,
                rounding=treatment.rounding,
                observer_kwargs=treatment.observer_kwargs,
                input_observer=treatment.input_observer,
                input_observer_kwargs=treatment.input_observer_kwargs,
                strength=treatment.strength,
                ridge=treatment.ridge,
                members=tuple(linears[member] for member in members),
            )


def _fitted(
    groups: list[FusionGroup], names: Names, settings: PlanSettings, index: SourceIndex
) -> tuple[list[FusionGroup], list[Finding], list[Finding]]:
    """(groups, notes, refusals): where shapes do not fit, smaller groups, no scheme or a refusal."""
    notes: list[Finding] = []
    if settings.takes_smaller_groups:
        groups, smaller = with_smaller_groups(groups, names, settings.ranks, text_config(index.config))
        notes.extend(smaller)
    unfit = _shape_findings(groups, names, settings, index)
    if settings.on_unsupported_shape != "keep":
        return groups, notes, list(unfit.values())
    groups, kept = _without(groups, unfit)
    return groups, [*notes, *kept], []


def _mixed(
    modules: Mapping[str, tuple[str, ...]], chosen: Mapping[str, Treatment | None]
) -> Iterator[Finding]:
    """Refusals of fused layers, and of the routed experts of a layer, that rules treat differently."""
    units: dict[str, list[str]] = {}
    for name, members in modules.items():
        units.setdefault(moe_layer(members[0]) or name, []).extend(members)
    for name, unit in units.items():
        schemes = {treatment and treatment.scheme for treatment in map(chosen.__getitem__, unit)}
        if len(schemes) > 1 or len({chosen[member] for member in modules.get(name, ())}) > 1:
            yield _mixed_group(name, unit)


def _mixed_group(name: str, members: Sequence[str]) -> Finding:
    last_parts = ", ".join(dict.fromkeys(member.rpartition(".")[2] for member in members))
    which = f"{last_parts} of all routed experts" if moe_layer(members[0]) else last_parts
    return Finding(
        check="fusion",
        severity="error",
        where=name,
        expected=f"one scheme for {which}, which vLLM runs as one layer",
        got="rules that treat them differently",
        fix=f"give {which} the same rule",
    )


def _unquantizable(chosen: Mapping[str, Treatment | None], places: Mapping[str, Place]) -> Iterator[Finding]:
    for name, treatment in chosen.items():
        if treatment is not None and places[name] == "unquantizable":
            yield Finding(
                check="architecture",
                severity="error",
                where=name,
                expected="a layer that vLLM builds with a quantization config",
                got=f"a rule with scheme {treatment.scheme} for one that it never quantizes",
                fix="remove the rule, or give it scheme: keep",
            )


def _shape_findings(
    groups: Sequence[FusionGroup], names: Names, settings: PlanSettings, index: SourceIndex
) -> dict[str, Finding]:
    """Refusals by the name of the group."""
    text = text_config(index.config)
    reasons = unsupported(groups, names, settings.ranks, text)
    refused = [group for group in groups if group.name in reasons]
    sizes = {
        scheme: fitting_sizes(
            [group for group in groups if group.scheme == scheme], names, settings.ranks, text
        )
        for scheme in dict.fromkeys(group.scheme for group in refused)
    }
    return {
        group.name: refusal(
            group,
            reasons[group.name],
            OTHER_RANKS
            if is_uneven(group, names, settings.ranks, text)
            else advice_on(group, sizes[group.scheme], settings.origin),
        )
        for group in refused
    }


def _without(
    groups: Sequence[FusionGroup], shape_findings: Mapping[str, Finding]
) -> tuple[list[FusionGroup], list[Finding]]:
    """The groups that fit, routed experts of a layer all or none, and what is said of the others."""
    fitting: list[FusionGroup] = []
    notes: list[Finding] = []
    for name, unit in layers_alone(groups):
        bad = next((shape_findings[group.name] for group in unit if group.name in shape_findings), None)
        if bad is None:
            fitting.extend(unit)
        else:
            notes.append(kept_instead(bad, name))
    return fitting, notes


def _opaque_experts(tensors: Sequence[str]) -> Iterator[Finding]:
    if tensors:
        yield Finding(
            check="architecture",
            severity="warning",
            where=tensors[0] if len(tensors) == 1 else f"{tensors[0]} and {len(tensors) - 1} more",
            expected="experts that vLLM loads one by one in compressed-tensors' names",
            got="experts stored or loaded in another way",
            fix="they stay unquantized; quantize a class that vLLM loads by expert",
        )


def _require_plain(index: SourceIndex) -> None:
    place = str(index.root)
    if (stored := find_quantization(index.root, index.config)) is not None:
        method = stored.values.get("quant_method") or "a method that it does not name"
        raise InputError(
            place,
            got=f"a checkpoint that is quantized already ({method})",
            need="an unquantized source",
            fix="start from the original model; `vexport check` and `vexport eval` judge this one as it is",
        )
