"""Find layer groups: sets of layers that need the same scheme but can differ from other layers.

This module reads only headers.

vLLM needs the same scheme for the members of a fused layer and for the routed experts of a layer
(rules in CompressedTensorsConfig.get_scheme_dict and compressed_tensors_moe.py). The planner
decides, scheme by scheme, which schemes a layer group can have. The same rules for shapes, ranks
and architectures therefore apply as in any plan.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vexport.architectures.fusion import moe_layer
from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError, raise_all
from vexport.formats.plan import FusionGroup, Plan
from vexport.formats.schemes import KEEP
from vexport.plan.blocks import output_bytes, quantized_bytes
from vexport.plan.build import PlanSettings, build_plan, groups_by_unit, require_accepted
from vexport.plan.shapes import KEPT
from vexport.records import Finding
from vexport.rules.auto import NO_CANDIDATE
from vexport.scenario import AUTO, Auto, Rule

Groups = tuple[FusionGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A scheme of a layer group, with its fusion groups and the bytes of their tensors."""

    scheme: str
    groups: Groups
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Linear layers that need the same scheme.

    `allowed` contains the schemes that the rules permit, in the candidates' order. If a rule names
    a scheme, only this scheme is allowed. `options` contains the allowed schemes except for `keep`.
    `refused` contains a finding for each scheme that vLLM cannot run.
    """

    name: str
    source_bytes: int
    parameters: int
    allowed: tuple[str, ...]
    options: tuple[Option, ...]
    refused: tuple[Finding, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the linear layers."""
        return tuple(member.name for group in self.options[0].groups for member in group.members)

    def bytes_in(self, scheme: str) -> int:
        """Return the bytes of the layer group in a scheme."""
        if scheme == KEEP:
            return self.source_bytes
        return next(option.num_bytes for option in self.options if option.scheme == scheme)

    def rules(self, scheme: str) -> Iterator[Rule]:
        """Yield rules that give a scheme to this layer group and to no other layer."""
        group = next((option.groups[0] for option in self.options if option.scheme == scheme), None)
        how = _rule_settings(group) if group else {}
        is_experts = moe_layer(self.layers[0]) is not None
        matches = (rf"re:{re.escape(self.name)}\.\d+\.",) if is_experts else self.layers
        for match in matches:
            yield Rule.model_validate({"match": match, "scheme": scheme, **how})


def find_layer_groups(
    index: SourceIndex, rules: Sequence[Rule], auto: Auto | None, settings: PlanSettings
) -> tuple[LayerGroup, ...]:
    """Return the layer groups that rules quantize or leave to `auto`, in plan order.

    Raises InputError if vLLM could not run the plan of the rules, or if no candidate fits a layer
    group that may not stay unquantized. Losses of towers are not measured, so there are no layer
    groups for a tower that only `include_vision` quantizes.
    """
    settings = replace(settings, include_vision=False)
    fixed = build_plan(index, _with_auto_scheme(rules, KEEP), settings)
    candidates = auto.candidates if auto else ()
    plans = {
        scheme: build_plan(index, _with_auto_scheme(rules, scheme), settings.lenient)
        for scheme in candidates
        if scheme != KEEP
    }
    for plan in (fixed, *plans.values()):
        require_accepted(plan)
    named = _by_layer_group(fixed)
    mixed = {scheme: _by_layer_group(plan) for scheme, plan in plans.items()}
    options: dict[str, dict[str, Groups]] = {}
    for found in (*mixed.values(), named):
        for name, groups in found.items():
            options.setdefault(name, {}).setdefault(groups[0].scheme.name, groups)
    if settings.on_unsupported_shape == "refuse" and KEEP not in candidates:
        raise_all(_unfitting_errors(plans.values(), options))
    return tuple(
        _layer_group(index, name, _allowed(name, named, mixed, candidates), found, plans.values())
        for name, found in options.items()
    )


def rules_with_schemes(
    layer_groups: Sequence[LayerGroup], schemes: Mapping[str, str], rules: Sequence[Rule]
) -> tuple[Rule, ...]:
    """Return the rules, with a scheme for each layer group in `schemes`.

    Other layers with `scheme: auto` stay unquantized.
    """
    chosen = [
        rule
        for layer_group in layer_groups
        if layer_group.name in schemes
        for rule in layer_group.rules(schemes[layer_group.name])
    ]
    return (*chosen, *_with_auto_scheme(rules, KEEP))


def smallest_schemes(layer_groups: Sequence[LayerGroup]) -> dict[str, str]:
    """Return the scheme with the fewest bytes for each layer group."""
    return {group.name: min(group.allowed, key=group.bytes_in) for group in layer_groups}


def fixed_bytes(index: SourceIndex, layer_groups: Sequence[LayerGroup], plan: Plan) -> int:
    """Return the bytes of the output that are the same for every choice of schemes."""
    return output_bytes(index, (), plan.attention) - sum(
        group.source_bytes for group in layer_groups
    )


def probe_plan(plan: Plan, layer_groups: Sequence[LayerGroup]) -> Plan:
    """Return a plan for calibrating all options at once.

    If a layer group has options that need calibration, the plan contains one of these options. All
    of these options need the same statistics.
    """
    chosen = (
        max(layer_group.options, key=lambda option: option.groups[0].scheme.args.calibrated)
        for layer_group in layer_groups
    )
    return replace(plan, groups=tuple(group for option in chosen for group in option.groups))


def _with_auto_scheme(rules: Sequence[Rule], scheme: str) -> list[Rule]:
    return [
        rule.model_copy(update={"scheme": scheme}) if rule.scheme == AUTO else rule
        for rule in rules
    ]


def _rule_settings(group: FusionGroup) -> dict[str, object]:
    keys = ("observer", "observer_kwargs", "input_observer", "input_observer_kwargs", "rounding")
    settings = {key: getattr(group, key) for key in keys}
    if group.strength is None and group.ridge is None:
        return settings
    return {
        **settings,
        "rounding": {"method": "refit", "strength": group.strength, "ridge": group.ridge},
    }


def _by_layer_group(plan: Plan) -> dict[str, Groups]:
    return {name: tuple(groups) for name, groups in groups_by_unit(plan.groups).items()}


def _allowed(
    name: str,
    named: Mapping[str, Groups],
    mixed: Mapping[str, Mapping[str, Groups]],
    candidates: Sequence[str],
) -> tuple[str, ...]:
    """Return the schemes that are allowed for a layer group.

    If a rule names a scheme, only this scheme is allowed. Otherwise the candidates that fit are
    allowed, or `keep` if no candidate fits.

    A candidate may fit with a smaller group size if the scenario allows this.
    """
    if name in named:
        return (named[name][0].scheme.name,)
    fitting = (
        KEEP if candidate == KEEP else mixed[candidate][name][0].scheme.name
        for candidate in candidates
        if candidate == KEEP or name in mixed[candidate]
    )
    return tuple(dict.fromkeys(fitting)) or (KEEP,)


def _layer_group(
    index: SourceIndex,
    name: str,
    allowed: tuple[str, ...],
    groups_in: Mapping[str, Groups],
    plans: Iterable[Plan],
) -> LayerGroup:
    members = [member for group in next(iter(groups_in.values())) for member in group.members]
    shapes = [
        (index.tensors[one.weight].dtype, (one.out_features, one.in_features)) for one in members
    ]
    return LayerGroup(
        name=name,
        source_bytes=sum(num_bytes(dtype, shape) for dtype, shape in shapes),
        parameters=sum(rows * columns for _, (rows, columns) in shapes),
        allowed=allowed,
        options=tuple(
            Option(scheme=scheme, groups=groups, num_bytes=quantized_bytes(index, groups))
            for scheme, groups in groups_in.items()
        ),
        refused=tuple(
            note for plan in plans for note in plan.notes if note.where == name and note.fix == KEPT
        ),
    )


def _unfitting_errors(plans: Iterable[Plan], fitting: Collection[str]) -> list[InputError]:
    """Return an error for each layer group that no candidate fits.

    The error has the reason why the last candidate does not fit.
    """
    notes = {
        note.where: note for plan in plans for note in reversed(plan.notes) if note.fix == KEPT
    }
    return [
        InputError.of(NO_CANDIDATE, name, reason=note.got)
        for name, note in notes.items()
        if name not in fitting
    ]
