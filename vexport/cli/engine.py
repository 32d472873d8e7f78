"""Options that say how vLLM's engine is started, and what they come to."""

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.options import PATH, POSITIVE, Real, option, stacked, switch, trust_option

if TYPE_CHECKING:
    from pydantic import JsonValue

    from vexport.api import Engine
    from vexport.inference.options import EngineOptions
    from vexport.records import OnProgress
    from vexport.scenario import Serve

# The key of vLLM's flags in a command's context.
ENGINE_FLAGS = "vexport.engine"
VLLM_PYTHON = "VEXPORT_VLLM_PYTHON"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The vLLM to use, and whether a checkpoint's code may run."""

    vllm_python: Path | None
    trust_remote_code: bool

    @property
    def engine(self) -> "Engine":
        """Return the engine of vexport.api with this interpreter."""
        from vexport.api import Engine

        return Engine(vllm_python=self.vllm_python, trust_remote_code=self.trust_remote_code)

    def options(self, serve: "Serve", on_progress: "OnProgress") -> "EngineOptions":
        """The start of every engine of the call."""
        from vexport.inference.options import EngineOptions

        return EngineOptions(
            serve=serve,
            vllm_python=self.vllm_python,
            trust_remote_code=self.trust_remote_code,
            on_progress=on_progress,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The start of an engine where no scenario says it."""

    engine_args: "dict[str, JsonValue]"
    timeout: int
    max_model_len: int | None

    def serve(self, tp: int | None) -> "Serve":
        """The settings of an engine on `tp` devices; InputErrors where they contradict each
        other.
        """
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
        parsed: JsonValue = text
        with suppress(ValueError):
            parsed = json.loads(text)
        if arguments.get(key, parsed) != parsed:
            raise click.BadParameter(f"{key} is given as {arguments[key]!r} and as {parsed!r}.")
        arguments[key] = parsed
    return arguments


def _keep(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """Keep a flag under vLLM's own name, which help leaves to --engine-arg."""
    if value is not None:
        context.meta.setdefault(ENGINE_FLAGS, {})[parameter.name] = value


_own_flag = partial(option, callback=_keep, kept=False, hidden=True)
attribution_options = stacked(
    switch(
        "--attribution",
        "Look for a loss's cause after the verdict [default: unless PASS].",
        heading="Verdict",
    ),
    option(
        "--attribution-seconds",
        "Longest time for that.",
        POSITIVE,
        heading="Verdict",
        default=300,
        shown=True,
    ),
)
engine_arg_option = stacked(
    _own_flag("--max-num-seqs", "Most sequences at once [default: vLLM's].", POSITIVE, "N"),
    _own_flag(
        "--gpu-memory-utilization", "Share of the GPU's memory [default: vLLM's].", Real(0, 1), "S"
    ),
    _own_flag(
        "--dtype", "Data type of what is not quantized [default: the model's].", click.STRING, "D"
    ),
    option(
        "--engine-arg engine_args",
        "Any other argument of vLLM's engine, as max_num_seqs=64; repeatable.",
        metavar="NAME=VALUE",
        heading="vLLM",
        multiple=True,
        callback=_engine_args,
    ),
)
interpreter_option = stacked(
    option(
        "--vllm-python",
        "Interpreter whose vLLM is used.",
        PATH,
        heading="vLLM",
        envvar=VLLM_PYTHON,
    ),
    trust_option,
)
interpreters_option = stacked(
    option(
        "--vllm-python",
        "Interpreter whose vLLM is used; repeatable, for several versions [default: vexport's "
        "own].",
        PATH,
        heading="vLLM",
        multiple=True,
        envvar=VLLM_PYTHON,
    ),
    trust_option,
)
session_options = stacked(
    option("--max-model-len", "Longest sequence [default: the model's].", POSITIVE, heading="vLLM"),
    option(
        "--timeout", "Seconds for one engine.", POSITIVE, heading="vLLM", default=3600, shown=True
    ),
)
serve_options = stacked(
    option(
        "--tp --tensor-parallel-size tp",
        "Tensor parallel size: serve the model on N devices.",
        POSITIVE,
        "N",
        heading="vLLM",
    ),
    engine_arg_option,
)
