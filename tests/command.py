"""Calls of vexport commands in this process, with the same results as in a shell."""

import contextlib
import io
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import click

from vexport.cli.entry import cli, run_command
from vexport.engine.loader_check import CONTRADICTION

ROOT = Path(__file__).parent.parent
ALL_COMMANDS: dict[str, click.Command] = {
    name: command
    for name in cli.command_paths
    if (command := cli.get_command(click.Context(cli), name))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]


def vexport(*arguments: object) -> Ran:
    """Run a command, and return its exit code and output.

    Fails if vLLM's loaders contradict an error of the static check. The command's log handler is
    removed, because it would print the log of later tests.
    """
    out, err = io.StringIO(), io.StringIO()
    logger = logging.getLogger("vexport")
    handlers = list(logger.handlers)
    with (
        patch.object(sys, "argv", ["vexport", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run_command()
    logger.handlers = handlers
    # A rule that calls refused what vLLM's loaders load is wrong.
    assert CONTRADICTION not in out.getvalue()
    return Ran(code=code, stdout=out.getvalue(), stderr=err.getvalue())


def findings(checkpoint: Path, *options: object) -> list[dict[str, str]]:
    """Return all findings of `vexport check` on a checkpoint."""
    ran = vexport("check", checkpoint, *options, "--format", "json", "--quiet")
    assert ran.stdout, ran.stderr
    (report,) = json.loads(ran.stdout)
    assert ran.code == (0 if report["ok"] else 1)
    found: list[dict[str, str]] = report["findings"]
    return found
