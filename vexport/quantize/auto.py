"""Choose schemes for `scheme: auto` by measured losses, or by size if no losses were measured.

A mixture is a choice of a scheme for each layer group. Finding the mixture with the smallest loss
within a budget is a knapsack problem. Each loss is measured with a single quantized group and is
small, so the loss of a mixture is estimated by the sum. The run later evaluates the mixture as a
whole. scipy.optimize.milp is not used: because of its tolerances, it found mixtures with up to 17
percent more loss than the best.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.files import from_json
from vexport.formats.plan import Plan
from vexport.formats.schemes import KEEP
from vexport.plan.build import build_plan
from vexport.plan.source import plan_headers, scenario_settings, source_index
from vexport.quantize.layer_groups import (
    LayerGroup,
    find_layer_groups,
    fixed_bytes,
    rules_with_schemes,
    smallest_schemes,
)
from vexport.records import (
    Finding,
    GroupSensitivities,
    GroupSensitivity,
    MixedScheme,
    OnProgress,
    SchemeChoice,
    silent,
)
from vexport.rules import auto as rules
from vexport.scenario import Auto, Scenario

# Maximum number of mixtures kept while groups are added. The result is exact if this number is not
# exceeded. Groups have only a few different sizes, so even large models have few different totals.
MAX_MIXTURES = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixtures:
    """Mixtures that no other mixture beats, by increasing bytes and decreasing loss.

    `picks` (mixtures, groups) contains the index of the chosen option for each group.
    """

    num_bytes: npt.NDArray[np.int64]
    loss: npt.NDArray[np.float64]
    picks: npt.NDArray[np.int16]


def best_mixtures(groups: Sequence[Sequence[SchemeChoice]]) -> Mixtures:
    """Return all mixtures that no other mixture beats in both bytes and loss.

    Keeps at most MAX_MIXTURES of them, evenly spread over the range of bytes.
    """
    num_bytes, loss = np.zeros(1, np.int64), np.zeros(1, np.float64)
    steps: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]]] = []
    for options in groups:
        sizes = np.array([option.num_bytes for option in options], np.int64)
        losses = np.array([option.loss for option in options], np.float64)
        all_bytes = (num_bytes[:, None] + sizes).ravel()
        all_losses = (loss[:, None] + losses).ravel()
        kept = _thin_out(_pareto_front(all_bytes, all_losses), all_bytes)
        num_bytes, loss = all_bytes[kept], all_losses[kept]
        before, option = np.divmod(kept, len(options))
        steps.append((before.astype(np.int32), option.astype(np.int16)))
    picks = np.empty((len(num_bytes), len(groups)), np.int16)
    position = np.arange(len(num_bytes))
    for number in range(len(groups) - 1, -1, -1):
        before, option = steps[number]
        picks[:, number] = option[position]
        position = before[position]
    return Mixtures(num_bytes=num_bytes, loss=loss, picks=picks)


def _pareto_front(
    num_bytes: npt.NDArray[np.int64], loss: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    order = np.lexsort((loss, num_bytes))
    sorted_loss = loss[order]
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(sorted_loss)[:-1]])
    kept: npt.NDArray[np.int64] = order[sorted_loss < least_before]
    return kept


def _thin_out(
    kept: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return at most MAX_MIXTURES mixtures, evenly spread over the range of bytes.

    The range of bytes is split into equal steps. The last mixture of each step is kept, because it
    has the smallest loss. The smallest mixture is always kept.
    """
    if len(kept) <= MAX_MIXTURES:
        return kept
    sizes = num_bytes[kept]
    step = np.linspace(sizes[0], sizes[-1], MAX_MIXTURES)
    last = np.searchsorted(sizes, step, side="right") - 1
    return kept[np.unique(last)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limit of `scheme: auto` for the size of the output.

    `fixed_bytes` is the size of all tensors for which no scheme is chosen.
    """

    auto: Auto
    fixed_bytes: int
    source_bytes: int
    parameters: int

    @property
    def unit(self) -> float:
        """Return the bytes for a limit of 1 (1 bit per weight, 1 byte, or the source's size)."""
        return {"bits": self.parameters / 8, "bytes": 1.0, "share": self.source_bytes}[
            self.auto.budget[0]
        ]

    @property
    def limit_bytes(self) -> float:
        """Return the maximum size of the output in bytes."""
        return self.auto.budget[1] * self.unit

    def require_in_reach(self, least_bytes: int) -> None:
        """Raise InputError if the output with the smallest candidates exceeds the budget.

        `least_bytes` is the size of this output.
        """
        kind, limit = self.auto.budget
        words = {"bits": "{:.3f} bits per weight of the whole model", "bytes": "{:.0f} bytes"}
        if least_bytes > self.limit_bytes:
            reached = words.get(kind, "{:.3f} of the source").format(least_bytes / self.unit)
            raise InputError.of(rules.BUDGET, f"auto.{kind}", limit=limit, least=reached)


def budget_of(
    index: SourceIndex, layer_groups: Sequence[LayerGroup], plan: Plan, auto: Auto
) -> Budget:
    """Return the budget for a source. `plan` is a plan in which `auto` keeps all layers."""
    return Budget(
        auto=auto,
        fixed_bytes=fixed_bytes(index, layer_groups, plan),
        source_bytes=index.num_bytes,
        parameters=index.num_parameters,
    )


def require_in_reach(layer_groups: Sequence[LayerGroup], budget: Budget) -> None:
    """Raise InputError if the smallest candidates exceed the budget."""
    least = sum(min(map(group.bytes_in, group.allowed)) for group in layer_groups)
    budget.require_in_reach(least + budget.fixed_bytes)


def choose_schemes(
    groups: Sequence[GroupSensitivity], layer_groups: Sequence[LayerGroup], budget: Budget
) -> MixedScheme:
    """Return the schemes with the least measured loss within the budget.

    Raises InputError if no mixture fits the budget.
    """
    allowed = {layer_group.name: layer_group.allowed for layer_group in layer_groups}
    options = [_options(group, allowed[group.name]) for group in groups]
    mixtures = best_mixtures(options)
    sizes = mixtures.num_bytes + budget.fixed_bytes
    budget.require_in_reach(int(sizes[0]))
    chosen = int(np.flatnonzero(sizes <= budget.limit_bytes)[-1])
    kind, limit = budget.auto.budget
    return MixedScheme(
        budget=kind,
        limit=limit,
        candidates=budget.auto.candidates,
        output_bytes=int(sizes[chosen]),
        loss=float(mixtures.loss[chosen]),
        choices=tuple(
            each[pick] for each, pick in zip(options, mixtures.picks[chosen], strict=True)
        ),
    )


def _options(group: GroupSensitivity, allowed: Sequence[str]) -> list[SchemeChoice]:
    costs = {each.scheme: (each.num_bytes, max(0.0, each.loss)) for each in group.schemes}
    costs[KEEP] = (group.source_bytes, 0.0)
    return [
        SchemeChoice(
            name=group.name, scheme=scheme, num_bytes=costs[scheme][0], loss=costs[scheme][1]
        )
        for scheme in allowed
    ]


SENSITIVITY_FILE = "sensitivity.json"


def plan_scenario(
    scenario: Scenario,
    run_dir: Path | None = None,
    on_progress: OnProgress = silent,
    *,
    trust_remote_code: bool = False,
) -> tuple[SourceIndex, Plan]:
    """Return the headers of a scenario's source, and the scenario's plan.

    `auto` uses the losses that `vexport run` measured in `run_dir`. Without measured losses, each
    group gets its smallest candidate, and the plan contains a note about this. Raises the
    InputErrors of `find_layer_groups`, and InputError if no mixture is within the budget.
    """
    settings, rules, auto = scenario_settings(scenario), scenario.rules, scenario.auto
    if auto is None:
        return plan_headers(
            scenario.source, rules, settings, on_progress, trust_remote_code=trust_remote_code
        )
    index = source_index(scenario.source, rules, on_progress, trust_remote_code=trust_remote_code)
    run_dir = run_dir or scenario.run_dir
    layer_groups = find_layer_groups(index, rules, auto, settings)
    plain = build_plan(index, rules_with_schemes((), {}, rules), settings)
    notes = [
        replace(finding, fix="another candidate is used for these layers")
        for layer_group in layer_groups
        for finding in layer_group.refused
    ]
    budget = budget_of(index, layer_groups, plain, auto)
    if (measured := _measured_losses(run_dir, layer_groups)) is not None:
        choices = choose_schemes(measured.groups, layer_groups, budget).choices
        chosen = {choice.name: choice.scheme for choice in choices}
    else:
        chosen = smallest_schemes(layer_groups)
        require_in_reach(layer_groups, budget)
        notes.append(_missing_losses_note(auto, run_dir))
    plan = build_plan(index, rules_with_schemes(layer_groups, chosen, rules), settings)
    return index, replace(plan, notes=(*plan.notes, *notes))


def _measured_losses(
    run_dir: Path, layer_groups: Sequence[LayerGroup]
) -> GroupSensitivities | None:
    """Return the losses that a run measured, or None.

    Losses are used only if they were measured for the same layer groups, schemes and roundings.
    """
    file = run_dir / SENSITIVITY_FILE
    if not file.is_file():
        return None
    measured = from_json(GroupSensitivities, file)
    sizes = {
        (group.name, option.scheme, option.observer, option.rounding, option.num_bytes)
        for group in measured.groups
        for option in group.schemes
    }
    needed = {
        (
            layer_group.name,
            option.scheme,
            option.groups[0].observers,
            option.groups[0].rounding,
            option.num_bytes,
        )
        for layer_group in layer_groups
        for option in layer_group.options
    }
    return measured if needed == sizes else None


def _missing_losses_note(auto: Auto, run_dir: Path) -> Finding:
    kind, limit = auto.budget
    return Finding.at(
        rules.NO_LOSSES,
        "scheme: auto",
        folder=run_dir,
        candidates=", ".join(auto.candidates),
        kind=kind,
        limit=limit,
    )
