"""Options for starting vLLM's engine, and the settings made from these options."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.arguments import merged_arguments, parse_arguments
from vexport.cli.options import PATH, POSITIVE, Decorator, option, stacked, switch, trust_option
from vexport.cli.settings import SETTINGS, click_type, setting_option

if TYPE_CHECKING:
    from pydantic import JsonValue

    from vexport.api import Engine
    from vexport.scenario import Serve

# Key in a click context's `meta` for the values of the options with the names of vLLM's flags.
ENGINE_FLAGS = "vexport.engine"
VLLM_PYTHON = "VEXPORT_VLLM_PYTHON"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Interpreter that runs vLLM, and permission to run a checkpoint's code."""

    vllm_python: Path | None
    trust_remote_code: bool

    @property
    def engine(self) -> "Engine":
        """Return the engine of vexport.api with this interpreter."""
        from vexport.api import Engine

        return Engine(vllm_python=self.vllm_python, trust_remote_code=self.trust_remote_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Engine settings from the command line. A setting that is not given is None."""

    engine_args: "dict[str, JsonValue]"
    timeout: int | None
    max_model_len: int | None
    canaries: bool | None

    def serve(self, tp: int | None, scenario: "Serve | None" = None) -> "Serve":
        """Return the settings of an engine on `tp` devices.

        They override the settings of a scenario. Raises InputErrors if the settings contradict each
        other.
        """
        from vexport.scenario.serve import Serve, with_options

        given = {
            "tensor_parallel_size": tp,
            "max_model_len": self.max_model_len,
            "timeout": self.timeout,
            "canaries": self.canaries,
        }
        return with_options(scenario or Serve(), given, self.engine_args)


def _engine_args(
    context: click.Context,
    parameter: click.Parameter,
    values: "tuple[dict[str, JsonValue], ...]",
) -> dict[str, "JsonValue"]:
    """Merge the arguments of all --engine-arg options and of vLLM's flags.

    Raises BadParameter if an argument is given twice with different values.
    """
    return merged_arguments([context.meta.get(ENGINE_FLAGS, {}), *values])


def _store_flag(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """Store the value of a flag of vLLM under its name there, for `_engine_args` to merge."""
    if value is not None:
        context.meta.setdefault(ENGINE_FLAGS, {})[parameter.name] = value


def _flag_of(key: str) -> Decorator:
    """Return an option for a key of `serve`. It is passed on as an engine argument."""
    record = SETTINGS["serve"][key]
    return _flag(record.names[0], record.help, click_type(record), record.metavar)


def _flag(name: str, text: str, kind: object, metavar: str | None = None) -> Decorator:
    return option(name, text, kind, metavar, heading="vLLM", callback=_store_flag, kept=False)


def attribution_options(default: str) -> Decorator:
    """Return the options of the search for a cause. `default` says when the command searches."""
    return stacked(
        switch(
            "--attribution",
            f"Search for the cause of a loss after the verdict [default: {default}].",
            heading="Verdict",
        ),
        option(
            "--attribution-seconds",
            "Maximum number of seconds for the search for a cause.",
            POSITIVE,
            heading="Verdict",
            default=300,
            shown=True,
        ),
    )


engine_arg_option = stacked(
    _flag_of("max_num_seqs"),
    _flag_of("gpu_memory_utilization"),
    _flag("--dtype", "Data type of unquantized tensors.", click.STRING, "TYPE"),
    option(
        "--engine-arg engine_args",
        "Another argument of vLLM's engine, such as max_num_seqs=64, or several as a JSON object; "
        "repeatable.",
        parse_arguments,
        metavar="KEY=VALUE|'{JSON}'",
        heading="vLLM",
        multiple=True,
        callback=_engine_args,
    ),
)
interpreter_option = stacked(
    option(
        "--vllm-python",
        "Python interpreter whose vLLM is used.",
        PATH,
        heading="vLLM",
        envvar=VLLM_PYTHON,
    ),
    trust_option,
)
interpreters_option = stacked(
    option(
        "--vllm-python",
        "Python interpreter whose vLLM is used; repeatable for several versions [default: the "
        "interpreter that runs vexport].",
        PATH,
        heading="vLLM",
        multiple=True,
        envvar=VLLM_PYTHON,
    ),
    trust_option,
)
session_options = stacked(
    setting_option("serve", "max_model_len"),
    setting_option("serve", "canaries"),
    setting_option("serve", "timeout"),
)
serve_options = stacked(setting_option("serve", "tensor_parallel_size"), engine_arg_option)
