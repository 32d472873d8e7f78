"""The choice for `scheme: auto`: by measured losses where a run has left them, else the smallest.

The mixed scheme of least loss within a budget is a knapsack with one choice for each group. Losses of groups
are added up, as if each did its harm alone (measured one at a time, they are small); the run's evaluation has
the last word. scipy.optimize.milp took up to 17 percent more loss than the best, by its tolerances.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.files import from_json
from vexport.formats.schemes import KEEP
from vexport.plan.build import build_plan
from vexport.plan.source import plan_headers, settings_of, source_index
from vexport.quantize.layer_groups import LayerGroup, find_layer_groups, rest_bytes, rules_with, smallest
from vexport.records import (
    Finding,
    GroupSensitivities,
    GroupSensitivity,
    MixedScheme,
    OnProgress,
    Plan,
    SchemeChoice,
    silent,
)
from vexport.scenario import Auto, Scenario

# The most mixtures kept while groups are added. Below it the answer is exact: groups come in few sizes, so
# even large models have few different totals.
MOST_MIXTURES = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixtures:
    """The best mixtures: bytes rise and losses fall from one to the next; `picks` has an option for each
    group, shape (mixtures, groups)."""

    num_bytes: npt.NDArray[np.int64]
    loss: npt.NDArray[np.float64]
    picks: npt.NDArray[np.int16]


def best_mixtures(groups: Sequence[Sequence[SchemeChoice]]) -> Mixtures:
    """All mixtures that no other beats in both bytes and loss; those beyond MOST_MIXTURES are thinned."""
    num_bytes, loss = np.zeros(1, np.int64), np.zeros(1, np.float64)
    steps: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]]] = []
    for options in groups:
        sizes = np.array([option.num_bytes for option in options], np.int64)
        losses = np.array([option.loss for option in options], np.float64)
        all_bytes, all_losses = (num_bytes[:, None] + sizes).ravel(), (loss[:, None] + losses).ravel()
        kept = _thinned(_unbeaten(all_bytes, all_losses), all_bytes)
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


def _unbeaten(num_bytes: npt.NDArray[np.int64], loss: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The mixtures for which none of as few bytes has as little loss, in order of bytes."""
    order = np.lexsort((loss, num_bytes))
    sorted_loss = loss[order]
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(sorted_loss)[:-1]])
    kept: npt.NDArray[np.int64] = order[sorted_loss < least_before]
    return kept


def _thinned(kept: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """At most MOST_MIXTURES: the smallest, and the last (of least loss) in each of equal steps of bytes."""
    if len(kept) <= MOST_MIXTURES:
        return kept
    sizes = num_bytes[kept]
    step = np.linspace(sizes[0], sizes[-1], MOST_MIXTURES)
    last = np.searchsorted(sizes, step, side="right") - 1
    return kept[np.unique(last)]


def mixed_scheme(
    groups: Sequence[GroupSensitivity],
    allowed: Mapping[str, Sequence[str]],
    auto: Auto,
    *,
    rest_bytes: int,
    source_bytes: int,
    parameters: int,
) -> MixedScheme:
    """The choice for every group within the budget of `auto`.

    `allowed` has the schemes to choose from by group, `rest_bytes` is what no choice changes of the output.
    Raises InputError where none fits.
    """
    options = [tuple(_options(group, allowed[group.name])) for group in groups]
    mixtures = best_mixtures(options)
    sizes = mixtures.num_bytes + rest_bytes
    require_size_in_reach(auto, int(sizes[0]), source_bytes=source_bytes, parameters=parameters)
    kind, limit = auto.budget
    chosen = int(np.flatnonzero(sizes <= _most_bytes(auto, source_bytes, parameters))[-1])
    choices = tuple(one[pick] for one, pick in zip(options, mixtures.picks[chosen], strict=True))
    return MixedScheme(
        budget=kind,
        limit=limit,
        candidates=auto.candidates,
        output_bytes=rest_bytes + sum(one.num_bytes for one in choices),
        loss=float(mixtures.loss[chosen]),
        choices=choices,
    )


def require_size_in_reach(auto: Auto, least_bytes: int, *, source_bytes: int, parameters: int) -> None:
    """InputError where the smallest candidates, `least_bytes` of output, are beyond the budget."""
    if least_bytes <= _most_bytes(auto, source_bytes, parameters):
        return
    kind, limit = auto.budget
    reached = {
        "bits": f"{8 * least_bytes / max(1, parameters):.3f} bits per weight of the whole model",
        "bytes": f"{least_bytes} bytes",
        "share": f"{least_bytes / max(1, source_bytes):.3f} of the source",
    }[kind]
    raise InputError(
        f"auto.{kind}",
        got=f"{limit:g}",
        need=f"at least {reached}, what the candidates can reach",
        fix="widen the budget, or add a smaller candidate",
    )


def _most_bytes(auto: Auto, source_bytes: int, parameters: int) -> float:
    kind, limit = auto.budget
    return {"bits": limit * parameters / 8, "bytes": limit, "share": limit * source_bytes}[kind]


def _options(group: GroupSensitivity, allowed: Sequence[str]) -> Iterator[SchemeChoice]:
    costs = {one.scheme: (one.num_bytes, max(0.0, one.loss)) for one in group.schemes}
    costs[KEEP] = (group.source_bytes, 0.0)
    for scheme in allowed:
        if scheme in costs:
            num_bytes, loss = costs[scheme]
            yield SchemeChoice(name=group.name, scheme=scheme, num_bytes=num_bytes, loss=loss)


FILE = "sensitivity.json"


def plan_scenario(
    scenario: Scenario, run_dir: Path | None = None, on_progress: OnProgress = silent
) -> tuple[SourceIndex, Plan]:
    """The headers and the plan of what a scenario asks for.

    With `auto` what `vexport run` measured in `run_dir` decides; without that each group gets its smallest
    candidate, and a note says so. Raises InputError as `find_layer_groups`, and where no mixture is within
    the budget.
    """
    settings, rules, auto = settings_of(scenario), scenario.rules, scenario.auto
    if auto is None:
        return plan_headers(scenario.source, rules, settings, on_progress)
    index = source_index(scenario.source, rules, on_progress)
    run_dir = run_dir or scenario.run_dir
    layer_groups = find_layer_groups(index, rules, auto, settings)
    plain = build_plan(index, rules_with((), {}, rules), settings)
    notes = [
        replace(finding, fix="another candidate is taken here")
        for layer_group in layer_groups
        for finding in layer_group.refused
    ]
    if (measured := _measured(run_dir, layer_groups)) is not None:
        mixed = choose_schemes(index, layer_groups, measured, plain, auto)
        chosen = {choice.name: choice.scheme for choice in mixed.choices}
    else:
        chosen = smallest(layer_groups)
        require_in_reach(index, layer_groups, plain, auto)
        notes.append(_not_measured(auto, run_dir))
    plan = build_plan(index, rules_with(layer_groups, chosen, rules), settings)
    return index, replace(plan, notes=(*plan.notes, *notes))


def choose_schemes(
    index: SourceIndex,
    layer_groups: Sequence[LayerGroup],
    measured: GroupSensitivities,
    plan: Plan,
    auto: Auto,
) -> MixedScheme:
    """The schemes by measured losses; `plan` has what no choice changes."""
    return mixed_scheme(
        measured.groups,
        {layer_group.name: layer_group.allowed for layer_group in layer_groups},
        auto,
        rest_bytes=rest_bytes(index, layer_groups, plan),
        source_bytes=index.num_bytes,
        parameters=index.num_parameters,
    )


def require_in_reach(index: SourceIndex, layer_groups: Sequence[LayerGroup], plan: Plan, auto: Auto) -> None:
    """Raise InputError where the smallest candidates are beyond a budget of size; `plan` has the rest."""
    least = sum(min(map(group.bytes_in, group.allowed)) for group in layer_groups)
    size = least + rest_bytes(index, layer_groups, plan)
    require_size_in_reach(auto, size, source_bytes=index.num_bytes, parameters=index.num_parameters)


def _measured(run_dir: Path, layer_groups: Sequence[LayerGroup]) -> GroupSensitivities | None:
    """A run's losses of these very layer groups in these schemes, rounded in these ways."""
    file = run_dir / FILE
    if not file.is_file():
        return None
    measured = from_json(GroupSensitivities, file)
    sizes = {
        (group.name, one.scheme, one.observer, one.rounding, one.num_bytes)
        for group in measured.groups
        for one in group.schemes
    }
    needed = {
        (layer_group.name, one.scheme, one.groups[0].observers, one.groups[0].rounding, one.num_bytes)
        for layer_group in layer_groups
        for one in layer_group.options
    }
    return measured if needed == sizes else None


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
