"""Rules of a scenario, and the budget for rules with `scheme: auto`."""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Self, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from vexport.errors import InputError, nearest_hint
from vexport.formats.schemes import (
    KEEP,
    custom_args,
    get_scheme,
    is_scheme,
    named_scheme,
    scheme_name,
    scheme_names,
    with_group_size,
)
from vexport.records import BudgetKind, GroupSize
from vexport.records.calibration import ROUNDINGS, Rounding
from vexport.records.observer_names import (
    BY_IMPORTANCE,
    OBSERVERS,
    OptionValue,
    folded,
    observer_name,
    option_problems,
)
from vexport.records.patterns import REFUSED
from vexport.scenario.declaring import Key, Option
from vexport.scenario.section import (
    KeyProblem,
    ScenarioSection,
    known_name,
    located_error,
    located_errors,
)

# Name of the scheme that vexport chooses, by measured losses and a budget.
AUTO = "auto"
# Keys of a rule or candidate that define a scheme together with its name or instead of it.
SIZE, WEIGHTS, INPUTS = SCHEME_KEYS = ("group_size", "weights", "input_activations")
# An observer class of another package.
_CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# Strategies of weights that observers by importance support. Each scale belongs to columns of a
# single row.
IMPORTANCE_STRATEGIES = ("channel", "group", "tensor_group")


def parse_group_size(value: object) -> int | None:
    """Return the number of columns of a group, or None for a scale per row.

    -1 also means a scale per row, as in llm-compressor and AutoRound. Raises ValueError if `value`
    is not a group size.
    """
    if isinstance(value, str) and value.lower() == "channel" or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1_000_000:
        raise ValueError("a number of columns such as 64, or channel for a scale per row")
    return value


def with_named_scheme(content: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Replace `group_size`, `weights` and `input_activations` of a rule by the name of a scheme.

    `content` has the keys of a rule or candidate. Observers in `weights` or `input_activations`
    become the rule's observers. Raises pydantic's ValidationError at the wrong key.
    """
    size, weights, inputs = (content.get(key) for key in SCHEME_KEYS)
    others = {key: value for key, value in content.items() if key not in SCHEME_KEYS}
    scheme = others.get("scheme")
    if weights is None:
        if inputs is not None:
            need = "weights in the same rule"
            raise located_error(INPUTS, inputs, need, "add weights, or use a scheme instead")
        return others if size is None else {**others, "scheme": _with_group_size(size, scheme)}
    if scheme is not None:
        need = "either scheme or weights"
        raise located_error("scheme", scheme, need, "remove one of them")
    if size is not None:
        need = "the group size inside weights"
        raise located_error(SIZE, size, need, "move it to weights.group_size")
    try:
        name = named_scheme(custom_args(weights, inputs)).name
    except ValueError as error:
        raise located_error(WEIGHTS, weights, str(error), "correct the arguments") from None
    except InputError as error:
        need = f"{error.need}, not {error.got}"
        raise located_error(WEIGHTS, weights, need, error.fix) from None
    observers = {
        f"{prefix}{key}": args[key]
        for prefix, args in (("", weights), ("input_", inputs))
        for key in ("observer", "observer_kwargs")
        if isinstance(args, dict) and args.get(key)
    }
    return {**observers, **others, "scheme": name}


def _with_group_size(size: JsonValue, scheme: JsonValue) -> JsonValue:
    """Return the name of the scheme with this group size.

    An unknown scheme is returned unchanged. The validator of `scheme` reports it.
    """
    if scheme in (KEEP, AUTO):
        need = f"no value here: scheme {scheme} has no group size"
        raise located_error(SIZE, size, need, "remove it, or use another scheme")
    try:
        columns = parse_group_size(size)
        if isinstance(scheme, str) and is_scheme(scheme_name(scheme)):
            return with_group_size(scheme, columns)
    except ValueError as error:
        raise located_error(SIZE, size, str(error), "correct the value") from None
    except InputError as error:
        raise located_error(SIZE, size, error.need, error.fix) from None
    return scheme


def _known_scheme(value: str, *others: str) -> str:
    name = scheme_name(value)
    return name if is_scheme(name) else known_name(value, (*scheme_names(), *others))


def _known_observer(name: str | None) -> str | None:
    """Return the observer's registered name, or package.module:Class unchanged.

    The spelling of `name` may differ in case, `-` and `_`. Raises ValueError with a list of all
    known names if there is no such observer.
    """
    if name is None:
        return None
    # Names from `Observer.register`. They exist only if the program has imported observer classes.
    module = sys.modules.get("vexport.observers")
    registered = (
        [kind.registry_name for kind in module.Observer.registered_classes()] if module else []
    )
    known = dict.fromkeys((*OBSERVERS, *registered))
    folded_name = folded(observer_name(name))
    found = next((each for each in known if folded(each) == folded_name), None)
    if found is None and not _CLASS_PATH.fullmatch(name):
        raise ValueError(
            f"one of {', '.join(known)}, or package.module:Class{nearest_hint(name, tuple(known))}"
        )
    return found or name


def _keyword_problems(
    key: str, name: str | None, keywords: Mapping[str, OptionValue]
) -> Iterator[KeyProblem]:
    if name is None and keywords:
        observer = key.removesuffix("_kwargs")
        need = f"{observer} in the same rule"
        yield (key,), dict(keywords), need, f"add {observer}, or remove the keywords"
    if name is None or name not in OBSERVERS:  # a class of another package checks its keywords
        return
    for keyword, need in option_problems(OBSERVERS[name].options, keywords):
        yield (
            (key, keyword),
            keywords[keyword],
            need,
            f"correct or remove this keyword of {name}",
        )


def _observer_problems(
    scheme: str, observer: str | None, input_observer: str | None
) -> Iterator[KeyProblem]:
    known = None if scheme in (KEEP, AUTO) else get_scheme(scheme)
    strategy = known.args.weights.strategy if known else IMPORTANCE_STRATEGIES[0]
    if observer in BY_IMPORTANCE and strategy not in IMPORTANCE_STRATEGIES:
        need = f"an observer without importance, because {scheme} has one scale per {strategy}"
        yield ("observer",), observer, need, "use memoryless_mse"
    if input_observer is None:
        return
    if input_observer in BY_IMPORTANCE:
        need = "an observer without importance, which only weights have"
        yield ("input_observer",), input_observer, need, "use static_minmax, minmax or mse"
    elif scheme == KEEP:
        yield ("input_observer",), input_observer, "a scheme that quantizes inputs", "remove it"
    elif known is not None and not known.args.calibrated:
        is_dynamic = known.args.input_activations is not None
        reason = "computes them at run time" if is_dynamic else "does not quantize inputs"
        need = f"a scheme with static input scales, such as FP8 or NVFP4: {scheme} {reason}"
        yield ("input_observer",), input_observer, need, "remove it, or use another scheme"


def known_group_size(value: object) -> object:
    """Return a group size in the form of rules: None, a number of columns, or `channel`.

    Raises ValueError if `value` is not a group size.
    """
    return value if value is None else parse_group_size(value) or "channel"


GroupSizeSetting = Annotated[
    GroupSize | None,
    BeforeValidator(known_group_size),
    Option(
        "Number of columns that share a scale, or `channel` for a scale per row.",
        "Scheme",
        metavar="N|channel",
        unset="the scheme's group size",
        more="See [group sizes](schemes.md#group-sizes).",
    ),
]
ObserverSetting = Annotated[
    str | None,
    AfterValidator(_known_observer),
    Option(
        "Observer that chooses the scales of weights.",
        "Scheme",
        metavar="O",
        unset="depends on the rounding",
        more="With rounding to nearest, and for 8 bits, it is `memoryless_minmax`. With `gptq` and "
        "`refit` it is `imatrix_mse` for INT2-INT7 and `nvfp4_expanded_imatrix` for NVFP4. See "
        "[observers](observers.md).",
    ),
]
InputObserverSetting = Annotated[
    str | None,
    AfterValidator(_known_observer),
    Option(
        "Observer of static input scales.",
        "Scheme",
        metavar="O",
        unset="`static_minmax`",
    ),
]
# The choices are for the schema and the command line. Validators accept other spellings.
RoundingName = Annotated[Rounding, WithJsonSchema({"type": "string", "enum": list(ROUNDINGS)})]
ROUNDING_OPTION = Option(
    "Method of rounding weights.",
    "Scheme",
    unset="`refit` for fewer than 8 bits with calibration text, else `nearest`",
    more="In a scenario also `{method: refit, strength: 0.5, ridge: 0.1}`, see "
    "[rounding](rounding.md#refit).",
)


def known_rounding(value: str) -> Rounding:
    """Return the rounding with this name in any spelling.

    Raises ValueError with a list of all roundings if there is no such rounding.
    """
    return known_name(value, ROUNDINGS)


class Refit(ScenarioSection):
    """A rounding method with its strength and ridge.

    The ridge is added to the diagonal of the inputs' second moments (the Hessian of GPTQ), as a
    share of the mean of this diagonal. See docs/rounding.md for the defaults.
    """

    method: RoundingName = "refit"
    strength: Annotated[float, Ge(0), Le(1)] | None = None
    ridge: Annotated[float, Gt(0)] | None = None

    @model_validator(mode="after")
    def _check_method_has_strength(self) -> Self:
        if self.method != "refit":
            raise ValueError("method refit, the only one with a strength and a ridge")
        return self


def _require_scheme_or_weights(schema: dict[str, JsonValue]) -> None:
    """Change a rule's JSON schema to require either `scheme` or `weights`."""
    schema["required"] = ["match"]
    schema["anyOf"] = [{"required": ["scheme"]}, {"required": ["weights"]}]


class Rule(ScenarioSection):
    """A pattern of layers and their scheme. In a list of rules, the first match wins.

    Scheme `auto` chooses from the candidates in the scenario's section `auto`. `rounding` gptq or
    refit needs calibration text. An observer is a name from `vexport list observers` or
    package.module:Class.

    A scheme is a name, a name with a `group_size`, or `weights` and `input_activations` in the form
    of compressed-tensors. After validation, `scheme` contains the name in all three cases.
    """

    model_config = ConfigDict(json_schema_extra=_require_scheme_or_weights)

    is_from_recipe: ClassVar[bool] = False

    match: Annotated[
        str,
        Key(
            "`Linear` for the linear layers of the decoder, a module's name, its last parts "
            "(`lm_head`, `self_attn.q_proj`), or `re:` and a regular expression that matches from "
            "the start of the name."
        ),
    ]
    scheme: Annotated[
        str,
        Key(
            "Name of a scheme, `keep` or `auto`; required unless `weights` is given.",
            more="See [schemes](schemes.md).",
        ),
    ]
    group_size: GroupSizeSetting = Field(default=None, exclude=True)
    weights: Annotated[
        dict[str, JsonValue] | None,
        Key(
            "Arguments of the weights, instead of a scheme.",
            more="See [own schemes](schemes.md#own-schemes).",
        ),
    ] = Field(default=None, exclude=True)
    input_activations: Annotated[
        dict[str, JsonValue] | None, Key("Arguments of the inputs, together with `weights`.")
    ] = Field(default=None, exclude=True)
    observer: ObserverSetting = None
    observer_kwargs: Annotated[
        dict[str, OptionValue],
        Key(
            "Keywords of the observer, such as `{norm: 2.0, grid: 200}`.",
            more="See [observers](observers.md).",
        ),
    ] = {}
    input_observer: InputObserverSetting = None
    input_observer_kwargs: Annotated[
        dict[str, OptionValue],
        Key("Keywords of the input observer, such as `{averaging_constant: 0.05}`."),
    ] = {}
    rounding: Annotated[RoundingName | Refit | None, ROUNDING_OPTION] = None

    @property
    def method(self) -> Rounding | None:
        """The name of the rounding, or None if the rule does not set it."""
        return self.rounding.method if isinstance(self.rounding, Refit) else self.rounding

    @model_validator(mode="before")
    @classmethod
    def _name_scheme(cls, content: object) -> object:
        return with_named_scheme(content) if isinstance(content, dict) else content

    @field_validator("match")
    @classmethod
    def _check_match_compiles(cls, value: str) -> str:
        try:
            re.compile(value.removeprefix("re:") if value.startswith("re:") else "")
        except REFUSED as error:
            raise ValueError(f"a valid regular expression after re: ({error})") from None
        return value

    @field_validator("scheme")
    @classmethod
    def _check_scheme(cls, value: str) -> str:
        return _known_scheme(value, KEEP, AUTO)

    @field_validator("rounding")
    @classmethod
    def _check_rounding(cls, value: str | Refit | None) -> str | Refit | None:
        return known_rounding(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_observers(self) -> Self:
        problems = [
            *_keyword_problems("observer_kwargs", self.observer, self.observer_kwargs),
            *_keyword_problems(
                "input_observer_kwargs", self.input_observer, self.input_observer_kwargs
            ),
            *_observer_problems(self.scheme, self.observer, self.input_observer),
        ]
        if problems:
            raise located_errors(problems)
        return self


class Auto(ScenarioSection):
    """Candidates for rules with `scheme: auto`, and the budget for the whole checkpoint."""

    candidates: Annotated[
        tuple[str, ...],
        Field(min_length=2),
        Key(
            "Two or more schemes to choose from, also written as "
            "`{scheme: W4A16, group_size: 64}`; `keep` is a candidate too."
        ),
    ]
    bits: Annotated[float | None, Gt(0), Key("Budget: bits per weight.")] = None
    bytes: Annotated[int | None, Gt(0), Key("Budget: size of the checkpoint.")] = None
    share: Annotated[
        float | None, Gt(0), Lt(1), Key("Budget: share of the source's size, such as `0.4`.")
    ] = None

    @field_validator(
        "candidates",
        mode="before",
        json_schema_input_type=tuple[str | dict[str, JsonValue], ...],
    )
    @classmethod
    def _name_candidates(cls, values: object) -> object:
        if not isinstance(values, list):
            return values
        return [
            with_named_scheme(candidate).get("scheme") if isinstance(candidate, dict) else candidate
            for candidate in values
        ]

    @field_validator("candidates")
    @classmethod
    def _check_candidates(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(_known_scheme(name, KEEP) for name in values)
        if len(set(names)) < len(names):
            raise ValueError("each candidate only once")
        return names

    @model_validator(mode="after")
    def _check_one_budget(self) -> Self:
        if sum(getattr(self, kind) is not None for kind in get_args(BudgetKind)) != 1:
            raise ValueError(f"exactly one budget: {' or '.join(get_args(BudgetKind))}")
        return self

    @property
    def budget(self) -> tuple[BudgetKind, float]:
        """The budget's kind and limit."""
        kinds: tuple[BudgetKind, ...] = get_args(BudgetKind)
        return next((kind, limit) for kind in kinds if (limit := getattr(self, kind)) is not None)


class IgnoredLayers(Rule):
    """A rule for layers that another tool's recipe ignores.

    A recipe is written for many models, so the rule may match no layer of this model.
    """

    is_from_recipe: ClassVar[bool] = True
