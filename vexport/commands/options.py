"""Options that several commands share, as decorators."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., object])

FORMATS = ("text", "json", "junit", "github")
PATH = click.Path(path_type=Path)
POSITIVE = click.IntRange(1)
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
    """Positive whole numbers separated by commas, each once: `1,2,4`. A type for click."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of positive whole numbers like 1,2,4.")
    return tuple(dict.fromkeys(int(part) for part in parts))


def format_option(formats: tuple[str, ...] = FORMATS) -> Callable[[Function], Function]:
    """--format: the form of the answer on stdout."""
    return click.option(
        "--format",
        "format_",
        type=click.Choice(formats),
        default="text",
        show_default=True,
        help="Form of the answer on stdout.",
    )


trust_option = click.option(
    "--trust-remote-code", is_flag=True, help="Let the checkpoint's own Python code run."
)


def engine_options(function: Function) -> Function:
    """Which vLLM, and whether a checkpoint's code may run."""
    function = trust_option(function)
    return click.option("--vllm-python", type=PATH, help="Interpreter whose vLLM is used.")(function)


def interpreter_options(function: Function) -> Function:
    """Which vLLMs, and whether a checkpoint's code may run."""
    function = trust_option(function)
    return click.option(
        "--vllm-python",
        type=PATH,
        multiple=True,
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


def device_options(function: Function) -> Function:
    """For which devices the question is asked."""
    function = click.option(
        "--sm", type=numbers, metavar="N,...", help="Compute capabilities, 90 for SM 9.0; each must do."
    )(function)
    return click.option(
        "--tp", type=numbers, metavar="N,...", help="Tensor parallel sizes; each must do [default: 1]."
    )(function)


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
        default="0.32",
        show_default=True,
        help="The vLLM that is to serve it: what it is known to do otherwise is judged by its rules.",
    )(function)


def plan_options(function: Function) -> Function:
    """What is quantized how."""
    function = click.option(
        "--tp", type=numbers, metavar="N,...", help="Tensor parallel sizes that must work [default: 1]."
    )(function)
    function = click.option(
        "--on-misfit",
        type=click.Choice(("refuse", "keep")),
        default="refuse",
        show_default=True,
        help="What to do where vLLM could not run a layer's shape: refuse all, or keep that layer.",
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
        "[default: exact_match, acc, then what there is; the first filter].",
    )(function)
    function = click.option(
        "--alpha",
        type=click.FloatRange(0, 0.5, min_open=True, max_open=True),
        default=0.05,
        show_default=True,
        help="Probability of a wrong PASS that is accepted.",
    )(function)
    return click.option(
        "--margin",
        type=click.FloatRange(0, 1, max_open=True),
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
