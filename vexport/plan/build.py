"""Planning from headers, rules and the architecture's fused modules. No tensor data is read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from vexport.architectures import resolve
from vexport.architectures.fusion import FusedLayer, fuse, moe_layer
from vexport.architectures.ignore import ignored, ignored_head
from vexport.architectures.linears import (
    Names,
    Place,
    attention_layers,
    find_linears,
    is_unknown_experts,
    names_of,
    refused_caches,
)
from vexport.checkpoint.index import SourceIndex, find_quantization
from vexport.errors import InputError
from vexport.formats.config import KV_CACHES
from vexport.formats.plan import FusionGroup, Plan, Treatment
from vexport.formats.schemes import Scheme, group_sizes, regrouped
from vexport.plan.blocks import output_bytes
from vexport.plan.rules import (
    choose_treatment,
    hidden_rules,
    require_matching_rules,
    smoothing_strength,
)
from vexport.plan.shapes import (
    RANKS_ADVICE,
    cannot_be_split,
    kept_note,
    kind_of_group,
    refusal,
    refused_ranks,
    unsupported,
)
from vexport.records import AttentionLayer, Finding, KvCache, OnUnsupportedShape
from vexport.rules import architecture
from vexport.rules.quantize import ALREADY_QUANTIZED, NEAREST_TOWER, NO_TOWER
from vexport.words import first_and_more, plural

if TYPE_CHECKING:
    from vexport.scenario import Rule

# Where a plan's rules come from, and where users can change them.
Origin = Literal["options", "scenario"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of a plan, in addition to its rules.

    `ranks` has tensor parallel sizes, and `on_unsupported_shape` is the treatment of layers that do
    not fit. With `smaller_groups`, layers get the largest group size that fits before any layer is
    refused or kept. `kv_cache` is the dtype of a quantized KV cache and the granularity of its
    scales. `has_text` is True if there is calibration text. `smoothing` is the strength of
    smoothing, or None for the schemes' default. With `include_vision`, rules for all linear layers
    also apply to the tower of pictures and its projector. `origin` determines whether the advice in
    refusals names options or keys of a scenario.
    """

    ranks: Sequence[int] = (1,)
    on_unsupported_shape: OnUnsupportedShape = "refuse"
    smaller_groups: bool = False
    kv_cache: KvCache | None = None
    has_text: bool = False
    smoothing: float | None = None
    include_vision: bool = False
    origin: Origin = "options"

    @property
    def takes_smaller_groups(self) -> bool:
        """Return True if layers of unsupported shape are quantized in smaller groups."""
        return self.smaller_groups or self.on_unsupported_shape == "smaller-group"

    @property
    def lenient(self) -> "PlanSettings":
        """The same settings, but layers that no group size fits are kept unquantized."""
        return replace(self, on_unsupported_shape="keep", smaller_groups=self.takes_smaller_groups)


def build_plan(
    index: SourceIndex, rules: Sequence["Rule"], settings: PlanSettings = PlanSettings()
) -> Plan:
    """Decide for every tensor of a checkpoint whether and how it is quantized.

    Layers that vLLM fuses form one group. If vLLM could not run a layer, the plan contains a
    refusal, and no exception is raised. Layers of unsupported shape are kept unquantized if
    `on_unsupported_shape` is `keep`, and get smaller groups if it is `smaller-group`. The plan's
    notes list these layers.

    Raises InputError for a source that cannot be quantized: it is already quantized, or its class
    is unknown, or its tower is included and it has none. Raises InputErrors for rules that match no
    layer (see `require_matching_rules`).
    """
    _require_unquantized(index)
    architecture, notes = resolve(index.architecture, index.config)
    names = names_of(index, architecture)
    linears = {linear.name: linear for linear in find_linears(index, names)}
    places = _places(linears, names, settings)
    if settings.include_vision and "tower" not in places.values():
        raise InputError.of(NO_TOWER, str(index.root))
    require_matching_rules(rules, places)
    layers = fuse(linears, architecture)
    chosen = {
        name: choose_treatment(
            rules, name, place, has_text=settings.has_text, in_tower=names.in_tower(name)
        )
        for name, place in places.items()
    }
    rule_refusals = [*_mixed_treatments(layers, chosen), *_unquantizable(chosen, places)]
    groups: list[FusionGroup] = []
    for layer in layers if not rule_refusals else ():
        treatment = chosen[layer.members[0]]
        if treatment is not None:
            members = [linears[member] for member in layer.members]
            in_tower = names.in_tower(layer.members[0])
            groups.append(FusionGroup.from_layer(layer, members, treatment, in_tower=in_tower))
    groups, fitted, shape_refusals = _fit_groups(groups, names, settings)
    rows = {name: linear.out_features for name, linear in linears.items()}
    attention: tuple[AttentionLayer, ...] = ()
    cache_refusals: Iterable[Finding] = ()
    if settings.kv_cache is not None:
        per_head = KV_CACHES[settings.kv_cache].strategy == "attn_head"
        queries = settings.kv_cache == "fp8_attention"
        attention = attention_layers(layers, rows, names, per_head=per_head, queries=queries)
        cache_refusals = refused_caches(attention, linears)
    refusals = [*rule_refusals, *shape_refusals, *cache_refusals]
    quantized = {member.name for group in groups for member in group.members}
    if groups or not refusals:
        refusals = [*refused_ranks(layers, linears, quantized, names, settings.ranks), *refusals]
    unknown_experts = [
        tensor.name for tensor in index.tensors.values() if is_unknown_experts(tensor, names)
    ]
    weights = {member.weight for group in groups for member in group.members}
    kept = tuple(name for layer in layers for name in layer.members if name not in quantized)
    return Plan(
        source=str(index.root),
        architecture=index.architecture,
        groups=tuple(groups),
        kept=tuple(name for name in index.tensors if name not in weights),
        kept_linears=kept,
        ignore=(*ignored(layers, set(kept), unknown_experts, names), *ignored_head(linears)),
        source_bytes=index.num_bytes,
        output_bytes=output_bytes(index, groups, attention),
        parameters=index.num_parameters,
        refusals=tuple(refusals),
        notes=(*notes, *fitted, *_unknown_expert_notes(unknown_experts), *_tower_notes(groups)),
        kv_cache=settings.kv_cache,
        attention=attention,
        smoothing=smoothing_strength(groups, settings.smoothing, has_text=settings.has_text),
    )


def _places(linears: Iterable[str], names: Names, settings: PlanSettings) -> dict[str, Place]:
    place = names.place_with_tower if settings.include_vision else names.place
    return {name: place(name) for name in linears}


def hidden_rule_notes(
    index: SourceIndex, rules: Sequence["Rule"], settings: PlanSettings
) -> tuple[Finding, ...]:
    """Return the warnings of `hidden_rules` for a source."""
    if len(rules) < 2:
        return ()
    architecture, _ = resolve(index.architecture, index.config)
    names = names_of(index, architecture)
    linears = (linear.name for linear in find_linears(index, names))
    places = _places(linears, names, settings)
    return tuple(hidden_rules(rules, places))


def require_accepted(plan: Plan) -> None:
    """Raise InputError with the first refusal of a plan and the number of further refusals."""
    if not plan.refusals:
        return
    first, *rest = plan.refusals
    more = f" ({plural(len(rest), 'more refusal')}, see `vexport plan`)" if rest else ""
    raise first.error(InputError, first.where).moved(first.where, fix=first.fix + more)


def _fit_groups(
    groups: list[FusionGroup], names: Names, settings: PlanSettings
) -> tuple[list[FusionGroup], list[Finding], list[Finding]]:
    """Return (groups, notes, refusals) for shapes that do not fit.

    Layers of unsupported shape get smaller groups, are kept unquantized, or are refused.
    """
    notes: list[Finding] = []
    if settings.takes_smaller_groups:
        groups, smaller = with_smaller_groups(groups, names, settings.ranks)
        notes.extend(smaller)
    shape_refusals = _shape_findings(groups, names, settings)
    if settings.on_unsupported_shape != "keep":
        return groups, notes, list(shape_refusals.values())
    groups, kept = _without_unsupported(groups, shape_refusals)
    return groups, [*notes, *kept], []


def _mixed_treatments(
    layers: Sequence[FusedLayer], chosen: Mapping[str, Treatment | None]
) -> Iterator[Finding]:
    """Yield refusals of layers that vLLM runs as one layer although their rules differ.

    The members of a fused layer need the same treatment. All routed experts of a layer need the
    same scheme.
    """
    units: dict[str, list[str]] = {}
    for layer in layers:
        units.setdefault(layer.experts or layer.name, []).extend(layer.members)
    members_of = {layer.name: layer.members for layer in layers}
    for name, unit in units.items():
        treatments = {chosen[member] for member in members_of.get(name, ())}
        chosen_in_unit = [chosen[member] for member in unit]
        schemes = {treatment and treatment.scheme for treatment in chosen_in_unit}
        if len(schemes) > 1 or len(treatments) > 1:
            last_parts = ", ".join(dict.fromkeys(member.rpartition(".")[2] for member in unit))
            which = f"{last_parts} of all routed experts" if moe_layer(unit[0]) else last_parts
            yield Finding(
                check="fusion",
                claim="refused",
                severity="error",
                where=name,
                expected=f"the same rule for {which}, because vLLM runs them as one layer",
                got="different rules",
                fix=f"give {which} the same rule",
            )


def _unquantizable(
    chosen: Mapping[str, Treatment | None], places: Mapping[str, Place]
) -> Iterator[Finding]:
    for name, treatment in chosen.items():
        if treatment is not None and places[name] == "unquantizable":
            yield Finding.at(architecture.UNQUANTIZABLE, name, scheme=treatment.scheme.name)


def _shape_findings(
    groups: Sequence[FusionGroup], names: Names, settings: PlanSettings
) -> dict[str, Finding]:
    reasons = unsupported(groups, names, settings.ranks)
    refused = [group for group in groups if group.name in reasons]
    sizes = {
        scheme: fitting_sizes(
            [group for group in groups if group.scheme == scheme], names, settings.ranks
        )
        for scheme in dict.fromkeys(group.scheme for group in refused)
    }
    return {
        group.name: refusal(
            group,
            reasons[group.name],
            RANKS_ADVICE
            if cannot_be_split(group, names, settings.ranks)
            else shape_advice(group, sizes[group.scheme], settings.origin),
        )
        for group in refused
    }


def _without_unsupported(
    groups: Sequence[FusionGroup], shape_findings: Mapping[str, Finding]
) -> tuple[list[FusionGroup], list[Finding]]:
    """Return the groups that fit, and notes on the groups that are kept unquantized.

    The routed experts of a layer are quantized all or not at all.
    """
    fitting: list[FusionGroup] = []
    notes: list[Finding] = []
    for name, unit in groups_by_unit(groups).items():
        unsupported_group = next(
            (shape_findings[group.name] for group in unit if group.name in shape_findings), None
        )
        if unsupported_group is None:
            fitting.extend(unit)
        else:
            notes.append(kept_note(unsupported_group, name))
    return fitting, notes


def _unknown_expert_notes(tensors: Sequence[str]) -> Iterator[Finding]:
    if tensors:
        yield Finding.at(architecture.UNKNOWN_EXPERTS, first_and_more(tensors))


def _tower_notes(groups: Sequence[FusionGroup]) -> Iterator[Finding]:
    """Yield a note if only layers outside of the tower are rounded with text."""
    tower = [group for group in groups if group.in_tower]
    if tower and any(group.rounding != "nearest" for group in groups):
        count = sum(len(group.members) for group in tower)
        yield Finding.at(NEAREST_TOWER, tower[0].name, count=count)


def _require_unquantized(index: SourceIndex) -> None:
    place = str(index.root)
    if (stored := find_quantization(index.root, index.config)) is not None:
        method = stored.values.get("quant_method") or "unknown method"
        raise InputError.of(ALREADY_QUANTIZED, place, method=method)


def fitting_sizes(
    groups: Sequence[FusionGroup], names: Names, ranks: Sequence[int]
) -> tuple[int, ...]:
    """Return the smaller group sizes that vLLM can run for all these groups, largest first.

    All groups must have the same scheme.
    """
    if not groups:
        return ()
    return tuple(
        size
        for size in _smaller(groups[0].scheme)
        if not unsupported(_with_group_size(groups, size), names, ranks)
    )


def shape_advice(group: FusionGroup, sizes: Sequence[int], origin: Origin) -> str:
    """Return the advice on a group of unsupported shape, as options or as keys of a scenario.

    `sizes` are the group sizes that fit.
    """
    names_in_layer = [member.name.rpartition(".")[2] for member in group.members]
    if origin == "options":
        size, shape = "--group-size", "--on-unsupported-shape"
        rule = " ".join(f"--ignore {name}" for name in names_in_layer)
    else:
        size, shape = "group_size:", "on_unsupported_shape:"
        rule = f"a rule with scheme: keep for {' and '.join(names_in_layer)}"
    keep = f"{shape} keep, or {rule}"
    if not sizes:
        return f"use {keep}, or another scheme (`vexport plan MODEL` lists schemes that fit)"
    fitting = f"{size} {' or '.join(map(str, sizes))}"
    return f"use {fitting}; or {shape} smaller-group for only these layers; or {keep}"


def with_smaller_groups(
    groups: Sequence[FusionGroup], names: Names, ranks: Sequence[int]
) -> tuple[list[FusionGroup], list[Finding]]:
    """Return (groups, notes) with smaller group sizes for unsupported shapes.

    Each unit (see `groups_by_unit`) gets the largest group size that fits all its groups. A unit
    stays unchanged if no size fits. The notes describe the changed units.
    """
    reasons = unsupported(groups, names, ranks)
    sizes: dict[tuple[object, ...], int | None] = {}
    regrouped_groups: list[FusionGroup] = []
    notes: list[Finding] = []
    for name, layers in groups_by_unit(groups).items():
        unsupported_group = next((group for group in layers if group.name in reasons), None)
        kind = tuple(kind_of_group(group) for group in layers)
        if unsupported_group is not None and kind not in sizes:
            sizes[kind] = next(iter(fitting_sizes(layers, names, ranks)), None)
        size = sizes.get(kind) if unsupported_group is not None else None
        if unsupported_group is None or size is None:
            regrouped_groups.extend(layers)
            continue
        regrouped_groups.extend(_with_group_size(layers, size))
        note = kept_note(refusal(unsupported_group, reasons[unsupported_group.name], ""), name)
        notes.append(
            replace(note, fix=f"quantized in groups of {size} ({regrouped_groups[-1].scheme.name})")
        )
    return regrouped_groups, notes


def groups_by_unit(groups: Sequence[FusionGroup]) -> Mapping[str, list[FusionGroup]]:
    """Return the groups of each unit, by the unit's name.

    A unit is a fused layer, or all routed experts of a layer. vLLM loads a unit in one scheme.
    """
    units: dict[str, list[FusionGroup]] = {}
    for group in groups:
        units.setdefault(moe_layer(group.members[0].name) or group.name, []).append(group)
    return units


def _smaller(scheme: Scheme) -> tuple[int, ...]:
    """Return the group sizes of the scheme's kernels that are smaller than the scheme's size."""
    group_size = scheme.args.weights.group
    if group_size is None:
        return ()
    return tuple(size for size in group_sizes(scheme) if size < group_size)


def _with_group_size(groups: Sequence[FusionGroup], size: int) -> list[FusionGroup]:
    return [replace(group, scheme=regrouped(group.scheme, size)) for group in groups]
