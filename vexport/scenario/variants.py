"""Variants of serving a checkpoint: settings of vLLM, and interpreters with other versions."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, JsonValue, ValidationError, model_validator

from vexport.errors import InputError, InputErrors
from vexport.errors.validation import ValidationProblem, validation_problems
from vexport.rules.setting import VALUE
from vexport.scenario.declaring import Key, Option
from vexport.scenario.section import ScenarioSection, located_errors
from vexport.scenario.serve import SERVE_KEYS, EngineArguments, LimitSettings, Serve
from vexport.words import shown

DEFAULT_SETTING = "default"
"""Name of a setting without any argument: vLLM's defaults."""
# Keys of `serve` that a variant may set. All other arguments go to `engine_args`.
_KEYS = (*SERVE_KEYS, *LimitSettings.model_fields)
_ENGINE_ARGS = "engine_args"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way of serving a checkpoint.

    `setting` is the name of its settings in reports. `serve` has all settings of its engine.
    `vllm_python` is the interpreter that runs vLLM, or None for vexport's interpreter.
    `has_other_vllm` is True for every interpreter except the first.
    """

    setting: str
    serve: Serve
    vllm_python: Path | None = None
    has_other_vllm: bool = False


def setting_text(setting: EngineArguments) -> str:
    """Return the name of a setting in reports: `kv_cache_dtype=fp8, max_num_seqs=4`."""
    words = [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in setting.items()
    ]
    return ", ".join(words) or DEFAULT_SETTING


def with_setting(base: Serve, setting: EngineArguments) -> Serve:
    """Return the settings of `base`, overridden by the arguments of a variant.

    Raises ValidationError for a value that is not allowed.
    """
    keys = {name: value for name, value in setting.items() if name in _KEYS}
    others = {name: value for name, value in setting.items() if name not in keys}
    nested = others.pop(_ENGINE_ARGS, None) or {}
    if not isinstance(nested, dict):
        raise located_errors(
            [((_ENGINE_ARGS,), nested, "arguments of vLLM by name", "write them as an object")]
        )
    content = base.model_dump(mode="json")
    return Serve.model_validate(
        {**content, **keys, _ENGINE_ARGS: {**base.engine_args, **nested, **others}}
    )


def _checked_setting(setting: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a setting under the names of vLLM's arguments.

    Raises ValidationError if vexport sets an argument itself, or if a value has a wrong type.
    """
    named: dict[str, JsonValue] = {}
    for given, value in setting.items():
        name = given.strip().removeprefix("--").replace("-", "_")
        if not name or name in named:
            need = "the name of an argument of vLLM, once"
            raise located_errors([((given,), value, need, "correct or remove it")])
        named[name] = value
    with_setting(Serve(), named)
    return named


def parse_setting(setting: dict[str, JsonValue], where: str) -> EngineArguments:
    """Return a setting under the names of vLLM's arguments.

    `where` is the place of the setting in errors. Raises InputErrors if vexport sets an argument
    itself, or if a value has a wrong type.
    """
    with _problems_at(where, setting):
        return _checked_setting(setting)


Setting = Annotated[dict[str, JsonValue], AfterValidator(_checked_setting)]


class Variants(ScenarioSection):
    """Settings and versions of vLLM with which a checkpoint is served and compared.

    Each pair of a setting and an interpreter is a variant. The interpreter that the command uses
    for vLLM is always included, and comes before `vllm_python`. The first setting with this
    interpreter is the baseline of all other variants.
    """

    serve: Annotated[
        tuple[Setting, ...],
        Option(
            "Setting of vLLM to compare, or several at once as a JSON object; the first is the "
            "baseline.",
            "Comparison",
            metavar="KEY=VALUE|'{JSON}'",
            unset="one setting, vLLM's defaults",
            more="See [settings and versions](settings.md).",
        ),
    ] = ()
    vllm_python: Annotated[
        tuple[Path, ...],
        Key(
            "Interpreters with other versions of vLLM; needs `--trust-remote-code`.",
            unset="only vexport's interpreter",
        ),
    ] = ()

    @model_validator(mode="after")
    def _check_there_are_two(self) -> Self:
        if len(self.settings) * (1 + len(self.vllm_python)) < 2:
            raise ValueError("two settings in `serve`, or an interpreter in `vllm_python`")
        return self

    @property
    def settings(self) -> tuple[EngineArguments, ...]:
        """The settings, or only vLLM's defaults if none are given."""
        return self.serve or ({},)

    def matrix(self, base: Serve, own: Path | None) -> tuple[Variant, ...]:
        """Return all variants: each setting with each interpreter, the first as the baseline.

        `base` has the settings that all variants share. `own` is the first interpreter, None for
        vexport's. Raises InputErrors if a setting contradicts `base`.
        """
        pythons = (own, *self.vllm_python)
        return tuple(
            Variant(
                setting=setting_text(setting),
                serve=_served(base, setting),
                vllm_python=python,
                has_other_vllm=number > 0,
            )
            for setting in self.settings
            for number, python in enumerate(pythons)
        )


def _served(base: Serve, setting: EngineArguments) -> Serve:
    with _problems_at(f"setting {setting_text(setting)}", setting):
        return with_setting(base, setting)


@contextmanager
def _problems_at(where: str, setting: EngineArguments) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        problems = [_with_place(where, setting, problem) for problem in validation_problems(error)]
        raise InputErrors(problems) from None


def _with_place(where: str, setting: EngineArguments, problem: ValidationProblem) -> InputError:
    keys = [key for key in problem.keys if key != _ENGINE_ARGS]
    if not keys:  # a contradiction of several arguments
        found, need = shown(dict(setting)), problem.need
        return InputError.of(VALUE, where, found=found, need=need, do=problem.fix)
    return problem.at(f"{where}: {'.'.join(keys)}")
