"""Options that several commands share, as decorators."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from click.core import ParameterSource

from vexport.cli.completion import complete_observer
from vexport.cli.help import RenamedOption
from vexport.version import short_version

if TYPE_CHECKING:
    from pydantic import JsonValue

Function = TypeVar("Function", bound=Callable[..., object])

FORMATS = ("text", "json", "junit", "github")
ALL_FORMATS = (*FORMATS, "html", "markdown", "card")
FORMAT_OF_SUFFIX: Mapping[str, str] = {
    ".txt": "text",
    ".json": "json",
    ".xml": "junit",
    ".html": "html",
    ".md": "markdown",
}
# The name of --output, and where a context holds its value.
ANSWER_FILE = "answer_file"


class Count(click.IntRange):
    """A whole number, which help calls N."""

    name = "n"


PATH = click.Path(path_type=Path)
POSITIVE = Count(1)
BYTE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}


class ByteSize(click.ParamType[int]):
    """A number of bytes, written as transformers does: 5GB, 200MB."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes; fails on what is not a positive number with a unit."""
        if isinstance(value, int):
            return value
        digits = value.upper().rstrip("GMKB")
        unit = BYTE_UNITS.get(value.upper().removeprefix(digits))
        if not digits.isdecimal() or not int(digits) or unit is None:
            self.fail(f"{value!r} is no size; write 5GB, 200MB or a number of bytes.", param, ctx)
        return int(digits) * unit


def numbers(text: str) -> tuple[int, ...]:
    """Tensor parallel sizes separated by commas, each once: `1,2,4`. A type for click."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal() and int(part))]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is not a number of GPUs; write whole numbers like 1,2,4.")
    return tuple(dict.fromkeys(int(part) for part in parts))


def capabilities(text: str) -> tuple[int, ...]:
    """Compute capabilities separated by commas, each once: `80,90`, `9.0` or `sm90`. A type for click."""
    from vexport.formats.gpus import GENERATIONS, parse_capability

    found = []
    for part in (part.strip() for part in text.split(",")):
        number = parse_capability(part)
        if number is None:
            known = ", ".join(map(str, GENERATIONS))
            raise click.BadParameter(
                f"{part!r} is not a known compute capability; write 90 or 9.0. Known: {known}."
            )
        found.append(number)
    return tuple(dict.fromkeys(found))


def is_scenario(source: str) -> bool:
    """Whether what stands for SOURCE|SCENARIO is the file of a scenario, or the recipe of a checkpoint."""
    return source.endswith((".yaml", ".yml", "/vexport.json")) or source == "vexport.json"


class FormatOption(click.Option):
    """--format; what VEXPORT_FORMAT says holds for commands that have this format, and for no other."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """The variable's value; None where it is a format that only other commands have."""
        value = super().resolve_envvar_value(ctx)
        choices = self.type.choices if isinstance(self.type, click.Choice) else ()
        return None if value in ALL_FORMATS and value not in choices else value


def _by_suffix(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """The format that was asked for; where none was, the one that the name of the answer's file ends in."""
    file = answer_file(context)
    if file is None or context.get_parameter_source("format_") is ParameterSource.COMMANDLINE:
        return value
    wanted = FORMAT_OF_SUFFIX.get(file.suffix.lower(), value)
    choices = parameter.type.choices if isinstance(parameter.type, click.Choice) else ()
    return wanted if wanted in choices else value


def _remember(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    if value is not None and value.is_dir():
        raise click.BadParameter(f"{value} is a folder, not a file to write.")
    if value is not None and str(value) != "-":
        context.meta[ANSWER_FILE] = value


def answer_file(context: click.Context) -> Path | None:
    """Where --output sends the answer; None for stdout."""
    file = context.meta.get(ANSWER_FILE)
    return file if isinstance(file, Path) else None


def format_option(
    formats: tuple[str, ...] = FORMATS, *, names: tuple[str, ...] = ("-o", "--output")
) -> Callable[[Function], Function]:
    """--format and --output: the form of the answer, and the file that it goes to."""

    def decorate(function: Function) -> Function:
        function = click.option(
            *names,
            ANSWER_FILE,
            type=PATH,
            metavar="FILE",
            is_eager=True,
            expose_value=False,
            callback=_remember,
            help="Write the answer to FILE; without --format its ending decides the form.",
        )(function)
        return click.option(
            "--format",
            "format_",
            cls=FormatOption,
            type=click.Choice(formats),
            default="text",
            show_default=True,
            envvar="VEXPORT_FORMAT",
            callback=_by_suffix,
            metavar="F",
            help=f"Form of the answer: {', '.join(formats)}.",
        )(function)

    return decorate


revision_option = click.option(
    "--revision", metavar="REV", help="Branch, tag or commit of a SOURCE on the hub, as in ORG/NAME@REV."
)


trust_option = click.option(
    "--trust-remote-code", is_flag=True, help="Let the checkpoint's own Python code run."
)


def engine_options(function: Function) -> Function:
    """Which vLLM, and whether a checkpoint's code may run."""
    function = trust_option(function)
    return click.option(
        "--vllm-python", type=PATH, envvar="VEXPORT_VLLM_PYTHON", help="Interpreter whose vLLM is used."
    )(function)


def interpreter_options(function: Function) -> Function:
    """Which vLLMs, and whether a checkpoint's code may run."""
    function = trust_option(function)
    return click.option(
        "--vllm-python",
        type=PATH,
        multiple=True,
        envvar="VEXPORT_VLLM_PYTHON",
        help="Interpreter whose vLLM is used; repeatable, for several versions [default: vexport's own].",
    )(function)


def session_options(function: Function) -> Function:
    """How an engine is started where no scenario says it."""
    function = click.option(
        "--timeout", type=POSITIVE, default=3600, show_default=True, help="Seconds for one engine."
    )(function)
    return click.option("--max-model-len", type=POSITIVE, help="Longest sequence [default: the model's].")(
        function
    )


def _engine_args(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, "JsonValue"]:
    """NAME -> value: JSON where it is JSON, else text."""
    arguments: dict[str, JsonValue] = {}
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


def _json_or_text(text: str) -> "JsonValue":
    try:
        value: JsonValue = json.loads(text)
    except ValueError:
        return text
    return value


engine_arg_option = click.option(
    "--engine-arg",
    "engine_args",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_engine_args,
    help="Argument of vLLM's engine, as gpu_memory_utilization=0.8; VALUE is JSON or text; repeatable.",
)


def serve_options(function: Function) -> Function:
    """How the engine is started, where one engine is asked for."""
    function = engine_arg_option(function)
    return click.option(
        "--tp", type=POSITIVE, metavar="N", help="Tensor parallel size: serve the model on N devices."
    )(function)


def tp_option(function: Function) -> Function:
    """On how many GPUs it is served."""
    return click.option(
        "--tp",
        type=numbers,
        metavar="N,...",
        envvar="VEXPORT_TP",
        help="Tensor parallel sizes to support, e.g. 1,2,4 [default: 1].",
    )(function)


def device_options(function: Function) -> Function:
    """For which devices the question is asked."""
    function = click.option(
        "--sm",
        type=capabilities,
        metavar="N,...",
        envvar="VEXPORT_SM",
        help="Compute capabilities to support, e.g. 80,90,100 (9.0 is 90).",
    )(function)
    return tp_option(function)


def _version(text: str) -> tuple[int, int]:
    """Major and minor number of a version. A type for click."""
    major, _, rest = text.removeprefix("v").partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        raise click.BadParameter(f"{text!r} is not a version like 0.30.")
    return int(major), int(minor)


def vllm_option(function: Function) -> Function:
    """For which vLLM the question is asked."""
    return click.option(
        "--vllm",
        type=_version,
        metavar="VERSION",
        default=short_version(),
        show_default=True,
        envvar="VEXPORT_VLLM",
        help="vLLM version to check against.",
    )(function)


def plan_options(function: Function) -> Function:
    """What is quantized how."""
    function = tp_option(function)
    function = click.option(
        "--on-unsupported-shape",
        "--on-misfit",
        "on_unsupported_shape",
        cls=RenamedOption,
        type=click.Choice(("refuse", "keep")),
        default="refuse",
        show_default=True,
        help="Where vLLM could not run a layer's shape: refuse the model, or keep that layer.",
    )(function)
    function = click.option(
        "--kv-cache",
        type=click.Choice(("fp8", "fp8_per_head")),
        help="Calibrate scales of an fp8 KV cache, for all heads of a layer or for each.",
    )(function)
    function = click.option(
        "--ignore",
        multiple=True,
        metavar="PATTERN",
        help="Keep these layers: a name, its end, or re:REGEX; repeatable.",
    )(function)
    return click.option(
        "--observer",
        metavar="O",
        shell_complete=complete_observer,
        default="memoryless_minmax",
        show_default=True,
        help="How weight ranges are found.",
    )(function)


def _gates(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """TASK -> METRIC[,FILTER]; without a task it is for all that have it."""
    gates: dict[str, str] = {}
    for value in values:
        task, _, metric = value.rpartition("=")
        if not metric or (task or "*") in gates:
            raise click.BadParameter(f"{value!r} is not [TASK=]METRIC[,FILTER], or its task is given twice.")
        gates[task or "*"] = metric
    return gates


def verdict_options(function: Function) -> Function:
    """What loss is acceptable, how sure the answer must be, and what decides."""
    function = click.option(
        "--gate",
        multiple=True,
        metavar="[TASK=]METRIC[,FILTER]",
        callback=_gates,
        help="Metric that decides, for one task or group, or for all; repeatable "
        "[default: exact_match if present, else acc, else the first metric; first filter].",
    )(function)
    function = click.option(
        "--alpha",
        type=click.FloatRange(0, 0.5, min_open=True, max_open=True),
        metavar="A",
        default=0.05,
        show_default=True,
        help="Probability of a wrong PASS that is accepted.",
    )(function)
    return click.option(
        "--margin",
        type=click.FloatRange(0, 1, max_open=True),
        metavar="M",
        default=0.02,
        show_default=True,
        help="Acceptable loss: 0.02 is 2 points.",
    )(function)


def drift_options(function: Function) -> Function:
    """Beyond which drift of the log-probabilities a verdict warns."""
    function = click.option(
        "--nll-limit",
        type=click.FloatRange(0, min_open=True),
        metavar="NATS",
        help="Warn where the NLL rises by more, in nats a token [default: 0.05].",
    )(function)
    return click.option(
        "--kl-limit",
        type=click.FloatRange(0, min_open=True),
        metavar="NATS",
        help="Warn where the mean KL to the baseline is more, in nats a token [default: 0.1].",
    )(function)
