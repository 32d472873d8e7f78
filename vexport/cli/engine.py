"""Options that say how vLLM's engine is started, and what they come to."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.options import PATH, POSITIVE, Decorator, Real, stacked, trust_option

if TYPE_CHECKING:
    from pydantic import JsonValue

    from vexport.records import OnProgress
    from vexport.run.judging import Explaining
    from vexport.run.serving import EngineOptions
    from vexport.scenario import Serve


# Where the context of a command keeps what flags of vLLM's own say.
ENGINE_FLAGS = "vexport.engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The vLLM to use, and whether a checkpoint's code may run."""

    vllm_python: Path | None
    trust_remote_code: bool

    def options(self, serve: "Serve", on_progress: "OnProgress") -> "EngineOptions":
        """The start of every engine of the call."""
        from vexport.run.serving import EngineOptions

        return EngineOptions(
            serve=serve,
            vllm_python=self.vllm_python,
            trust_remote_code=self.trust_remote_code,
            on_progress=on_progress,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreters:
    """The same for several versions of vLLM; none is vexport's own."""

    vllm_python: tuple[Path, ...]
    trust_remote_code: bool

    @property
    def pythons(self) -> tuple[Path | None, ...]:
        """Each interpreter; None is our own."""
        return self.vllm_python or (None,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The start of an engine where no scenario says it."""

    engine_args: "dict[str, JsonValue]"
    timeout: int
    max_model_len: int | None

    def serve(self, tp: int | None) -> "Serve":
        """The settings of an engine on `tp` devices; InputErrors where they contradict each other."""
        from vexport.scenario.serve import Serve, with_options

        typed = {"tensor_parallel_size": tp, "max_model_len": self.max_model_len}
        return with_options(Serve(timeout=self.timeout), typed, self.engine_args)


def _engine_args(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, "JsonValue"]:
    """NAME -> value: JSON where it is JSON, else text."""
    arguments: dict[str, JsonValue] = dict(context.meta.get(ENGINE_FLAGS, {}))
    for value in values:
        name, sign, text = value.partition("=")
        key = name.strip().removeprefix("--").replace("-", "_")
        if not key or not sign:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE.")
        parsed = _json_or_text(text)
        if arguments.get(key, parsed) != parsed:
            raise click.BadParameter(f"{key} is given as {arguments[key]!r} and as {parsed!r}.")
        arguments[key] = parsed
    return arguments


def _engine_flag(name: str, kind: click.ParamType[object], metavar: str, text: str) -> Decorator:
    """An option under vLLM's own name, which help leaves to --engine-arg."""

    def keep(context: click.Context, parameter: click.Parameter, value: object) -> None:
        if value is not None:
            context.meta.setdefault(ENGINE_FLAGS, {})[parameter.name] = value

    return click.option(
        name,
        type=kind,
        metavar=metavar,
        is_eager=True,
        expose_value=False,
        callback=keep,
        help=text,
        hidden=True,
    )


def _json_or_text(text: str) -> "JsonValue":
    try:
        value: JsonValue = json.loads(text)
    except ValueError:
        return text
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationOptions:
    """The search for the cause of a loss after the verdict, and its time."""

    attribution: bool | None
    attribution_seconds: int

    @property
    def settings(self) -> "Explaining":
        """The same for what runs it."""
        from vexport.run.judging import Explaining

        return Explaining(wanted=self.attribution, seconds=self.attribution_seconds)


attribution_options = stacked(
    click.option(
        "--attribution/--no-attribution",
        default=None,
        help="Look for a loss's cause after the verdict [default: unless PASS].",
    ),
    click.option(
        "--attribution-seconds", type=POSITIVE, default=300, show_default=True, help="Longest time for that."
    ),
)
engine_arg_option = stacked(
    _engine_flag("--max-num-seqs", POSITIVE, "N", "Most sequences at once [default: vLLM's]."),
    _engine_flag("--gpu-memory-utilization", Real(0, 1), "S", "Share of the GPU's memory [default: vLLM's]."),
    _engine_flag("--dtype", click.STRING, "D", "Data type of what is not quantized [default: the model's]."),
    click.option(
        "--engine-arg",
        "engine_args",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_engine_args,
        help="Any other argument of vLLM's engine, as max_num_seqs=64; repeatable.",
    ),
)


interpreter_option = stacked(
    click.option(
        "--vllm-python", type=PATH, envvar="VEXPORT_VLLM_PYTHON", help="Interpreter whose vLLM is used."
    ),
    trust_option,
)
interpreters_option = stacked(
    click.option(
        "--vllm-python",
        type=PATH,
        multiple=True,
        envvar="VEXPORT_VLLM_PYTHON",
        help="Interpreter whose vLLM is used; repeatable, for several versions [default: vexport's own].",
    ),
    trust_option,
)
session_options = stacked(
    click.option("--max-model-len", type=POSITIVE, help="Longest sequence [default: the model's]."),
    click.option("--timeout", type=POSITIVE, default=3600, show_default=True, help="Seconds for one engine."),
)
serve_options = stacked(
    click.option(
        "--tp",
        "--tensor-parallel-size",
        "tp",
        type=POSITIVE,
        metavar="N",
        help="Tensor parallel size: serve the model on N devices.",
    ),
    engine_arg_option,
)
