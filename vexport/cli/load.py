"""The command `load`: load checkpoints in a real engine, or test loading with headers only."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import click

from vexport.cli.base import (
    add_step_summary,
    command,
    print_text,
    progress_display,
    require_compared,
    require_loaded,
    text_width,
)
from vexport.cli.engine import Session, engine_arg_option, interpreters_option, session_options
from vexport.cli.options import (
    PATH,
    OutputOptions,
    device_options,
    format_option,
    given,
    gpu_option,
    option,
    overwrite_run_option,
    speculative_option,
)
from vexport.errors import InputError, VexportError
from vexport.errors.extras import raise_problems
from vexport.names import SourceRef, parse_source, user_path
from vexport.records import EngineMode
from vexport.rules import usage as rules

if TYPE_CHECKING:
    from vexport.formats.gpus import Card

Mode = Literal["eager", "default", "both"]
# Parameters that --log does not take.
_NOT_WITH_LOG = {
    "dry": "--dry",
    "tp": "--tp",
    "speculative": "--speculative",
    "mode": "--mode",
    "run_dir": "--run-dir",
    "overwrite": "--overwrite",
    "every": "--all",
    "canaries": "--canaries",
}
# Parameters that --log takes only with a checkpoint.
_FOR_COMPARISON = {"sm": "--sm", "cards": "--gpu", "vllm_python": "--vllm-python"}


@command()
@click.argument("checkpoints", metavar="[CHECKPOINT...]", nargs=-1, type=parse_source)
@option("--dry", "Only test loading, from headers: no weights, no GPU.", heading="vLLM", flag=True)
@option(
    "--log",
    "Compare CHECKPOINT with a server's start-up log (a file, or - for the standard input) or with "
    "a running server. Without CHECKPOINT, show what it states.",
    click.STRING,
    "FILE|-|URL",
    heading="vLLM",
)
@device_options
@gpu_option
@speculative_option
@interpreters_option
@option(
    "--mode",
    "Run the model in mode eager, default (compiled if the platform supports it; a CPU needs a C++ "
    "compiler), or both.",
    click.Choice(("eager", "default", "both")),
    heading="vLLM",
    default="eager",
    shown=True,
)
@engine_arg_option
@session_options
@option(
    "--run-dir",
    "Write a report to DIR, from which a second call resumes [default: no report].",
    PATH,
    "DIR",
    heading="Output",
)
@overwrite_run_option
@option(
    "--all every",
    "With --dry: list every finding, with vLLM's messages in full.",
    heading="Output",
    flag=True,
)
@format_option()
def load(
    checkpoints: tuple[SourceRef, ...],
    dry: bool,
    log: str | None,
    tp: tuple[int, ...] | None,
    sm: tuple[int, ...] | None,
    cards: tuple["Card", ...] | None,
    speculative: str,
    vllm_python: tuple[Path, ...],
    trust_remote_code: bool,
    mode: Mode,
    session: Session,
    run_dir: Path | None,
    overwrite: bool,
    every: bool,
    output: OutputOptions,
) -> None:
    """Load each CHECKPOINT in vLLM and compare its output with a reference.

    The reference is the model in transformers, with the weights dequantized by compressed-tensors.
    vLLM also generates 200 tokens for each test prompt (canary). vexport reports NaN and infinity,
    empty text, repetition and text in another script. One engine is started for each --tp, on as
    many devices.

    With --dry, vLLM's model class and weight loaders run on headers only, for every --tp and --sm.
    The output shows refused checkpoints, parameters that no tensor fills, tensors that vLLM casts
    or cuts, the kernel of each layer, and the memory of each rank. Without --sm, the results are
    for SM 80, 89, 90 and 100, and each --tp must load on at least one of them.

    With --log, no engine starts. The version, arguments, kernels, dtypes and lengths of a server
    are compared with a dry load. --gpu names its GPU.

    \b
    Examples:
      vexport load OUT
      docker logs SERVER 2>&1 | vexport load OUT --log - --gpu H100
      vexport load OUT --dry --tp 1,2,4,8 --sm 80,90,100
      vexport load OUT SOURCE --dry --gpu H100,L40S
      vexport load OUT --mode both --vllm-python old/bin/python --vllm-python new/bin/python
    """
    from vexport import api
    from vexport.reports import render_loads, render_startup_log, summarize_loads

    if log is not None:
        _require_log_options(checkpoints, session)
        if not checkpoints:
            print_text(
                render_startup_log(
                    api.startup_log(*_opened(log)), output.format_, width=text_width()
                )
            )
            return
        engine = api.Engine(
            serve=session.serve(None),
            vllm_python=vllm_python[0] if vllm_python else None,
            trust_remote_code=trust_remote_code,
        )
        with progress_display(quiet=output.quiet, reads=checkpoints) as on_progress:
            compared = api.load_with_log(
                checkpoints[0],
                *_opened(log),
                sm=sm,
                gpu=[card.name for card in cards or ()],
                engine=engine,
                on_progress=on_progress,
            )
        print_text(render_loads([compared], output.format_, width=text_width()))
        if output.format_ == "github":
            add_step_summary(summarize_loads([compared]))
        require_loaded([compared])
        require_compared(compared)
        return
    if not checkpoints:
        raise InputError.of(rules.REQUIRED, "vexport load", needed="a CHECKPOINT, or --log FILE")
    _require_consistent(dry, mode, session)
    _require_run_dir(dry, run_dir, overwrite)
    sizes = tp if tp and given("tp") and not dry else (None,)
    engines = [
        api.Engine(
            serve=session.serve(size), vllm_python=python, trust_remote_code=trust_remote_code
        )
        for python in vllm_python or (None,)
        for size in sizes
    ]
    modes: Sequence[EngineMode] = ("eager", "default") if mode == "both" else (mode,)
    problems: list[VexportError] = []
    with progress_display(quiet=output.quiet, reads=checkpoints) as on_progress:
        reports = api.load_all(
            checkpoints,
            dry=dry,
            tp=tp if dry and tp else (1,),
            sm=sm,
            gpu=[card.name for card in cards or ()],
            speculative=speculative,
            modes=modes,
            engines=engines,
            run_dir=run_dir,
            overwrite=overwrite,
            on_problem=problems.append,
            on_progress=on_progress,
        )
    print_text(render_loads(reports, output.format_, every=every, width=text_width()))
    if output.format_ == "github":
        add_step_summary(summarize_loads(reports))
    for page in _pages(run_dir):
        click.echo(f"report: {page}", err=output.format_ != "text")
    raise_problems(problems)
    require_loaded(reports)


def _opened(log: str) -> "tuple[str | Path | BinaryIO, str]":
    """Return the file, stream or address of --log, and its name in reports."""
    if log == "-":
        return sys.stdin.buffer, "standard input"
    if log.startswith(("http://", "https://")):
        return log, log
    return user_path(Path(log)), log


def _require_log_options(checkpoints: tuple[SourceRef, ...], session: Session) -> None:
    for key, name in _NOT_WITH_LOG.items():
        if given(key):
            remedy = "remove it: the log states how the server runs"
            raise InputError.of(rules.EXCLUDED, name, other="--log", remedy=remedy)
    if len(checkpoints) > 1 or len(click.get_current_context().params["vllm_python"]) > 1:
        needed = "at most one CHECKPOINT and one --vllm-python"
        raise InputError.of(rules.REQUIRED, "--log", needed=needed)
    for key, name in _FOR_COMPARISON.items():
        if not checkpoints and given(key):
            raise InputError.of(rules.NEEDS_OPTION, name, other="a CHECKPOINT next to --log")
    _require_dry_arguments(session)


def _require_consistent(dry: bool, mode: Mode, session: Session) -> None:
    for parameter, name in (("sm", "--sm"), ("cards", "--gpu"), ("speculative", "--speculative")):
        if not dry and given(parameter):
            raise InputError.of(rules.NEEDS_OPTION, name, other="--dry")
    if dry and (session.canaries is not None or mode != "eager"):
        remedy = "remove --dry, which starts no engine"
        raise InputError.of(rules.EXCLUDED, "--canaries and --mode", other="--dry", remedy=remedy)
    if dry:
        _require_dry_arguments(session)
    if "enforce_eager" in session.engine_args:
        needed = "--mode in its place, which has the same meaning"
        raise InputError.of(rules.REQUIRED, "--engine-arg enforce_eager", needed=needed)


def _require_dry_arguments(session: Session) -> None:
    from vexport.engine.dry.load import NOT_DRY

    for name in NOT_DRY.keys() & session.engine_args.keys():
        where = f"--engine-arg {name}"
        raise InputError.of(rules.EXCLUDED, where, other="--dry", remedy=NOT_DRY[name])


def _pages(run_dir: Path | None) -> list[Path]:
    """Return the report pages in a run directory: one page, or one page per numbered folder."""
    if run_dir is None:
        return []
    return sorted([*run_dir.glob("report.html"), *run_dir.glob("*/report.html")])


def _require_run_dir(dry: bool, run_dir: Path | None, overwrite: bool) -> None:
    if dry and run_dir is not None:
        remedy = "remove one of the two: a dry load starts no engine"
        raise InputError.of(rules.EXCLUDED, "--run-dir", other="--dry", remedy=remedy)
    if overwrite and run_dir is None:
        raise InputError.of(rules.NEEDS_OPTION, "--overwrite", other="--run-dir")
