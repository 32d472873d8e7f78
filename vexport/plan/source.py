"""From the name of a source, a folder or a hub id, to its headers and its plan."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace

from pydantic import ValidationError

from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.source import pinned_source, resolve_source, source_headers
from vexport.errors import InputError, nearest
from vexport.formats.schemes import (
    KEEP,
    get_scheme,
    grouped_schemes,
    scheme_name,
    scheme_names,
    with_group_size,
)
from vexport.plan.build import Settings, build_plan, hidden_rule_notes
from vexport.plan.table import scheme_table
from vexport.plugins import OBSERVERS as PLUGIN_OBSERVERS
from vexport.plugins import plugins
from vexport.scenario import GroupSize, Rule, Scenario, parse_group_size
from vexport.types import OnProgress, Plan, SchemeTable, silent
from vexport.types.observer_names import OBSERVERS
from vexport.types.rounding import Rounding

DEFAULTS = Settings()


def rules_for(
    scheme: str,
    *,
    observer: str | None,
    ignore: Sequence[str],
    rounding: Rounding | None = None,
    group_size: GroupSize | None = None,
) -> tuple[Rule, ...]:
    """The rules of a command line: what to ignore is kept, all other linear layers get the scheme."""
    name = get_scheme(scheme_name(scheme)).name
    if group_size is not None:
        name = with_group_size(name, parse_group_size(group_size))
    rule = Rule(match="Linear", scheme=name, observer=observer, rounding=rounding)
    return (*ignored_rules(ignore), rule)


def ignored_rules(ignore: Sequence[str]) -> tuple[Rule, ...]:
    """A rule that keeps for each --ignore."""
    try:
        return tuple(Rule(match=pattern, scheme=KEEP) for pattern in ignore)
    except ValidationError as error:
        first = error.errors()[0]
        need = first["msg"].removeprefix("Value error, ")
        raise InputError("--ignore", got=repr(first["input"]), need=need, fix="correct the pattern") from None


def settings_of(scenario: Scenario) -> Settings:
    """What a scenario's plan depends on besides its rules."""
    return Settings(
        ranks=scenario.serve.planned_ranks,
        on_unsupported_shape=scenario.on_unsupported_shape,
        kv_cache=scenario.kv_cache,
        has_text=scenario.calibration is not None,
        smoothing=scenario.smoothing,
        origin="scenario",
    )


def source_index(source: str, rules: Sequence[Rule], on_progress: OnProgress = silent) -> SourceIndex:
    """The headers of a source, whose weights are fetched; InputError where it or an observer is unusable."""
    require_observers({rule.observer for rule in rules if rule.observer})
    return read_index(resolve_source(source, on_progress))


def plan_source(
    source: str,
    rules: Sequence[Rule],
    settings: Settings = DEFAULTS,
    *,
    on_progress: OnProgress = silent,
) -> tuple[SourceIndex, Plan]:
    """Read a source's headers and plan. Raises InputError for an unusable source or rule."""
    index = source_index(source, rules, on_progress)
    plan = build_plan(index, rules, settings)
    return index, replace(plan, notes=(*plan.notes, *hidden_rule_notes(index, rules)))


def plan_headers(
    source: str, rules: Sequence[Rule], settings: Settings, on_progress: OnProgress
) -> tuple[SourceIndex, Plan]:
    """As `plan_source`, of a model on the hub from its headers alone, whose files may be gone afterwards."""
    with source_headers(source, on_progress) as root:
        index, plan = plan_source(str(root), rules, settings)
        return index, replace(plan, source=pinned_source(source, root))


def table_of_schemes(
    source: str,
    kept: Sequence[Rule],
    settings: Settings,
    on_progress: OnProgress,
    group_size: GroupSize | None = None,
) -> SchemeTable:
    """What every scheme would give for a model, from its headers; see `vexport.plan.table`."""
    names = scheme_names()
    if group_size is not None:
        names = grouped_schemes(parse_group_size(group_size))
    with source_headers(source, on_progress) as root:
        table = scheme_table(read_index(root), kept, settings, names)
        return replace(table, source=pinned_source(source, root))


def require_observers(names: Collection[str]) -> None:
    """InputError for a name that no observer has."""
    known = (*OBSERVERS, *plugins(PLUGIN_OBSERVERS), *_registered())
    for name in names:
        if name not in known:
            raise InputError(
                f"observer {name!r}",
                got="an unknown name",
                need=f"one of {', '.join(dict.fromkeys(known))}",
                fix=f"see `vexport list observers`{nearest(name, known)}",
            )


def _registered() -> list[str]:
    """Names of `Observer.register`: there are none unless a program has loaded the classes itself."""
    module = sys.modules.get("vexport.observers.base")
    return [] if module is None else [kind.registry_name for kind in module.named_observers()]
