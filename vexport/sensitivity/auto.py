"""What `scheme: auto` comes to in a plan: by measured losses where a run has left them, else the smallest."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vexport.checkpoint.index import SourceIndex
from vexport.files import from_json
from vexport.plan.build import Settings, build_plan
from vexport.plan.source import plan_headers, settings_of, source_index
from vexport.scenario import Auto, Rule, Scenario
from vexport.sensitivity.choose import mixed_scheme, require_size_in_reach
from vexport.sensitivity.layer_groups import LayerGroup, find_layer_groups, rest_bytes, rules_with, smallest
from vexport.types import Finding, OnProgress, Plan, Sensitivity, silent

FILE = "sensitivity.json"


def plan_scenario(
    scenario: Scenario, run_dir: Path | None = None, on_progress: OnProgress = silent
) -> tuple[SourceIndex, Plan]:
    """The headers and the plan of what a scenario asks for; what `auto` comes to depends on `run_dir`."""
    settings = settings_of(scenario)
    if scenario.auto is None:
        return plan_headers(scenario.source, scenario.rules, settings, on_progress)
    index = source_index(scenario.source, scenario.rules, on_progress)
    return index, plan_mixed(index, scenario.rules, scenario.auto, settings, run_dir or scenario.run_dir)


def plan_mixed(
    index: SourceIndex, rules: Sequence[Rule], auto: Auto, settings: Settings, run_dir: Path
) -> Plan:
    """The plan of rules with `auto`. What `vexport run` measured in `run_dir` decides; without that each
    group gets its smallest candidate, and a note says so.

    Raises InputError as `find_layer_groups`, and where no mixture is within the budget.
    """
    layer_groups = find_layer_groups(index, rules, auto, settings)
    plain = build_plan(index, rules_with((), {}, rules), settings)
    known = _measured(run_dir, layer_groups)
    if known is None:
        plan = build_plan(index, rules_with(layer_groups, smallest(layer_groups), rules), settings)
        require_in_reach(index, layer_groups, plain, auto)
        return replace(plan, notes=(*plan.notes, *_refused(layer_groups), _not_measured(auto, run_dir)))
    mixed = mixed_scheme(
        known.groups,
        {layer_group.name: layer_group.allowed for layer_group in layer_groups},
        auto,
        rest_bytes=rest_bytes(index, layer_groups, plain),
        source_bytes=index.num_bytes,
        parameters=index.num_parameters,
    )
    chosen = {one.name: one.scheme for one in mixed.choices}
    plan = build_plan(index, rules_with(layer_groups, chosen, rules), settings)
    return replace(plan, notes=(*plan.notes, *_refused(layer_groups)))


def require_in_reach(index: SourceIndex, layer_groups: Sequence[LayerGroup], plan: Plan, auto: Auto) -> None:
    """Raise InputError where the smallest candidates are beyond a budget of size; `plan` has the rest."""
    schemes = smallest(layer_groups)
    least = sum(layer_group.bytes_in(schemes[layer_group.name]) for layer_group in layer_groups)
    require_size_in_reach(
        auto,
        least + rest_bytes(index, layer_groups, plan),
        source_bytes=index.num_bytes,
        parameters=index.num_parameters,
    )


def _measured(run_dir: Path, layer_groups: Sequence[LayerGroup]) -> Sensitivity | None:
    """What a run found of these very layer groups in these schemes, rounded in these ways."""
    file = run_dir / FILE
    if not file.is_file():
        return None
    found = from_json(Sensitivity, file)
    sizes = {
        (group.name, one.scheme, one.observer, one.rounding, one.num_bytes)
        for group in found.groups
        for one in group.schemes
    }
    needed = {
        (layer_group.name, one.scheme, one.groups[0].observers, one.groups[0].rounding, one.num_bytes)
        for layer_group in layer_groups
        for one in layer_group.options
    }
    return found if needed == sizes else None


def _refused(layer_groups: Sequence[LayerGroup]) -> tuple[Finding, ...]:
    return tuple(
        replace(finding, fix="another candidate is taken here")
        for layer_group in layer_groups
        for finding in layer_group.refused
    )


def _not_measured(auto: Auto, run_dir: Path) -> Finding:
    kind, limit = auto.budget
    return Finding(
        check="auto",
        severity="warning",
        where="scheme: auto",
        expected=f"the loss of each group in {', '.join(auto.candidates)}, to choose for {kind} {limit:g}",
        got=f"none in {run_dir}: the plan shows the smallest candidate of each group",
        fix="`vexport run` measures it",
    )
