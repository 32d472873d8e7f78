"""From the name of a source, a folder or a hub id, to its headers and its plan."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.source import pinned_source, resolve_source, source_headers
from vexport.errors import InputError, InputErrors, raise_all
from vexport.errors.extras import require_extra
from vexport.formats.arguments import QuantArgs
from vexport.formats.schemes import (
    KEEP,
    get_scheme,
    grouped_schemes,
    scheme_name,
    scheme_names,
    with_group_size,
)
from vexport.plan.build import PlanSettings, build_plan, hidden_rule_notes
from vexport.plan.table import scheme_table
from vexport.records import GroupSize, OnProgress, Plan, PlanRequest, SchemeTable, silent
from vexport.records.observer_names import OBSERVERS, OptionValue
from vexport.records.rounding import Rounding
from vexport.scenario import AUTO, Rule, Scenario, parse_group_size
from vexport.scenario.llmcompressor import read_recipe

DEFAULTS = PlanSettings()


def rules_for(
    scheme: str,
    *,
    observer: str | None,
    ignore: Sequence[str],
    input_observer: str | None = None,
    rounding: Rounding | None = None,
    group_size: GroupSize | None = None,
) -> tuple[Rule, ...]:
    """The rules of a command line: what to ignore is kept, all other linear layers get the scheme.

    Raises InputErrors by the names of the options.
    """
    name = get_scheme(scheme_name(scheme)).name
    if group_size is not None:
        name = with_group_size(name, parse_group_size(group_size))
    try:
        rule = Rule(
            match="Linear", scheme=name, observer=observer, input_observer=input_observer, rounding=rounding
        )
    except ValidationError as error:
        raise InputErrors([_option_problem(detail) for detail in error.errors()]) from None
    return (*ignored_rules(ignore), rule)


def requested(
    request: PlanRequest, rules: Sequence[Rule], note: Callable[[str], None]
) -> tuple[tuple[Rule, ...], PlanSettings]:
    """The rules of a call, and the settings besides; `note` is told what of a recipe is not followed.

    ValueError unless one of a scheme, a recipe and `rules` is given, and what goes with a scheme alone.
    """
    if [request.scheme is None, request.recipe is None, not rules].count(False) != 1:
        raise ValueError("got several or none of scheme, recipe and rules, need one of them")
    settings = PlanSettings(
        ranks=request.tp or (1,),
        on_unsupported_shape=request.on_unsupported_shape,
        kv_cache=request.kv_cache,
        smoothing=request.smoothing,
    )
    of_scheme = (request.observer, request.input_observer, request.rounding, request.group_size)
    if request.scheme is not None:
        return rules_for(
            request.scheme,
            observer=request.observer,
            input_observer=request.input_observer,
            ignore=request.ignore,
            rounding=request.rounding,
            group_size=request.group_size,
        ), settings
    if any(each is not None for each in of_scheme):
        raise ValueError("got an observer, rounding or group_size next to what says the same, need it there")
    if request.recipe is not None:
        recipe = read_recipe(request.recipe)
        for text in recipe.notes:
            note(text)
        smoothing = recipe.smoothing if request.smoothing is None else request.smoothing
        kv_cache = request.kv_cache or recipe.kv_cache
        rules, settings = recipe.rules, replace(settings, kv_cache=kv_cache, smoothing=smoothing)
    return (*ignored_rules(request.ignore), *rules), settings


def ignored_rules(ignore: Sequence[str]) -> tuple[Rule, ...]:
    """A rule that keeps for each --ignore."""
    try:
        return tuple(Rule(match=pattern, scheme=KEEP) for pattern in ignore)
    except ValidationError as error:
        problem = _option_problem(error.errors()[0])
        raise InputError("--ignore", got=problem.got, need=problem.need, fix="correct the pattern") from None


def _option_problem(detail: ErrorDetails) -> InputError:
    """A problem of a rule's key, by the option that it comes from."""
    option = f"--{detail['loc'][0]}".replace("_", "-")
    need, fix = detail["msg"].removeprefix("Value error, "), detail.get("ctx", {}).get("fix", "correct it")
    return InputError(option, got=repr(detail["input"]), need=need, fix=str(fix))


def settings_of(scenario: Scenario) -> PlanSettings:
    """Return the settings of a scenario's plan besides its rules."""
    return PlanSettings(
        ranks=scenario.serve.planned_ranks,
        on_unsupported_shape=scenario.on_unsupported_shape,
        kv_cache=scenario.kv_cache,
        has_text=scenario.calibration is not None,
        smoothing=scenario.smoothing,
        origin="scenario",
    )


def source_index(source: str, rules: Sequence[Rule], on_progress: OnProgress = silent) -> SourceIndex:
    """The headers of a source, whose weights are fetched; InputError where it or an observer is unusable."""
    raise_all([problem for rule in rules for problem in _observer_problems(rule)])
    return read_index(resolve_source(source, on_progress))


def plan_source(
    source: str, rules: Sequence[Rule], settings: PlanSettings = DEFAULTS, *, on_progress: OnProgress = silent
) -> tuple[SourceIndex, Plan]:
    """Read a source's headers and plan. Raises InputError for an unusable source or rule."""
    index = source_index(source, rules, on_progress)
    plan = build_plan(index, rules, settings)
    return index, replace(plan, notes=(*plan.notes, *hidden_rule_notes(index, rules)))


def plan_headers(
    source: str, rules: Sequence[Rule], settings: PlanSettings, on_progress: OnProgress
) -> tuple[SourceIndex, Plan]:
    """Plan a model as `plan_source` does, from headers alone, whose files may be gone afterwards."""
    with source_headers(source, on_progress) as root:
        index, plan = plan_source(str(root), rules, settings)
        return index, replace(plan, source=pinned_source(source, root))


def table_of_schemes(
    source: str,
    kept: Sequence[Rule],
    settings: PlanSettings,
    on_progress: OnProgress,
    group_size: GroupSize | None = None,
) -> SchemeTable:
    """Compare all schemes for a model, from its headers; see `vexport.plan.table`."""
    names = scheme_names()
    if group_size is not None:
        names = grouped_schemes(parse_group_size(group_size))
    with source_headers(source, on_progress) as root:
        table = scheme_table(read_index(root), kept, settings, names)
        return replace(table, source=pinned_source(source, root))


def _observer_problems(rule: Rule) -> Iterator[InputError]:
    """Return the problems of a rule's observers that are not vexport's own, whose classes say them."""
    if rule.scheme in (KEEP, AUTO):
        return
    args = get_scheme(rule.scheme).args
    if rule.observer and rule.observer not in OBSERVERS:
        yield from _class_problems(rule, "observer", rule.observer, args.weights, rule.observer_kwargs)
    inputs = args.input_activations
    if rule.input_observer and rule.input_observer not in OBSERVERS and inputs is not None:
        name, keywords = rule.input_observer, rule.input_observer_kwargs
        yield from _class_problems(rule, "input_observer", name, inputs, keywords)


def _class_problems(
    rule: Rule, key: str, name: str, args: QuantArgs, keywords: Mapping[str, OptionValue]
) -> Iterator[InputError]:
    """Return why an observer of another package cannot be used for what a rule names it for."""
    require_extra("torch", f"the observer {name}")
    from vexport.observers import IMatrixMSEObserver, Observer

    where, of_inputs = f"rule {rule.match!r}: {key}", key == "input_observer"
    try:
        observer = Observer.of_name(name)("input" if of_inputs else "weight", args, **keywords)
    except ValueError as error:
        yield InputError(where, got=str(error), need="", fix="correct it, or use an observer of vexport")
        return
    if isinstance(observer, IMatrixMSEObserver):
        need = "one without importance, which calibration gathers for imatrix_mse"
        yield InputError(where, got=f"{name}, a search by importance", need=need, fix="use imatrix_mse")
    if of_inputs and type(observer).get_qparams is not Observer.get_qparams:
        need = "one whose range says it: the scale of fused layers' inputs is that of all their ranges"
        yield InputError(where, got=f"{name}, with get_qparams of its own", need=need, fix="set min_vals")
