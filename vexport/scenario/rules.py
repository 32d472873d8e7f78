"""The rules of a scenario, and what `scheme: auto` among them chooses by."""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Self, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, JsonValue, field_validator, model_validator

from vexport.errors import nearest
from vexport.formats.schemes import KEEP, get_scheme, is_scheme, scheme_name, scheme_names
from vexport.records import BudgetKind, GroupSize
from vexport.records.observer_names import (
    BY_IMPORTANCE,
    OBSERVERS,
    OptionValue,
    folded,
    observer_name,
    option_problems,
)
from vexport.records.patterns import REFUSED
from vexport.records.rounding import ROUNDINGS, Rounding
from vexport.scenario.scheme_keys import AUTO, with_named_scheme
from vexport.scenario.section import KeyProblem, ScenarioSection, known_name, located_errors

# The name of a class of another package.
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# Strategies of weights whose groups of columns can be searched by the importance of those.
WITH_IMPORTANCE = ("channel", "group", "tensor_group")


def known_observer(name: str) -> str:
    """The registry name that is meant, or package.module:Class as it is; ValueError lists what is known."""
    spelled = folded(observer_name(name))
    known = (*OBSERVERS, *(each for each in _registered() if each not in OBSERVERS))
    registered = {folded(each): each for each in known}
    if spelled in registered:
        return registered[spelled]
    if not _CLASS.fullmatch(name):
        raise ValueError(f"one of {', '.join(known)}, or package.module:Class{nearest(name, known)}")
    return name


def keyword_problems(key: str, name: str | None, keywords: Mapping[str, OptionValue]) -> Iterator[KeyProblem]:
    """The problems of the keywords of the observer `name`, given under `key`."""
    if name is None and keywords:
        need = "the observer that they are for"
        yield (key,), dict(keywords), need, f"add {key.removesuffix('_kwargs')}"
    if name is None or name not in OBSERVERS:  # the class of another package knows its own
        return
    for keyword, need in option_problems(OBSERVERS[name].options, keywords):
        yield (key, keyword), keywords[keyword], need, f"correct it, or remove it: it is a keyword of {name}"


def observer_problems(scheme: str, observer: str | None, input_observer: str | None) -> Iterator[KeyProblem]:
    """Observers that a scheme has no use for, by the key that names them."""
    known = None if scheme in (KEEP, AUTO) else get_scheme(scheme)
    strategy = known.args.weights.strategy if known else WITH_IMPORTANCE[0]
    if observer in BY_IMPORTANCE and strategy not in WITH_IMPORTANCE:
        need = f"an observer without importance: {scheme} has one scale a {strategy}, of many input channels"
        yield ("observer",), observer, need, "use memoryless_mse"
    if input_observer is None:
        return
    if input_observer in BY_IMPORTANCE:
        need = "an observer of ranges or of errors: importance is that of a weight's input channels"
        yield ("input_observer",), input_observer, need, "use static_minmax, minmax or mse"
    elif scheme == KEEP:
        yield ("input_observer",), input_observer, "a scheme that quantizes inputs", "remove it"
    elif known is not None and not known.args.calibrated:
        inputs = known.args.input_activations
        why = "scales its inputs when the model runs" if inputs else "leaves its inputs as they are"
        need = f"a scheme with static input scales (FP8, NVFP4): {scheme} {why}"
        yield ("input_observer",), input_observer, need, "remove it, or use another scheme"


def _registered() -> list[str]:
    """Names of `Observer.register`: there are none unless a program has loaded the classes itself."""
    module = sys.modules.get("vexport.observers.base")
    return [] if module is None else [kind.registry_name for kind in module.Observer.named()]


# What a rule says of observers where it names none.
DEFAULT_OBSERVERS: Mapping[str, object] = {
    "observer": None,
    "observer_kwargs": {},
    "input_observer": None,
    "input_observer_kwargs": {},
}


class Refit(ScenarioSection):
    """A way of rounding with its own strength, 0 (GPTQ) to 1, and ridge, a share of the mean of H's diagonal.

    What is left out is the method's own (docs/rounding.md).
    """

    method: Rounding = "refit"
    strength: Annotated[float, Ge(0), Le(1)] | None = None
    ridge: Annotated[float, Gt(0)] | None = None

    @model_validator(mode="after")
    def _is_refit(self) -> Self:
        if self.method != "refit":
            raise ValueError("method refit: nothing else has a strength")
        return self


class Rule(ScenarioSection):
    """A pattern of layers and their scheme; in a list of rules the first match wins.

    `match` is "Linear" (every linear layer), a module's name, the last parts of one (`lm_head`,
    `self_attn.q_proj`), or `re:` and a regular expression anchored at the start of the name. Scheme `auto`
    chooses among the candidates of the scenario's `auto`. `rounding` gptq or refit needs calibration text;
    a refit may be written `{method: refit, strength: 0.5, ridge: 0.1}`. Without it weights of fewer than 8
    bits are refitted where there is text. Without `observer` scales are those that suit the rounding.
    `input_observer` is for static scales of inputs. Both are a name of `vexport list observers` or
    package.module:Class; `..._kwargs` have their keywords.

    A scheme is its name, also with a `group_size` (channel: one scale a row), or `weights` and
    `input_activations` as compressed-tensors writes them. Once read, all are a name in `scheme`.
    """

    of_recipe: ClassVar[bool] = False

    match: str
    scheme: str
    group_size: GroupSize | None = Field(default=None, exclude=True)
    weights: dict[str, JsonValue] | None = Field(default=None, exclude=True)
    input_activations: dict[str, JsonValue] | None = Field(default=None, exclude=True)
    observer: str | None = None
    observer_kwargs: dict[str, OptionValue] = Field(default_factory=dict)
    input_observer: str | None = None
    input_observer_kwargs: dict[str, OptionValue] = Field(default_factory=dict)
    rounding: Rounding | Refit | None = None

    @property
    def method(self) -> Rounding | None:
        """The name of the way of rounding; None where the rule names none."""
        return self.rounding.method if isinstance(self.rounding, Refit) else self.rounding

    @model_validator(mode="before")
    @classmethod
    def _names_its_scheme(cls, content: object) -> object:
        return with_named_scheme(content) if isinstance(content, dict) else content

    @field_validator("match")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value.removeprefix("re:") if value.startswith("re:") else "")
        except REFUSED as error:
            raise ValueError(f"a regular expression after re: ({error})") from None
        return value

    @field_validator("scheme")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        name = scheme_name(value)
        return name if is_scheme(name) else known_name(value, (*scheme_names(), KEEP, AUTO))

    @field_validator("rounding")
    @classmethod
    def _known_rounding(cls, value: str | Refit | None) -> str | Refit | None:
        return known_name(value, ROUNDINGS) if isinstance(value, str) else value

    @field_validator("observer", "input_observer")
    @classmethod
    def _known_observer(cls, value: str | None) -> str | None:
        return None if value is None else known_observer(value)

    @model_validator(mode="after")
    def _observers_fit(self) -> Self:
        problems = [
            *keyword_problems("observer_kwargs", self.observer, self.observer_kwargs),
            *keyword_problems("input_observer_kwargs", self.input_observer, self.input_observer_kwargs),
            *observer_problems(self.scheme, self.observer, self.input_observer),
        ]
        if problems:
            raise located_errors(problems)
        return self


class Auto(ScenarioSection):
    """The candidates of `scheme: auto`, and its one budget for the whole checkpoint.

    `bits` are bits per weight, `bytes` the size, `share` the part of the source's size (0.4).
    """

    candidates: Annotated[tuple[str, ...], Field(min_length=2)]
    bits: Annotated[float, Gt(0)] | None = None
    bytes: Annotated[int, Gt(0)] | None = None
    share: Annotated[float, Gt(0), Lt(1)] | None = None

    @field_validator("candidates", mode="before")
    @classmethod
    def _names_of_candidates(cls, values: object) -> object:
        """A candidate may be the keys of a rule that say its scheme."""
        if not isinstance(values, list):
            return values
        return [
            with_named_scheme(candidate).get("scheme") if isinstance(candidate, dict) else candidate
            for candidate in values
        ]

    @field_validator("candidates")
    @classmethod
    def _known_candidates(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        known = (*scheme_names(), KEEP)
        named = map(scheme_name, values)
        names = tuple(name if is_scheme(name) else known_name(name, known) for name in named)
        if len(set(names)) < len(names):
            raise ValueError("each candidate once")
        return names

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if len(self._budgets()) != 1:
            raise ValueError(f"one budget: {', '.join(get_args(BudgetKind))}")
        return self

    def _budgets(self) -> list[tuple[BudgetKind, float]]:
        kinds: dict[BudgetKind, float | None] = {"bits": self.bits, "bytes": self.bytes, "share": self.share}
        return [(kind, limit) for kind, limit in kinds.items() if limit is not None]

    @property
    def budget(self) -> tuple[BudgetKind, float]:
        """The budget's kind and limit."""
        return self._budgets()[0]


class IgnoredLayers(Rule):
    """The layers that another tool's recipe ignores: it serves many models, and may match nothing in this
    one.
    """

    of_recipe: ClassVar[bool] = True
