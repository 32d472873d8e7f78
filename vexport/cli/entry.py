"""Run a command, turn its outcome into an exit code, and read a file of defaults.

The file of defaults is `vexport.toml` in the current folder, or [tool.vexport] in pyproject.toml.
"""

import logging
import select
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import click
from click.core import ParameterSource

from vexport.cli import INTERRUPTED
from vexport.cli.base import wants_colour
from vexport.cli.options import MAX_HELP_WIDTH, OUTPUTS, OrderedGroup
from vexport.errors import (
    EnvironmentFaults,
    InputError,
    InputErrors,
    VexportError,
    convert_os_error,
    nearest_hint,
    visible,
)
from vexport.errors.extras import unexpected_error
from vexport.rules import usage as rules
from vexport.version import __version__
from vexport.words import clip

# Each command's module is imported when the command is called, and imports heavy libraries only
# inside functions. This keeps `--help` fast.
COMMANDS = {
    "demo": "scenario:demo",
    "plan": "plan:plan",
    "quantize": "quantize:quantize",
    "check": "check:check",
    "load": "load:load",
    "eval": "evaluate:evaluate",
    "run": "scenario:run",
    "compare": "compare:compare",
    "report": "scenario:report",
    "verdict": "evaluate:verdict_command",
    "repair": "quantize:repair",
    "list": "plan:list_command",
    "explain": "plan:explain_command",
}
# Limits of messages on stderr, because names and values from files may have any length.
MAX_CHARACTERS = 600
MAX_LINES = 50
# Options that a file of defaults must not set: they run foreign code, choose output paths or
# silence rules, and the file may be in a folder from somebody else.
FORBIDDEN_DEFAULTS = frozenset(
    {
        "trust_remote_code",
        "vllm_python",
        "engine_args",
        "serve",
        "install",
        "ignore_rules",
        "overwrite",
        "help",
        "version",
        *OUTPUTS,
    }
)
# Exit code if the reader of the output closed the pipe: 128 + SIGPIPE, as in shells.
CLOSED_OUTPUT = 141
# The last file is shared with other tools.
FILES = ("vexport.toml", "pyproject.toml")
EPILOG = """
Exit codes: 0 pass; 1 the checkpoint fails; 2 wrong usage or input; 3 inconclusive; 4 fault of the
environment (vLLM missing, crashed, out of memory, timed out); 130 interrupted; 143 terminated.

Defaults: set options in vexport.toml or in [tool.vexport] of pyproject.toml, in the current folder.
A table such as [check] applies to one command.

Environment: VEXPORT_VLLM_PYTHON sets --vllm-python if the option is not given. NO_COLOR turns
colour off, and FORCE_COLOR turns it on.

Completion: `eval "$(_VEXPORT_COMPLETE=bash_source vexport)"`, or zsh_source, fish_source.
"""


def run_command() -> int:
    """Run the command on the command line and return its exit code.

    Each error is printed as one line on stderr. No exception leaves this function, except
    SystemExit and similar exceptions that are neither errors nor interrupts.
    """
    _send_log_to_stderr()
    try:
        result = cli.main(prog_name="vexport", standalone_mode=False, default_map=default_map(cli))
        return result if isinstance(result, int) else 0
    except BaseException as error:
        if (interrupt := _interrupt_in_chain(error)) is not None:
            line = "; ".join((INTERRUPTED, *getattr(interrupt, "__notes__", ())))
            return _print_errors([line], interrupt.args[0] if interrupt.args else 130)
        # click turns a broken pipe into SystemExit.
        if isinstance(error, SystemExit | BrokenPipeError) and _is_output_closed():
            return CLOSED_OUTPUT
        return _print_failure(error)


class _Lines(logging.Handler):
    """Log handler that prints each record as a line on stderr, below any progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        text = self.format(record)
        click.echo(text if record.exc_info else visible(clip(text, MAX_CHARACTERS)), err=True)


def _send_log_to_stderr() -> None:
    """Send vexport's log to stderr.

    The default level is INFO. --debug and -v show all records, -q only warnings and errors.
    """
    given = set(sys.argv[1:])
    is_verbose, is_quiet = given & {"--debug", "-v", "--verbose"}, given & {"-q", "--quiet"}
    logger = logging.getLogger("vexport")
    lines = _Lines(logging.DEBUG if is_verbose else logging.WARNING if is_quiet else logging.INFO)
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)


def _interrupt_in_chain(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the KeyboardInterrupt in the error's chain of causes and contexts, or None.

    Libraries may turn an interrupt into an exception of another type.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _is_output_closed() -> bool:
    """Return True if the reader of stdout or stderr has closed it, as `head` does.

    Otherwise the broken pipe belongs to a worker process, and is an error.
    """
    watched = select.poll()
    for number in (1, 2):
        watched.register(number, 0)  # errors are always reported
    return any(event & select.POLLERR for _, event in watched.poll(0))


def _print_failure(error: BaseException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        # No arguments: print the help, with the exit code of a usage error. Otherwise
        # `vexport $EMPTY` would pass in CI.
        click.echo(error.format_message())
        return error.exit_code
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "vexport"
        message = " ".join(error.format_message().split())
        message = message if message.endswith((".", "?")) else f"{message}."
        if (file := _defaults_file_of(error)) is not None:
            message = f"{file}: {message}"
        return _print_errors([f"{command}: {message} See `{command} --help`."], error.exit_code)
    if isinstance(error, InputErrors | EnvironmentFaults):
        return _print_errors(map(_with_rule, error.problems), error.exit_code)
    problem = _as_vexport_error(error)
    return _print_errors([_with_rule(problem)], problem.exit_code)


def _with_rule(problem: VexportError) -> str:
    return f"{problem} [{problem.rule}]" if problem.rule else str(problem)


def _defaults_file_of(error: click.UsageError) -> str | None:
    """Return the name of the file of defaults if click refused a value from it, or else None."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return None
    source = error.ctx.get_parameter_source(str(error.param.name))
    return _defaults_table()[0] if source is ParameterSource.DEFAULT_MAP else None


def _as_vexport_error(error: BaseException) -> VexportError:
    """Return the exception as a VexportError. Raise it again if it is no Exception."""
    if isinstance(error, VexportError):
        return error
    if isinstance(error, BrokenPipeError):
        return unexpected_error(error, "vexport")
    if isinstance(error, OSError):
        return convert_os_error(error)
    if isinstance(error, click.exceptions.Abort) and isinstance(error.__cause__, EOFError):
        error = error.__cause__  # EOF in a file: click mistakes it for the end of user input
    if isinstance(error, Exception):
        return unexpected_error(error, "vexport")
    raise error


def _print_errors(messages: Iterable[str], code: int) -> int:
    """Print each message as one line on stderr and return `code`.

    Long messages are cut, and control characters are made visible. With --debug the traceback is
    printed first.
    """
    colour = wants_colour(sys.stderr)
    label = click.style("error:", fg="red", bold=True) if colour else "error:"
    lines = [f"{label} {visible(clip(message, MAX_CHARACTERS))}" for message in messages]
    if len(lines) > MAX_LINES:
        more = f"{label} {len(lines) - MAX_LINES:,} more problems like these"
        lines = [*lines[:MAX_LINES], more]
    with suppress(BrokenPipeError):  # the reader of stderr closed it; the exit code is known
        if "--debug" in sys.argv:
            traceback.print_exc()
        for line in lines:
            click.echo(line, err=True, color=colour)
    return code


def default_map(group: click.Group) -> dict[str, dict[str, object]]:
    """Return the defaults of each command's parameters, read from the file of defaults.

    A table in the file sets options of the command with the table's name. Keys outside tables set
    options of every command that has the option. Raises InputError for unknown tables or options,
    and for values of a wrong type.
    """
    where, table = _defaults_table()
    if not table:
        return {}
    context = click.Context(group)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    options = {name: _options(command) for name, command in commands.items() if command}
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    shared = {key: value for key, value in table.items() if key not in tables}
    for name in tables.keys() - options.keys():
        hint = nearest_hint(clip(name, 100), [*options])
        raise InputError.of(rules.UNKNOWN_TABLE, f"{where}: [{clip(name, 100)}]", hint=hint)
    every = {name: option for each in options.values() for name, option in each.items()}
    _require_known(f"{where}: ", shared, every, options)
    defaults: dict[str, dict[str, object]] = {}
    for name, known in options.items():
        of_command = tables.get(name, {})
        label = f"{where}: {name}."
        _require_known(label, of_command, known, options)
        labels = dict.fromkeys(shared, f"{where}: ") | dict.fromkeys(of_command, label)
        settings = {key: value for key, value in (shared | of_command).items() if key in known}
        defaults[name] = {
            str(known[key].name): _value(known[key], value, f"{labels[key]}{key}")
            for key, value in settings.items()
        }
    return defaults


def _require_known(
    where: str,
    settings: Iterable[str],
    known: Mapping[str, click.Option],
    commands: Mapping[str, Mapping[str, click.Option]],
) -> None:
    """Raise InputError for a setting that is no option, or that a file must not set.

    `known` are the options that may be set here: the options of one command, or of all commands
    for settings outside of tables. `commands` has the options of each command.
    """
    for key in settings:
        place = f"{where}{clip(key, 100)}"
        name = key.replace("-", "_")
        if (
            key in known
            and str(known[key].name) in FORBIDDEN_DEFAULTS
            or name in FORBIDDEN_DEFAULTS
        ):
            raise InputError.of(rules.FORBIDDEN_DEFAULT, place)
        if key not in known:
            remedy = f"correct it{nearest_hint(clip(key, 100), [*known])}"
            if others := sorted(name for name, options in commands.items() if key in options):
                remedy = f"move it to {' or '.join(f'[{name}]' for name in others)}"
            raise InputError.of(rules.UNKNOWN_OPTION, place, remedy=remedy)


def _defaults_table() -> tuple[str, Mapping[str, object]]:
    """Return (label, settings) of the file of defaults. Both are empty if there is no file.

    The label is the file's name, with the table in pyproject.toml. Error messages begin with it.
    """
    for name in FILES:
        is_project = name == FILES[-1]
        if not Path(name).is_file() or (is_project and not _mentions_vexport(Path(name))):
            continue
        from vexport.config_files import load_toml

        table = load_toml(Path(name))
        where = f"{name}: tool.vexport" if is_project else name
        tool = table.get("tool") if is_project else {"vexport": table}
        settings = tool.get("vexport", {}) if isinstance(tool, dict) else {}
        if not isinstance(settings, dict):
            raise InputError.of(rules.TABLE, where, value=settings)
        return where, settings
    return "", {}


def _mentions_vexport(project: Path) -> bool:
    """Return True if a pyproject.toml may contain settings of vexport.

    Returns False if the file cannot be read.
    """
    try:
        return b"tool.vexport" in project.read_bytes()
    except OSError:
        return False


def _options(command: click.Command) -> dict[str, click.Option]:
    """Return a command's options by their long names without leading dashes."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    return {
        name.lstrip("-"): option
        for option in options
        for name in option.opts
        if name.startswith("--")
    }


def _value(option: click.Option, value: object, place: str) -> object:
    """Return a value from the file of defaults as on the command line, so that click converts it.

    A switch stays a boolean. Other values become text, or a list of texts for a repeatable option.
    Raises InputError if a switch is neither true nor false, or if another option's value is not
    text, a number, or a list of these.
    """
    if option.is_flag:
        if isinstance(value, bool):
            return value
        raise InputError.of(rules.SWITCH, place, value=value)
    listed = value if isinstance(value, list) else [value]
    try:
        parts = [str(part) for part in listed if _is_plain(part)]
    except ValueError:  # an integer of more than 4,300 digits
        parts = []
    if len(parts) < len(listed) or not (parts or option.multiple):
        raise InputError.of(rules.DEFAULT, place, value=value)
    return parts if option.multiple else ",".join(parts)


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


@click.group(
    cls=OrderedGroup,
    command_paths=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_HELP_WIDTH},
    epilog=EPILOG,
)
@click.version_option(__version__, "-V", "--version", prog_name="vexport")
def cli() -> None:
    """Quantize a Hugging Face model for vLLM, then prove that it loads and stays accurate.

    \b
    Start here:
      vexport demo
      vexport plan MODEL --scheme FP8_DYNAMIC
      vexport quantize MODEL OUT --scheme FP8_DYNAMIC
      vexport check OUT
      vexport load OUT
      vexport eval OUT --baseline MODEL --task gsm8k
      vexport run SCENARIO.yaml
    """
