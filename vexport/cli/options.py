"""The layout of help, and the options that several commands share, as decorators."""

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args

import click
from click.core import ParameterSource

from vexport.cli.positional import folder_advice
from vexport.errors import InputError, InputErrors, did_you_mean
from vexport.names import ModelRef, Server, user_path, user_text
from vexport.records.options import Heading
from vexport.records.values import MOST_COUNT
from vexport.version import parse_version, short_version
from vexport.words import clip

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

    from vexport.formats.gpus import Card
    from vexport.outputs.replaceable import NamedPath

MAX_HELP_WIDTH = 100
HEADINGS: Sequence[Heading] = get_args(Heading)
OTHERS: Heading = "Options"
OUTPUT: Heading = "Output"


class HeadedOption(click.Option):
    """An option that help lists under `heading`."""

    def __init__(self, *declarations: Any, heading: Heading = OTHERS, **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.heading = heading


class SettingOption(HeadedOption):
    """Option for the setting `key` of `section`.

    The option has no default, because the settings model declares the default. Help shows
    `default_text`, or the value from a file of defaults.
    """

    def __init__(
        self, *declarations: Any, section: str, key: str, default_text: str, **attributes: Any
    ) -> None:
        super().__init__(*declarations, show_default=True, **attributes)
        self.section = section
        self.key = key
        self.default_text = default_text

    def get_help_extra(self, ctx: click.Context) -> "OptionHelpExtra":
        """Return the extra information that help shows in brackets behind the text."""
        extra = super().get_help_extra(ctx)
        if self.default_text:
            extra.setdefault("default", self.default_text)
        return extra


class SectionedCommand(click.Command):
    """A command whose help lists the options under the headings of `HEADINGS`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line.

        Raises UsageError with the corrected call if the output folder is given with -o.
        """
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if advice := folder_advice(self, ctx, words):
                raise click.UsageError(advice, ctx) from error
            raise

    def invoke(self, ctx: click.Context) -> object:
        """Call the command's function.

        If a parameter's type is a dataclass, the parameter receives the options with the names of
        the dataclass's fields.
        """
        assert self.callback is not None
        require_apart(ctx)
        try:
            return ctx.invoke(self.callback, **grouped(self.callback, ctx.params))
        except InputErrors as error:
            raise InputErrors([self._at_option(each) for each in error.problems]) from error

    def _at_option(self, problem: InputError) -> InputError:
        """Return the problem with the option's name as its place, if an option caused it.

        Problems of the Python API have the argument as their place. For example, the place
        `quantize: smoothing` becomes `--smoothing`.
        """
        place, _, key = problem.where.partition(": ")
        for each in self.params if place == self.name else ():
            if isinstance(each, SettingOption) and each.key == key:
                return problem.moved(each.opts[0])
        return problem

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every heading that has options, with its options in the order of declaration."""
        rows: dict[Heading, list[tuple[str, str]]] = {heading: [] for heading in HEADINGS}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx) if isinstance(each, click.Option) else None
            if isinstance(each, click.Option) and record is not None:
                rows[_heading(each)].append(_short(each, record))
        for heading, lines in rows.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)


def _heading(option: click.Option) -> Heading:
    """Return the heading of an option. Options that click adds (--help) are listed as output."""
    return option.heading if isinstance(option, HeadedOption) else OUTPUT


def grouped(function: Callable[..., object], values: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a command's function, made from the values of its parameters.

    Parameters with the fields of a dataclass are grouped into an instance of the dataclass.
    """
    arguments: dict[str, object] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            arguments[name] = kind(**{field.name: values[field.name] for field in fields(kind)})
        else:
            arguments[name] = values[name]
    return arguments


class OrderedGroup(click.Group):
    """Group of commands in the order of work. A command is imported when it is called.

    `command_paths` maps each command's name to `module:function` in vexport.cli.
    """

    def __init__(self, *, command_paths: Mapping[str, str], **settings: Any) -> None:
        super().__init__(**settings)
        self.command_paths = command_paths

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command with this name."""
        module, _, function = self.command_paths.get(cmd_name, "").partition(":")
        return getattr(import_module(f"vexport.cli.{module}"), function) if module else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, and the other arguments.

        Raises UsageError, with the nearest name, if there is no such command.
        """
        name = args[0]
        is_mistake = name not in self.command_paths and not name.startswith("-")
        if is_mistake and not ctx.resilient_parsing:  # shell completion must not fail
            ctx.fail(
                f"No such command {clip(repr(name), 100)}.{did_you_mean(name, self.command_paths)}"
            )
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of work."""
        return list(self.command_paths)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the name and first sentence of each command, then the options of all commands."""
        commands = ((name, self.get_command(ctx, name)) for name in self.command_paths)
        rows = [
            (name, command.get_short_help_str(limit=1000)) for name, command in commands if command
        ]
        records = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        with formatter.section(OTHERS):
            formatter.write_dl([record for record in records if record is not None])


def _short(option: click.Option, record: tuple[str, str]) -> tuple[str, str]:
    """Return the line of an option in help. A switch is written as `--[no-]pack`."""
    on, off = option.opts[-1], next(iter(option.secondary_opts), "")
    return (f"--[no-]{on[2:]}", record[1]) if off == f"--no-{on[2:]}" else record


Parameter = click.Parameter | None
Context = click.Context | None
T = TypeVar("T")
Function = Callable[..., None]
Decorator = Callable[[Function], Function]
Callback = Callable[[click.Context, click.Parameter, Any], object]

FORMATS = ("text", "json", "junit", "github")
FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".json": "json",
    ".xml": "junit",
    ".html": "html",
    ".htm": "html",
    ".md": "markdown",
}
# Suffixes of formats that no command writes. Files with other unknown suffixes, such as temporary
# files, get the format text.
UNWRITTEN_SUFFIXES = (".csv", ".docx", ".pdf", ".png", ".svg", ".tsv", ".xlsx")
# Name of the parameter of --output. It is also the key of its value in a context's `meta`.
OUTPUT_FILE = "output_file"
# Parameters with paths of outputs, unless their type is READ_PATH. All other paths are inputs.
OUTPUTS = (OUTPUT_FILE, "out", "run_dir", "output_dir", "accept", "folder")
# Parameters of type text that may name an input file.
FILES = ("tasks", "digests")
# Inputs that may name a column: FILE:COLUMN.
DATA = ("text", "data")
# The option whose value may name the folder of a draft model: eagle3=FOLDER.
SPECULATIVE = "speculative"
# Interpreters. They are executed, so they are neither inputs nor outputs.
INTERPRETER_OPTIONS = ("vllm_python",)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Format of a command's output. If `quiet`, no progress is shown."""

    format_: str
    quiet: bool


def stacked(*options: Decorator) -> Decorator:
    """Return one decorator for several options. Help shows the options in this order."""

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
    heading: Heading = OTHERS,
    default: object = ...,
    shown: bool = False,
    flag: bool = False,
    multiple: bool = False,
    envvar: str | None = None,
    callback: Callback | None = None,
    kept: bool = True,
) -> Decorator:
    """Return a decorator that adds an option. `names` are separated by spaces.

    Help lists the option under `heading`, and shows the default if `shown` is True. If `kept` is
    False, the option is parsed before all others, only its callback receives the value, and the
    command's function has no such argument.
    """
    defaults: dict[str, Any] = {} if default is ... else {"default": default}
    return click.option(
        *names.split(),
        cls=HeadedOption,
        heading=heading,
        help=text,
        type=kind,
        metavar=metavar,
        show_default=shown or None,
        is_flag=flag or None,
        multiple=multiple,
        envvar=envvar,
        callback=callback,
        expose_value=kept,
        is_eager=not kept,
        **defaults,
    )


def switch(names: str, text: str, *, heading: Heading = OTHERS) -> Decorator:
    """Return an option with an opposite: `--pack` turns a setting on, `--no-pack` turns it off."""
    return option(switch_names(names), text, heading=heading, default=None)


def switch_names(names: str) -> str:
    """Return the names of a switch with its opposite: `--pack/--no-pack`."""
    name, *parameter = names.split()
    return " ".join((f"{name}/--no-{name[2:]}", *parameter))


class Count(click.IntRange):
    """Whole number within a range. Help shows its value as N."""

    name = "n"

    def __init__(self, least: int, most: int = MOST_COUNT) -> None:
        super().__init__(least, most)

    def fail(self, message: str, param: Parameter = None, ctx: Context = None) -> NoReturn:
        """Raise click's error. Its message has the range, even if help does not show it."""
        super().fail(message.replace("range .", f"range {super()._describe_range()}."), param, ctx)

    def _describe_range(self) -> str:
        """Return the range for help, or "" if there is no upper bound."""
        return "" if self.max == MOST_COUNT else super()._describe_range()


class Real(click.FloatRange):
    """Finite number within a range. Click itself accepts NaN in every range."""

    def convert(self, value: float, param: Parameter, ctx: Context) -> float:
        """Parse a finite number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number

    def fail(self, message: str, param: Parameter = None, ctx: Context = None) -> NoReturn:
        """Raise click's error. Its message has the range, even if help does not show it."""
        super().fail(message.replace("range .", f"range {super()._describe_range()}."), param, ctx)

    def _describe_range(self) -> str:
        """Return the range for help, or "" if there is no upper bound."""
        return "" if self.max is None else super()._describe_range()


class UserPath(click.Path):
    """Path in which `~` and `~name` are replaced by the home folder."""

    def convert(self, value: str | os.PathLike[str], param: Parameter, ctx: Context) -> Path:
        """Return the path. Raise InputError if there is no such user."""
        return user_path(Path(os.fsdecode(super().convert(value, param, ctx))))


PATH = UserPath(path_type=Path)
# Type of an input parameter that shares its name with an output of another command, such as
# `run_dir` of `plan`.
READ_PATH = UserPath(path_type=Path)
FOLDER = UserPath(path_type=Path, exists=True, file_okay=False)
POSITIVE = Count(1)
BYTE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}


def byte_size(text: str) -> int:
    """Parse a size in the syntax of transformers (5GB, 200MB) to bytes. A type for click."""
    match = re.fullmatch("0*([1-9][0-9]{0,17})([KMG]B|)", text.upper())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; write 5GB, 200MB or a number of bytes.")
    return int(match[1]) * BYTE_UNITS[match[2]]


def numbers(text: str) -> tuple[int, ...]:
    """Parse tensor parallel sizes: `1,2,4`. A type for click."""
    from vexport.formats.gpus import parse_sizes

    return _parsed(parse_sizes, text)


def capabilities(text: str) -> tuple[int, ...]:
    """Parse compute capabilities: `80,9.0`, `sm90` or `H100`. A type for click."""
    from vexport.formats.gpus import parse_capabilities

    return _parsed(parse_capabilities, text)


def gpus(text: str) -> tuple["Card", ...]:
    """Parse names of GPUs: `H100,l40s`. Duplicates are dropped. A type for click."""
    from vexport.formats.gpus import cards

    return _parsed(cards, text)


def _parsed(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _by_suffix(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the format given on the command line, or else the format of the output file's suffix.

    Raises BadParameter if the command cannot write the format of this suffix.
    """
    file = output_file(context)
    if file is None or context.get_parameter_source("format_") is ParameterSource.COMMANDLINE:
        return value
    suffix = file.suffix.lower()
    wanted = suffix if suffix in UNWRITTEN_SUFFIXES else FORMAT_OF_SUFFIX.get(suffix, value)
    choices = parameter.type.choices if isinstance(parameter.type, click.Choice) else ()
    if wanted not in choices:
        endings = [suffix for suffix, form in FORMAT_OF_SUFFIX.items() if form in choices]
        raise click.BadParameter(
            f"{file.name}: this command cannot write {wanted}; use a file name that ends in "
            f"{', '.join(endings)}, or give --format."
        )
    return wanted


def _store_output_file(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> None:
    if value is not None and value.is_dir():
        raise click.BadParameter(f"{value} is a folder; give the name of a file.")
    if value is not None and str(value) != "-":
        context.meta[OUTPUT_FILE] = value


def given(*names: str) -> bool:
    """Return True if at least one of these options was given on the command line.

    Values from the environment or from a file of defaults do not count.
    """
    context = click.get_current_context()
    return any(context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in names)


def output_file(context: click.Context) -> Path | None:
    """Return the file of --output, or None if the output goes to stdout."""
    file = context.meta.get(OUTPUT_FILE)
    return file if isinstance(file, Path) else None


def require_apart(
    context: click.Context, inputs: "Sequence[NamedPath]" = (), outputs: "Sequence[NamedPath]" = ()
) -> None:
    """Raise InputError if an output of a command overlaps an input. Call it before writing.

    The paths in the command's arguments and options are always compared. `inputs` and `outputs`
    are further paths, such as the inputs of a scenario and default output folders.
    """
    from vexport.outputs.replaceable import NamedPath, require_separate

    written, read = list(outputs), list(inputs)
    for parameter in context.command.params:
        label = _label(parameter)
        if parameter.name == OUTPUT_FILE:
            written += (
                [NamedPath(label="--output", path=file)] if (file := output_file(context)) else []
            )
        elif parameter.name in OUTPUTS and parameter.type is not READ_PATH:
            given = context.params.get(str(parameter.name))
            written += [NamedPath(label=label, path=given)] if given else []
        elif parameter.name not in INTERPRETER_OPTIONS:
            read += [NamedPath(label=label, path=path) for path in _paths_read(context, parameter)]
    require_separate(list(dict.fromkeys(written)), read)


def _label(parameter: click.Parameter) -> str:
    """Return the name of a parameter in help: `OUT`, `--run-dir`."""
    if isinstance(parameter, click.Option):
        return next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])
    return str(parameter.name).upper()


def _paths_read(context: click.Context, parameter: click.Parameter) -> "Iterator[Path]":
    """Yield the input paths in the value of a parameter.

    Servers and folders with the name of a task are skipped. A hub id is also yielded, because it
    may be the name of a folder.
    """
    from vexport.checkpoint.source import parse_data

    value = context.params.get(str(parameter.name))
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, Path):
            yield each
        elif isinstance(each, ModelRef) and not isinstance(each, Server):
            yield each.path
        elif isinstance(each, str) and parameter.name == SPECULATIVE:
            yield from [Path(folder)] if (folder := each.partition("=")[2]) else []
        elif isinstance(each, str) and parameter.name in DATA:
            yield parse_data(each).path
        elif isinstance(each, str) and parameter.name in FILES and Path(each).is_file():
            yield Path(each)


def format_option(formats: tuple[str, ...] = FORMATS, names: str = "-o --output") -> Decorator:
    """Return the options --format (form of the output) and --output (its file)."""
    forms = f"Format of the output: {', '.join(formats)}."
    file = "Write the output to FILE. Its suffix sets the format."
    return stacked(
        option(
            "--format format_",
            forms,
            click.Choice(formats),
            "F",
            heading="Output",
            default="text",
            shown=True,
            callback=_by_suffix,
        ),
        option(
            f"{names} {OUTPUT_FILE}",
            file,
            PATH,
            "FILE",
            heading="Output",
            callback=_store_output_file,
            kept=False,
        ),
    )


def _version(text: str) -> tuple[int, int]:
    """Parse the major and minor number of a version. A type for click."""
    return _parsed(parse_version, text)


trust_option = option(
    "--trust-remote-code",
    "Allow Python code from the checkpoint, and observers named package.module:Class.",
    heading="vLLM",
    flag=True,
)
overwrite_run_option = option(
    "--overwrite", "Start again in an existing run directory.", heading="Output", flag=True
)
overwrite_out_option = option(
    "--overwrite",
    "Replace OUT if it contains only files that vexport wrote.",
    heading="Output",
    flag=True,
)
tp_option = option(
    "--tp",
    "Tensor parallel sizes to support, such as 1,2,4 [default: 1].",
    numbers,
    "N,...",
    heading="vLLM",
)
device_options = stacked(
    tp_option,
    option(
        "--sm",
        "Compute capabilities to support, such as 80,90,100 (9.0 means 90).",
        capabilities,
        "N,...",
        heading="vLLM",
    ),
)
gpu_names_option = option(
    "--gpu cards",
    "GPUs to support by name, such as H100,L40S; adds their compute capabilities to --sm.",
    gpus,
    "NAME,...",
    heading="vLLM",
)
gpu_option = option(
    "--gpu cards",
    "GPUs to compare memory with, such as H100,L40S; sets --sm if it is not given.",
    gpus,
    "NAME,...",
    heading="vLLM",
)
speculative_option = option(
    "--speculative",
    "Speculative decoding to support: mtp, or eagle3=FOLDER.",
    user_text,
    "METHOD",
    heading="vLLM",
    default="",
)
vllm_option = option(
    "--vllm",
    f"Version of vLLM to check against [default: the installed version, else {short_version()}].",
    _version,
    "VERSION",
    heading="vLLM",
)
