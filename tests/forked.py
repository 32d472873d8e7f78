"""Fork processes that have already imported the modules of `quantize`.

The imports take seconds of processor time.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from vexport.cli.entry import run_command

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.forked",
        "vexport.quantize.plan_calibration",
        "transformers.models.llama.modeling_llama",
    ]
)


def command(*arguments: object) -> None:
    """Run a vexport command and end with its exit code."""
    sys.argv = ["vexport", *map(str, arguments)]
    sys.exit(run_command())


def start(
    log: Path,
    run: Callable[..., None],
    *arguments: object,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start a function in a forked process. Its output goes to `log`."""
    process = CONTEXT.Process(target=_run, args=(log, environment or {}, run, arguments))
    process.start()
    return process


def finish(process: BaseProcess, log: Path) -> str:
    """Return the output of a process, which must succeed."""
    process.join(300)
    text = log.read_text()
    assert process.exitcode == 0, text
    return text


def _run(
    log: Path,
    environment: Mapping[str, str],
    run: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    with log.open("wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    os.environ.update(environment)
    run(*arguments)
