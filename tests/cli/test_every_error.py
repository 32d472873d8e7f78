"""Every option of every command, as click lists them, with wrong values: one line, never a traceback."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.command import vexport
from vexport.cli.entry import cli

# Empty, negative, huge, of another kind, a path that cannot be, and what a terminal would obey.
WRONG = ("", "-1", "9" * 5000, "nonsense", "/dev/null/x", "\x1b[2J\nerror: forged")
# What makes a folder that it is told to, rather than reading one.
MAKES = ("demo",)


def commands(
    group: click.Group = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that is no group, with the words that call it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        elif name not in MAKES:
            yield (*path, name), command


COMMANDS = dict(commands())


def calls(command: click.Command) -> Iterator[list[str]]:
    """Its options, each alone, with each wrong value; flags as they are."""
    for parameter in command.params:
        if not isinstance(parameter, click.Option) or parameter.name == "help":
            continue
        if parameter.is_flag:
            yield [parameter.opts[0]]
        else:
            yield from (
                [f"{parameter.opts[-1]}={value}"] for value in WRONG if parameter.opts[-1].startswith("--")
            )


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_wrong_values_and_missing_inputs_are_one_line(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = COMMANDS[words]
    missing = str(tmp_path / "missing")
    inputs = [missing for parameter in command.params if isinstance(parameter, click.Argument)]
    for options in ([], *calls(command)):
        ran = vexport(*words, *inputs, *options)
        told = f"{' '.join([*words, *options])[:200]!r}: {ran}"
        # An interpreter that is none is a fault of the environment.
        assert ran.code == 2 or (ran.code, options[0][:13]) == (4, "--vllm-python"), told
        assert ran.stdout == "" or "--format" in options[0], told
        assert ran.errors, told
        assert "Traceback" not in ran.stderr or "--debug" in options, told
        assert "internal error" not in ran.stderr, told
        assert not re.search(r"is not a valid (n|\w+ range|integer|float)\b", ran.stderr), told
        assert "\x1b[2J" not in ran.stderr, told
        assert "\nerror: forged" not in ran.stderr, told
        assert max(map(len, ran.stderr.splitlines())) < 1000, told


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_no_number_is_within_any_range(value: str, tmp_path: Path) -> None:
    """Comparisons with NaN are false, so that ranges alone would take it."""
    options = {
        (*words, f"{option.opts[-1]}={value}")
        for words, command in COMMANDS.items()
        for option in command.params
        if isinstance(option.type, click.types.FloatParamType)
    }
    assert len(options) > 4
    for *words, option in sorted(options):
        inputs = [str(tmp_path) for one in COMMANDS[tuple(words)].params if isinstance(one, click.Argument)]
        ran = vexport(*words, *inputs, option)
        assert ran.code == 2
        assert f"Invalid value for '{option.partition('=')[0]}'" in ran.stderr


def test_no_count_is_beyond_what_clocks_and_loops_take(tmp_path: Path) -> None:
    options = {
        (*words, option.opts[-1])
        for words, command in COMMANDS.items()
        for option in command.params
        if isinstance(option.type, click.types.IntParamType) and isinstance(option, click.Option)
    }
    assert len(options) > 10
    for *words, option in sorted(options):
        inputs = [str(tmp_path) for one in COMMANDS[tuple(words)].params if isinstance(one, click.Argument)]
        ran = vexport(*words, *inputs, f"{option}={10**30}")
        assert ran.code == 2
        assert f"{option}': '{10**30}' is more than" in ran.stderr
