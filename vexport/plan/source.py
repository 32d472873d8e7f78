"""Plans and scheme tables of a source, which is a folder or a hub id."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from vexport.architectures import resolve
from vexport.architectures.linears import Names, names_of
from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.source import pinned_source, resolve_source, source_headers
from vexport.errors import InputError, InputErrors, raise_all
from vexport.errors.extras import require_extra
from vexport.errors.validation import ValidationProblem, validation_problems
from vexport.formats.arguments import QuantArgs
from vexport.formats.gpus import generation
from vexport.formats.plan import FusionGroup, Plan
from vexport.formats.schemes import (
    KEEP,
    Scheme,
    get_scheme,
    grouped_schemes,
    scheme_name,
    scheme_names,
    with_group_size,
)
from vexport.names import Folder, SourceRef
from vexport.plan.blocks import quantized_bytes
from vexport.plan.build import PlanSettings, build_plan, fitting_sizes, hidden_rule_notes
from vexport.plan.faults import plan_faults
from vexport.plan.shapes import kind_of_group, unsupported
from vexport.records import (
    GroupSize,
    KvCache,
    OnProgress,
    SchemeOutlook,
    SchemeTable,
    silent,
)
from vexport.records.observer_names import BY_IMPORTANCE, CLASS_SEPARATOR, OBSERVERS, OptionValue
from vexport.rules import rules as book
from vexport.scenario import (
    AUTO,
    Calibration,
    Planning,
    Rule,
    Scenario,
    default_calibration,
    parse_group_size,
)
from vexport.scenario.llmcompressor import read_recipe
from vexport.scenario.plain_arguments import code_problems
from vexport.scenario.serve import Serve
from vexport.scenario.variants import with_setting
from vexport.version import Version

DEFAULT_SETTINGS = PlanSettings()
# A plan with this scheme shows which layers a rule for all linear layers matches. The choice of
# scheme does not matter.
PROBE_SCHEME = "FP8_DYNAMIC"


def scheme_rules(request: Planning) -> tuple[Rule, ...]:
    """Return the rules of a scheme: keep the ignored layers, quantize all other linear layers.

    Raises InputErrors that name the options.
    """
    name = get_scheme(scheme_name(request.scheme or "")).name
    if request.group_size is not None:
        name = with_group_size(name, parse_group_size(request.group_size))
    try:
        rule = Rule(
            match="Linear",
            scheme=name,
            observer=request.observer,
            input_observer=request.input_observer,
            rounding=request.rounding,
        )
    except ValidationError as error:
        raise InputErrors([_at_option(problem) for problem in validation_problems(error)]) from None
    return (*ignored_rules(request.ignore), rule)


def rules_and_settings(
    request: Planning,
    rules: Sequence[Rule],
    note: Callable[[str], None],
    *,
    trust_remote_code: bool = False,
) -> tuple[tuple[Rule, ...], PlanSettings]:
    """Return the rules and the settings of a plan.

    `note` receives a message for each part of a recipe that vexport does not follow.

    Raises InputError if a recipe names observers that only run with `trust_remote_code`. Raises
    ValueError unless exactly one of a scheme, a recipe and `rules` is given, or if arguments for a
    scheme are given without a scheme.
    """
    if [request.scheme is None, request.recipe is None, not rules].count(False) != 1:
        raise ValueError("got none or several of scheme, recipe and rules, need exactly one")
    settings = PlanSettings(
        ranks=request.tp,
        on_unsupported_shape=request.on_unsupported_shape,
        kv_cache=request.kv_cache,
        smoothing=request.smoothing,
        include_vision=request.include_vision,
    )
    if request.scheme is not None:
        return scheme_rules(request), settings
    of_scheme = (request.observer, request.input_observer, request.rounding, request.group_size)
    if any(each is not None for each in of_scheme):
        raise ValueError(
            "observer, input_observer, rounding and group_size need scheme; set them in the rules "
            "or in the recipe instead"
        )
    if request.recipe is not None:
        recipe = read_recipe(request.recipe)
        require_trusted_observers(recipe.rules, trusted=trust_remote_code)
        for text in recipe.notes:
            note(text)
        smoothing = recipe.smoothing if request.smoothing is None else request.smoothing
        kv_cache = request.kv_cache or recipe.kv_cache
        rules = recipe.rules
        settings = replace(settings, kv_cache=kv_cache, smoothing=smoothing)
    return (*ignored_rules(request.ignore), *rules), settings


def ignored_rules(ignore: Sequence[str]) -> tuple[Rule, ...]:
    """Return a rule with scheme `keep` for each --ignore pattern."""
    try:
        return tuple(Rule(match=pattern, scheme=KEEP) for pattern in ignore)
    except ValidationError as error:
        problem = validation_problems(error)[0]
        raise InputError.of(
            book.PATTERN, "--ignore", found=problem.found, need=problem.need
        ) from None


def _at_option(problem: ValidationProblem) -> InputError:
    return problem.at(f"--{problem.keys[0]}".replace("_", "-"))


def scenario_settings(scenario: Scenario) -> PlanSettings:
    """Return the settings of a scenario's plan, without its rules."""
    return PlanSettings(
        ranks=scenario.serve.planned_ranks,
        on_unsupported_shape=scenario.on_unsupported_shape,
        kv_cache=scenario.kv_cache,
        has_text=scenario.calibration is not None,
        smoothing=scenario.smoothing,
        include_vision=scenario.include_vision,
        origin="scenario",
    )


def default_text_note(rules: Sequence[Rule]) -> str:
    """Return the note that vexport's text is used because the user named no text.

    The note also suggests schemes that need no text.
    """
    schemes = {rule.scheme for rule in rules if rule.scheme not in (KEEP, AUTO)}
    alternatives = {name: _scheme_without_text(name) for name in sorted(schemes)}
    suggestions = [
        f". {other} needs no text, and could replace {name}"
        for name, other in alternatives.items()
        if other
    ]
    return (
        "calibrating on the text that ships with vexport, because no calibration data was given. "
        f"Text that resembles the model's use gives better scales{''.join(suggestions)}"
    )


def _scheme_without_text(name: str) -> str | None:
    """Return the first scheme with the same storage format that needs no text.

    Returns None if no such scheme exists, or if the scheme itself needs no text.
    """
    scheme = get_scheme(name)
    if not scheme.args.calibrated:
        return None
    for other in map(get_scheme, scheme_names()):
        if other.format is scheme.format and not other.args.calibrated:
            return other.name
    return None


def rules_need_calibration(
    rules: Sequence[Rule], kv_cache: KvCache | None, smoothing: float | None = None
) -> bool:
    """Return True if a plan by these rules needs samples, provided that the rules match a layer."""
    return (
        kv_cache is not None
        or bool(smoothing)
        or any(
            rule.method not in (None, "nearest")
            or rule.observer in BY_IMPORTANCE
            or get_scheme(rule.scheme).args.calibrated
            for rule in rules
            if rule.scheme not in (KEEP, AUTO)
        )
    )


def rounded_to_nearest(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules with `rounding: nearest` in each rule that sets no rounding.

    They are used with the text that ships with vexport. This text is only for what the rules need,
    such as static scales, and not for refits.
    """
    return tuple(
        rule.model_copy(update={"rounding": "nearest"}) if rule.rounding is None else rule
        for rule in rules
    )


def with_calibration_text(
    rules: Sequence[Rule],
    settings: PlanSettings,
    text: Calibration | None,
    default: Calibration,
    note: Callable[[str], None],
) -> tuple[tuple[Rule, ...], PlanSettings, Calibration | None]:
    """Return (rules, settings, text) for planning with calibration text.

    If the rules need text and `text` is None, the text is `default`, rules without a rounding round
    to nearest, and `note` receives a message. Otherwise, rules and text are unchanged.
    """
    if text is None and rules_need_calibration(rules, settings.kv_cache, settings.smoothing):
        note(default_text_note(rules))
        return rounded_to_nearest(rules), replace(settings, has_text=True), default
    return tuple(rules), replace(settings, has_text=text is not None), text


def with_default_text(scenarios: Sequence[Scenario], note: Callable[[str], None]) -> list[Scenario]:
    """Give all scenarios the text that ships with vexport, if one of them needs text and has none.

    In this case, `note` receives a message. Otherwise, the scenarios are returned unchanged.
    """
    if not any(
        scenario.calibration is None
        and rules_need_calibration(scenario.rules, scenario.kv_cache, scenario.smoothing)
        for scenario in scenarios
    ):
        return list(scenarios)
    note(default_text_note([rule for scenario in scenarios for rule in scenario.rules]))
    text = default_calibration()
    return [
        scenario.model_copy(
            update={"calibration": text, "rules": rounded_to_nearest(scenario.rules)}
        )
        for scenario in scenarios
    ]


def require_trusted_observers(rules: Sequence[Rule], *, trusted: bool) -> None:
    """Raise InputError for each observer `package.module:Class`, unless `trusted` is True.

    The option --trust-remote-code sets it. Importing a module runs its code, and rules may come
    from other people: from a scenario, a recipe or a file of options.
    """
    if not trusted:
        raise_all([problem for rule in rules for problem in _observers_with_code(rule)])


def require_trusted_scenario(
    scenario: Scenario, file: Path, *, trusted: bool, vllm: Version
) -> None:
    """Raise InputError if a scenario file could make vexport or vLLM run Python code.

    The arguments of vLLM must be plain in the version `vllm`. Everything is accepted if the file is
    `trusted`.
    """
    if trusted:
        return
    require_trusted_observers(scenario.rules, trusted=trusted)
    given = {"serve.engine_args": scenario.serve.engine_args}
    variants = scenario.variants
    if variants is not None:
        for number, setting in enumerate(variants.serve):
            given[f"variants.serve.{number}"] = with_setting(Serve(), setting).engine_args
    problems = [
        InputError.of(
            book.ENGINE_ARGUMENT,
            f"{file}: {place}.{problem.where}",
            value=problem.value,
            need=problem.need,
        )
        for place, arguments in given.items()
        for problem in code_problems(arguments, vllm)
    ]
    if variants is not None and variants.vllm_python:
        problems.append(
            InputError.of(
                book.INTERPRETER,
                f"{file}: variants.vllm_python",
                python=variants.vllm_python[0],
            )
        )
    raise_all(problems)


def _observers_with_code(rule: Rule) -> Iterator[InputError]:
    for key, name in (("observer", rule.observer), ("input_observer", rule.input_observer)):
        if name is not None and name not in OBSERVERS and CLASS_SEPARATOR in name:
            yield InputError.of(
                book.UNTRUSTED_OBSERVER, f"rule {rule.match!r}: {key}", observer=name
            )


def source_index(
    source: SourceRef,
    rules: Sequence[Rule],
    on_progress: OnProgress = silent,
    *,
    trust_remote_code: bool = False,
) -> SourceIndex:
    """Return the headers of a source, and download its weights if needed.

    Raises InputError if the source or an observer cannot be used.
    """
    require_trusted_observers(rules, trusted=trust_remote_code)
    raise_all([problem for rule in rules for problem in _observer_problems(rule)])
    return read_index(resolve_source(source, on_progress))


def plan_source(
    source: SourceRef,
    rules: Sequence[Rule],
    settings: PlanSettings = DEFAULT_SETTINGS,
    *,
    on_progress: OnProgress = silent,
    trust_remote_code: bool = False,
) -> tuple[SourceIndex, Plan]:
    """Read a source's headers and plan. Raises InputError if the source or a rule is unusable."""
    index = source_index(source, rules, on_progress, trust_remote_code=trust_remote_code)
    plan = build_plan(index, rules, settings)
    return index, replace(plan, notes=(*plan.notes, *hidden_rule_notes(index, rules, settings)))


def plan_headers(
    source: SourceRef,
    rules: Sequence[Rule],
    settings: PlanSettings,
    on_progress: OnProgress,
    *,
    trust_remote_code: bool = False,
) -> tuple[SourceIndex, Plan]:
    """Plan a model like `plan_source`, but fetch only the headers of a model on the hub.

    The fetched files may be deleted when the function returns. The plan names the pinned source.
    """
    with source_headers(source, on_progress) as root:
        index, plan = plan_source(
            Folder.at(root), rules, settings, trust_remote_code=trust_remote_code
        )
        return index, replace(plan, source=pinned_source(source, root))


def _observer_problems(rule: Rule) -> Iterator[InputError]:
    if rule.scheme in (KEEP, AUTO):
        return
    args = get_scheme(rule.scheme).args
    for key, name, observed, keywords in (
        ("observer", rule.observer, args.weights, rule.observer_kwargs),
        ("input_observer", rule.input_observer, args.input_activations, rule.input_observer_kwargs),
    ):
        if name and name not in OBSERVERS and observed is not None:
            yield from _class_problems(rule, key, name, observed, keywords)


def _class_problems(
    rule: Rule, key: str, name: str, args: QuantArgs, keywords: Mapping[str, OptionValue]
) -> Iterator[InputError]:
    require_extra("torch", f"the observer {name}")
    from vexport.observers import IMatrixMSEObserver, Observer

    where = f"rule {rule.match!r}: {key}"
    of_inputs = key == "input_observer"
    try:
        observer = Observer.get_value_from_registry(name).create(
            "input" if of_inputs else "weight", args, keywords
        )
    except ValueError as error:
        yield InputError.of(book.OBSERVER_CLASS, where, reason=error)
        return
    if isinstance(observer, IMatrixMSEObserver):
        yield InputError.of(book.OBSERVER_IMPORTANCE, where, observer=name)
    if of_inputs and observer.returns_own_qparams:
        yield InputError.of(book.OBSERVER_RANGE, where, observer=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Kind of fused layers: an example group, the number of groups, and the example's bytes."""

    group: FusionGroup
    number: int
    source_bytes: int


def scheme_table(
    source: SourceRef,
    kept: Sequence[Rule],
    settings: PlanSettings,
    on_progress: OnProgress,
    group_size: GroupSize | None = None,
    sm: int | None = None,
) -> SchemeTable:
    """Return the table of all schemes, or of all schemes with the given group size.

    Each scheme is planned for all linear layers, except layers that the rules in `kept` keep. If
    the group size of a scheme does not fit the model, the table also has the same scheme with the
    largest group size that fits. With `sm`, it has the known faults of vLLM on such a GPU.

    Raises InputError if the source cannot be quantized (see `build_plan`).
    """
    if group_size is None:
        schemes = scheme_names()
    else:
        schemes = grouped_schemes(parse_group_size(group_size))
    with source_headers(source, on_progress) as root:
        index = read_index(root)
        name = pinned_source(source, root)
    plan = build_plan(index, (*kept, Rule(match="Linear", scheme=PROBE_SCHEME)), settings)
    names = names_of(index, resolve(index.architecture, index.config)[0])
    kinds = _kinds(index, plan)
    outlooks: list[SchemeOutlook] = []
    for scheme in schemes:
        outlooks.append(_outlook(scheme, index, names, plan, kinds, settings, sm))
        if sizes := outlooks[-1].group_sizes:
            largest = with_group_size(scheme, sizes[0])
            outlooks.append(_outlook(largest, index, names, plan, kinds, settings, sm))
    return SchemeTable(
        source=name,
        architecture=plan.architecture,
        parameters=plan.parameters,
        source_bytes=plan.source_bytes,
        layers=sum(kind.number * len(kind.group.members) for kind in kinds),
        schemes=tuple(outlooks),
    )


def _kinds(index: SourceIndex, plan: Plan) -> list[_Kind]:
    alike: dict[tuple[object, ...], list[FusionGroup]] = {}
    for group in plan.groups:
        dtypes = tuple(index.tensors[member.weight].dtype for member in group.members)
        alike.setdefault((kind_of_group(group), dtypes), []).append(group)
    return [
        _Kind(
            group=first,
            number=1 + len(others),
            source_bytes=sum(
                num_bytes(
                    index.tensors[member.weight].dtype, (member.out_features, member.in_features)
                )
                for member in first.members
            ),
        )
        for first, *others in alike.values()
    ]


def _stored_bytes(index: SourceIndex, group: FusionGroup, scheme: Scheme) -> int:
    return quantized_bytes(index, (replace(group, scheme=scheme),))


def _outlook(
    name: str,
    index: SourceIndex,
    names: Names,
    plan: Plan,
    kinds: Sequence[_Kind],
    settings: PlanSettings,
    sm: int | None,
) -> SchemeOutlook:
    scheme = get_scheme(name)
    support = scheme.format.gpu_support(scheme.args)
    groups = [replace(kind.group, scheme=scheme) for kind in kinds]
    reasons = unsupported(groups, names, settings.ranks)
    # The bytes that are equal for all schemes: copied tensors and scales of the KV cache.
    size = plan.output_bytes - sum(
        kind.number * _stored_bytes(index, kind.group, kind.group.scheme) for kind in kinds
    )
    layers = 0
    for kind in kinds:
        fits = kind.group.name not in reasons
        size += kind.number * (
            _stored_bytes(index, kind.group, scheme) if fits else kind.source_bytes
        )
        layers += kind.number * len(kind.group.members) * fits
    reason = next(iter(reasons.values()), "")
    sizes = fitting_sizes(groups, names, settings.ranks) if reason else ()
    if sizes:
        reason = f"{reason}; --group-size {' or '.join(map(str, sizes))} fits"
    refused = next((str(refusal.got) for refusal in plan.refusals if refusal.check != "shape"), "")
    reason = refused or reason or ("" if kinds else "no linear layer to quantize")
    return SchemeOutlook(
        scheme=name,
        fits=not reason,
        reason=reason,
        layers=layers,
        output_bytes=size,
        bits=8 * size / plan.parameters,
        needs_calibration=scheme.args.calibrated or bool(plan.attention),
        least_sm=support.loads_from,
        full_sm=support.full_from,
        generation=generation(support.loads_from),
        group_sizes=sizes,
        faults=tuple(plan_faults(groups, names, sm, settings.ranks)) if sm else (),
    )
