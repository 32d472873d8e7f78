"""The rules of a scenario, and what `scheme: auto` among them chooses by."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self, get_args

from annotated_types import Gt, Lt
from pydantic import Field, JsonValue, field_validator, model_validator

from vexport.formats.schemes import KEEP, is_scheme, scheme_name, scheme_names
from vexport.scenario.located import located_errors
from vexport.scenario.observer_keys import keyword_problems, known_observer, observer_problems
from vexport.scenario.scheme_keys import AUTO, GroupSize, with_named_scheme
from vexport.scenario.section import Section, known_name
from vexport.types import BudgetKind
from vexport.types.observer_names import OptionValue
from vexport.types.patterns import REFUSED
from vexport.types.rounding import ROUNDINGS, Rounding

# What a rule says of observers where it names none.
DEFAULT_OBSERVERS: Mapping[str, object] = {
    "observer": None,
    "observer_kwargs": {},
    "input_observer": None,
    "input_observer_kwargs": {},
}


class Rule(Section):
    """Which layers get which scheme; in a list of rules the first match wins.

    `match` is "Linear" (every linear layer), a module's name, the last parts of one (`lm_head`,
    `self_attn.q_proj`), or `re:` and a regular expression anchored at the start of the name. Scheme `auto`
    chooses among the candidates of the scenario's `auto`. `rounding` gptq or refit needs calibration text;
    without it weights of fewer than 8 bits are refitted where there is text. Without `observer` scales are
    those that suit the rounding. `input_observer` is for static scales of inputs. Both are a name of
    `vexport list observers` or package.module:Class; `..._kwargs` have their keywords.

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
    rounding: Rounding | None = None

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
    def _known_rounding(cls, value: str | None) -> str | None:
        return None if value is None else known_name(value, ROUNDINGS)

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


class Auto(Section):
    """What `scheme: auto` chooses from, and its one budget for the whole checkpoint.

    `bits` are bits per weight, `bytes` the size, `share` the part of the source's size (0.4), `loss` the sum
    over all quantized layers of KL(source || quantized) in nats per token.
    """

    candidates: Annotated[tuple[str, ...], Field(min_length=2)]
    bits: Annotated[float, Gt(0)] | None = None
    bytes: Annotated[int, Gt(0)] | None = None
    share: Annotated[float, Gt(0), Lt(1)] | None = None
    loss: Annotated[float, Gt(0)] | None = None

    @field_validator("candidates", mode="before")
    @classmethod
    def _names_of_candidates(cls, values: object) -> object:
        """A candidate may be the keys of a rule that say its scheme."""
        if not isinstance(values, list):
            return values
        return [with_named_scheme(one).get("scheme") if isinstance(one, dict) else one for one in values]

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
        kinds: dict[BudgetKind, float | None] = {
            "bits": self.bits,
            "bytes": self.bytes,
            "share": self.share,
            "loss": self.loss,
        }
        return [(kind, limit) for kind, limit in kinds.items() if limit is not None]

    @property
    def budget(self) -> tuple[BudgetKind, float]:
        """The budget's kind and limit."""
        return self._budgets()[0]


class IgnoredLayers(Rule):
    """What another tool's recipe ignores: it serves many models, and may match nothing in this one."""

    of_recipe: ClassVar[bool] = True
