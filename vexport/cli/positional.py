"""Advice for a call that gives the output folder with -o instead of as a positional argument.

Other tools write `-o OUT`. In vexport, -o is the file for a command's printed output.
"""

import shlex
from collections.abc import Sequence

import click

# Names of the arguments for an output folder.
FOLDERS = ("out", "folder")
OPTIONS = ("-o", "--output")


def folder_advice(command: click.Command, ctx: click.Context, words: Sequence[str]) -> str | None:
    """Return an error text with the corrected call, or None if the call has another mistake.

    The advice is for calls with -o or --output but without the output folder. `words` are the words
    after the command's name on the command line.
    """
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    folder = next((each for each in arguments if each.name in FOLDERS), None)
    others, value = _without_output(words)
    if folder is None or value is None:
        return None
    try:
        given, _, _ = command.make_parser(ctx).parse_args(list(others))
    except click.UsageError:
        return None
    if isinstance(given.get(str(folder.name)), str):
        return None
    corrected = list(others)
    position = 0
    for argument in arguments[: arguments.index(folder)]:
        word = given.get(str(argument.name))
        if not isinstance(word, str):
            return None
        position = corrected.index(word) + 1
    corrected.insert(position, value)
    call = shlex.join([*ctx.command_path.split(), *corrected])
    name = folder.make_metavar(ctx).strip("[]")
    has_output = any(option in each.opts for each in command.params for option in OPTIONS)
    purpose = "; -o is the file for what the command prints" if has_output else ""
    return f"{name} is a positional argument{purpose}. Call `{call}`."


def _without_output(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Split words into the words without -o or --output, and the value of this option.

    The value is None if the option is not among the words.
    """
    others: list[str] = []
    value: str | None = None
    remaining = iter(words)
    for word in remaining:
        name, sign, inline = word.partition("=")
        if name in OPTIONS:
            value = inline if sign else next(remaining, None)
        elif word.startswith("-o"):
            value = word.removeprefix("-o")
        else:
            others.append(word)
    return others, value
