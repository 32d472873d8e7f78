"""Commands that messages recommend exist, with the options that they name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import vexport
from vexport.cli.entry import cli

PACKAGE = Path(vexport.__file__).parent
COMMAND = re.compile(r"`vexport ([a-z]+)([^`]*)`")
OPTION = re.compile(r"--[a-z][a-z-]*")


def _texts(file: Path) -> Iterator[str]:
    """Yield the strings of a file without docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    # Docstrings are expressions that are statements by themselves.
    statements = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if node in statements or not isinstance(node, ast.Constant):
            continue
        if isinstance(node.value, str):
            yield node.value


RECOMMENDED = sorted(
    {
        match[0]
        for file in PACKAGE.rglob("*.py")
        for text in _texts(file)
        for match in COMMAND.finditer(text)
    }
)


def test_messages_recommend_commands() -> None:
    assert "`vexport load CHECKPOINT --dry --vllm-python PATH`" in RECOMMENDED
    assert len(RECOMMENDED) > 5


@pytest.mark.parametrize("command", RECOMMENDED)
def test_recommended_command_exists(command: str) -> None:
    match = COMMAND.fullmatch(command)
    assert match is not None
    context = click.Context(cli)
    known = cli.get_command(context, match[1])
    assert known is not None
    options = {name for parameter in known.get_params(context) for name in parameter.opts}
    options |= {
        name for parameter in known.get_params(context) for name in parameter.secondary_opts
    }
    assert {*OPTION.findall(match[2])} <= options
