"""What vexport knows."""

from inspect import cleandoc
from typing import TYPE_CHECKING

import click

from vexport.cli.base import command, print_text
from vexport.cli.completion import complete_topic
from vexport.cli.options import Answer, format_option
from vexport.errors import InputError

if TYPE_CHECKING:
    from vexport.explain import Entry


@command("list", no_args_is_help=True)
@click.argument(
    "what", type=click.Choice(("schemes", "observers", "roundings", "calibration", "checks", "architectures"))
)
@format_option(("text", "json"))
def list_command(what: str, answer: Answer) -> None:
    """List schemes, observers, roundings, calibration data, checks or architectures.

    \b
    Examples:
      vexport list schemes
      vexport list checks --format json
    """
    from vexport.explain.catalog import render_catalog

    print_text(render_catalog(what, answer.format_))


@command("explain", takes_options=True)
@click.argument("name", required=False, nargs=-1, shell_complete=complete_topic)
@format_option(("text", "json"))
def explain_command(name: tuple[str, ...], answer: Answer) -> None:
    """Explain a scheme, observer, check, finding, option, scenario key or topic.

    NAME is what a report, message or list calls it, in any case. Without NAME: all that can be explained.

    \b
    Examples:
      vexport explain
      vexport explain NVFP4
      vexport explain completeness
      vexport explain margin
    """
    from vexport.explain import render_entry, render_topics

    print_text(
        render_entry(_entry(" ".join(name)), answer.format_) if name else render_topics(answer.format_)
    )


def _entry(name: str) -> "Entry":
    """What the pages say of a name, else the help of a command or an option; InputError without any."""
    from vexport.explain import KEY, explain

    option = _of_command_line(name)
    try:
        entry = explain(name)
    except InputError:
        if option is None:
            raise
        return option
    # `--limit` is a key of a scenario too; who types dashes asks for the option.
    return option if option and name.startswith("-") and entry.kind == KEY else entry


def _of_command_line(name: str) -> "Entry | None":
    """A command's help, or that of an option in each command that has it, said once where it is the same."""
    from vexport.explain import Entry

    context = click.get_current_context().find_root()
    assert isinstance(context.command, click.Group)
    commands = context.command.commands
    if name in commands:
        text = cleandoc(commands[name].help or "").partition("\b")[0] + f"See `vexport {name} --help`."
        return Entry(name=name, title=name, kind="command", page="", facts={}, text=text)
    spelled = name if name.startswith("-") else f"--{name.replace('_', '-').replace(' ', '-').lower()}"
    helps: dict[str, list[str]] = {}
    for command_name, each in commands.items():
        for option in each.params:
            if (
                isinstance(option, click.Option)
                and not option.hidden
                and spelled in (*option.opts, *option.secondary_opts)
            ):
                helps.setdefault(option.help or "", []).append(command_name)
    if not helps:
        return None
    said = "\n\n".join(f"{', '.join(where)}: {text}" for text, where in helps.items())
    return Entry(name=spelled, title=spelled, kind="option", page="", facts={}, text=said)
