"""Options that several commands share, as decorators."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from vexport.records.values import MOST_COUNT
from vexport.version import short_version

if TYPE_CHECKING:
    from vexport.formats.base import Card

Function = Callable[..., None]
Decorator = Callable[[Function], Function]
Callback = Callable[[click.Context, click.Parameter, Any], object]

FORMATS = ("text", "json", "junit", "github")
FORMAT_OF_SUFFIX = {".txt": "text", ".json": "json", ".xml": "junit", ".html": "html", ".md": "markdown"}
# The name of --output, and where a context holds its value.
ANSWER_FILE = "answer_file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The form of the answer; `quiet` shows no progress."""

    format_: str
    quiet: bool


def stacked(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order in which help shows them."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def option(
    names: str,
    text: str,
    kind: object = None,
    metavar: str | None = None,
    *,
    default: object = ...,
    shown: bool = False,
    flag: bool = False,
    multiple: bool = False,
    envvar: str | None = None,
    callback: Callback | None = None,
    hidden: bool = False,
    kept: bool = True,
) -> Decorator:
    """An option by its names, separated by spaces, with its help; help has the default where it is `shown`.

    One that is not `kept` is read first, by its callback, and is no argument of the command's function.
    """
    defaults: dict[str, Any] = {} if default is ... else {"default": default}
    return click.option(
        *names.split(),
        help=text,
        type=kind,
        metavar=metavar,
        show_default=shown or None,
        is_flag=flag or None,
        multiple=multiple,
        envvar=envvar,
        callback=callback,
        hidden=hidden,
        expose_value=kept,
        is_eager=not kept,
        **defaults,
    )


class Count(click.IntRange):
    """A whole number that a clock and a loop can take, which help calls N."""

    name = "n"

    def __init__(self, least: int) -> None:
        super().__init__(least, MOST_COUNT)

    def _describe_range(self) -> str:
        """Nothing for help: that a number of things is a whole number goes without saying."""
        return ""


class Real(click.FloatRange):
    """A finite number within a range; every comparison with NaN is false, so that it is within any."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number that the text is."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        """The bounds for help, where there are two."""
        return "" if self.max is None else super()._describe_range()


PATH = click.Path(path_type=Path)
POSITIVE = Count(1)
# The most digits of a number of bytes: beyond any disk.
MOST_DIGITS = 18
BYTE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}


def byte_size(text: str) -> int:
    """A number of bytes, written as transformers does: 5GB, 200MB. A type for click."""
    digits = text.upper().rstrip("GMKB")
    unit = BYTE_UNITS.get(text.upper().removeprefix(digits))
    if not digits.isdecimal() or len(digits) > MOST_DIGITS or not int(digits) or unit is None:
        raise click.BadParameter(f"{text!r} is no size; write 5GB, 200MB or a number of bytes.")
    return int(digits) * unit


def numbers(text: str, of: str = "GPUs") -> tuple[int, ...]:
    """Tensor parallel sizes separated by commas, each once: `1,2,4`. A type for click."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal() and int(part))]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is not a number of {of}; write whole numbers like 1,2,4.")
    return tuple(dict.fromkeys(int(part) for part in parts))


def capabilities(text: str) -> tuple[int, ...]:
    """Compute capabilities separated by commas, each once: `80,90`, `9.0` or `sm90`. A type for click."""
    from vexport.formats.base import GENERATIONS, parse_capability

    listed = []
    for part in (part.strip() for part in text.split(",")):
        number = parse_capability(part)
        if number is None:
            known = ", ".join(map(str, GENERATIONS))
            raise click.BadParameter(
                f"{part!r} is not a known compute capability; write 90 or 9.0. Known: {known}."
            )
        listed.append(number)
    return tuple(dict.fromkeys(listed))


def gpus(text: str) -> tuple["Card", ...]:
    """Names of GPUs separated by commas, each once: `H100,l40s`. A type for click."""
    from vexport.formats.base import cards

    try:
        return cards(text.split(","))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


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
    """The file of --output; None for stdout."""
    file = context.meta.get(ANSWER_FILE)
    return file if isinstance(file, Path) else None


def format_option(formats: tuple[str, ...] = FORMATS, names: str = "-o --output") -> Decorator:
    """--format and --output: the form of the answer, and the file that it goes to."""
    forms = f"Form of the answer: {', '.join(formats)}."
    file = "Write the answer to FILE, whose ending decides the form."
    return stacked(
        option(
            "--format format_",
            forms,
            click.Choice(formats),
            "F",
            default="text",
            shown=True,
            callback=_by_suffix,
        ),
        option(f"{names} {ANSWER_FILE}", file, PATH, "FILE", callback=_remember, kept=False),
    )


def _version(text: str) -> tuple[int, int]:
    """Major and minor number of a version. A type for click."""
    major, _, rest = text.removeprefix("v").partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        raise click.BadParameter(f"{text!r} is not a version like 0.30.")
    return int(major), int(minor)


revision_option = option("--revision", "Branch, tag or commit of a SOURCE on the hub.", metavar="REV")
trust_option = option("--trust-remote-code", "Let the checkpoint's own Python code run.", flag=True)
overwrite_run_option = option("--overwrite", "Start again in a run directory that exists.", flag=True)
overwrite_out_option = option(
    "--overwrite", "Replace OUT if vexport made it and nothing else is in it.", flag=True
)
tp_option = option("--tp", "Tensor parallel sizes to support, e.g. 1,2,4 [default: 1].", numbers, "N,...")
device_options = stacked(
    tp_option,
    option("--sm", "Compute capabilities to support, e.g. 80,90,100 (9.0 is 90).", capabilities, "N,..."),
)
gpu_option = option(
    "--gpu cards",
    "GPUs whose memory to compare with, e.g. H100,L40S; without --sm also which capabilities.",
    gpus,
    "NAME,...",
)
speculative_option = option(
    "--speculative", "Drafting to support: mtp, or eagle3=FOLDER.", metavar="METHOD", default=""
)
vllm_option = option(
    "--vllm", "vLLM version to check against.", _version, "VERSION", default=short_version(), shown=True
)
