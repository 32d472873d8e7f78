"""Pydantic models of functions' arguments. Their fields are the functions' keywords."""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Concatenate, ParamSpec, TypeVar, overload

from annotated_types import Gt
from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema

from vexport.api.common import ModelName, Name, OnNote, named, python_warning, source_ref
from vexport.names import SourceRef
from vexport.records import OnProgress, silent
from vexport.scenario import (
    DEFAULT_ALPHA,
    Calibration,
    Planning,
    Rule,
    default_calibration,
    problems_at,
)
from vexport.scenario.declaring import Option
from vexport.scenario.evaluate import AlphaSetting, GateSetting, MarginSetting
from vexport.scenario.planning import (
    IgnoreSetting,
    KvCacheSetting,
    RanksSetting,
    RevisionSetting,
)
from vexport.scenario.rules import GroupSizeSetting
from vexport.scenario.section import ScenarioSection

P = ParamSpec("P")
M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")


# Name or compute capability of a GPU.
Gpu = str | int | float | tuple[str | int | float, ...] | None


class PlanArguments(Planning):
    """Keywords of `vexport.api.plan`.

    `rules` are an alternative to `scheme` and `recipe`. `run_dir` is the run directory in which
    `vexport run` measured each scheme's loss for a scenario with `scheme: auto`. Set `has_text` if
    quantization will have calibration text. `gpu` is one GPU: its name or its compute capability.
    The plan then has the known faults of vLLM on it. Observers from any folder are imported only
    with `trust_remote_code`.
    """

    rules: tuple[Rule, ...] = ()
    gpu: Gpu = None
    run_dir: Path | None = None
    has_text: bool = False
    trust_remote_code: bool = False
    on_note: SkipJsonSchema[OnNote] = python_warning
    on_progress: SkipJsonSchema[OnProgress] = silent


class SchemesArguments(ScenarioSection):
    """Keywords of `vexport.api.plan_schemes`.

    `gpu` is one GPU: its name or its compute capability, such as "L40S" or "89".
    """

    revision: RevisionSetting = None
    group_size: GroupSizeSetting = None
    ignore: IgnoreSetting = ()
    kv_cache: KvCacheSetting = None
    tp: RanksSetting = (1,)
    gpu: Gpu = None
    on_progress: SkipJsonSchema[OnProgress] = silent


class QuantizeArguments(Planning):
    """Keywords of `vexport.api.quantize`.

    `rules` are an alternative to `scheme` and `recipe`. `calibration` may be the name of the data,
    or several names. If it is None and the rules need text, `default_calibration` is used. With
    `verify`, vLLM loads the checkpoint dry before it is moved to OUT. `how_to_keep` receives
    patterns of layers. It returns text for errors: the arguments with which the caller can keep
    these layers unquantized.
    """

    rules: tuple[Rule, ...] = ()
    calibration: Calibration | Name | Sequence[Name] | None = None
    default_calibration: Calibration = default_calibration()
    max_shard_size: Annotated[
        int,
        Gt(0),
        Option("Maximum size of a weight file.", "Output", metavar="SIZE", default="5GB"),
    ] = 5_000_000_000
    verify: bool = True
    overwrite: bool = False
    trust_remote_code: bool = False
    how_to_keep: SkipJsonSchema[Callable[[Sequence[str]], str] | None] = None
    on_note: SkipJsonSchema[OnNote] = python_warning
    on_progress: SkipJsonSchema[OnProgress] = silent


class VerdictArguments(ScenarioSection):
    """Keywords of `vexport.api.verdict`."""

    tasks: Annotated[
        tuple[str, ...],
        Option(
            "Judge only these tasks and groups.",
            "Verdict",
            names="--task --tasks",
            metavar="T,...",
            unset="all tasks",
        ),
    ] = ()
    margin: MarginSetting = None
    alpha: AlphaSetting = DEFAULT_ALPHA
    gate: GateSetting = {}


@overload
def with_keywords(
    model: Callable[P, M], function: Callable[[SourceRef, M], R]
) -> Callable[Concatenate[ModelName, P], R]: ...
@overload
def with_keywords(
    model: Callable[P, M], function: Callable[[SourceRef, Name, M], R]
) -> Callable[Concatenate[ModelName, Name, P], R]: ...
@overload
def with_keywords(
    model: Callable[P, M], function: Callable[[Name, Name, M], R]
) -> Callable[Concatenate[Name, Name, P], R]: ...
def with_keywords(model: Callable[..., BaseModel], function: Callable[..., R]) -> Callable[..., R]:
    """Return a function that accepts the fields of `model` as keywords.

    `function` accepts an instance of the model as its last argument. The new function has the name
    of `function` without the leading underscore. It parses the name of a model for `function`, and
    raises InputErrors if a value is not valid.
    """
    name = function.__name__.removeprefix("_")
    *names, arguments = signature(function).parameters.values()
    keywords = signature_of(arguments.annotation)
    public = [
        each.replace(annotation=ModelName) if each.annotation == SourceRef else each
        for each in names
    ]
    whole = Signature([*public, *keywords], return_annotation=signature(function).return_annotation)

    @wraps(function)
    def call(*positional: object, **given: object) -> R:
        bound = whole.bind(*positional, **given).arguments
        first = [
            (source_ref if each.annotation == SourceRef else named)(
                f"{name}: {each.name}", bound.pop(each.name)
            )
            for each in names
        ]
        with problems_at(name):
            made = model(**bound)
        return function(*first, made)

    call.__name__ = call.__qualname__ = name
    call.__dict__["__signature__"] = whole
    return call


def signature_of(model: type[BaseModel]) -> list[Parameter]:
    """Return the fields of a model as keyword parameters with their types and defaults."""
    return [
        Parameter(key, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
        for key, field in model.model_fields.items()
    ]
