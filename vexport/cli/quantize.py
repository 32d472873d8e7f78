"""Commands that write a checkpoint (`quantize`, `repair`), and options shared with `plan`."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from vexport.cli.base import command, note, print_text, progress_display, text_width
from vexport.cli.options import (
    PATH,
    OutputOptions,
    byte_size,
    format_option,
    numbers,
    option,
    overwrite_out_option,
    trust_option,
)
from vexport.cli.settings import Syntax, given_settings, setting_options
from vexport.errors import CheckpointFailed, EnvironmentFault, InputError
from vexport.errors.extras import require_extra
from vexport.names import SourceRef, parse_source
from vexport.records import GroupSize
from vexport.rules import usage as rules
from vexport.words import clip


def require_consistent(section: str) -> None:
    """Raise InputError unless exactly one of --scheme and --recipe is given.

    Also raise InputError for settings that contradict a recipe, such as --observer. They may be
    from a file of defaults.
    """
    settings = given_settings(section)
    if ("scheme" in settings) == ("recipe" in settings):
        needed = "either --scheme S or --recipe FILE.yaml"
        raise InputError.of(rules.REQUIRED, f"vexport {section}", needed=needed)
    of_scheme = ("observer", "input_observer", "rounding", "group_size")
    extra = [f"--{key.replace('_', '-')}" for key in of_scheme if key in settings]
    if "recipe" in settings and extra:
        remedy = "set it in the recipe"
        raise InputError.of(rules.EXCLUDED, ", ".join(extra), other="--recipe", remedy=remedy)


def _group_size(text: str) -> GroupSize:
    """Parse a group size: a number of columns, or `channel`. A type for click."""
    from vexport.scenario import parse_group_size

    try:
        return parse_group_size(int(text) if text.lstrip("-").isdecimal() else text) or "channel"
    except ValueError as error:
        raise click.BadParameter(
            f"{clip(repr(text), 100)} is not a group size; use {error}."
        ) from None


SYNTAXES: Mapping[str, Syntax] = {
    "group_size": Syntax(whole=_group_size),
    "tp": Syntax(whole=numbers),
}


@command()
@click.argument("source", type=parse_source)
@click.argument("out", type=PATH)
@setting_options("quantize", {**SYNTAXES, "max_shard_size": Syntax(whole=byte_size)})
@setting_options("calibration")
@option(
    "--no-verify",
    "Do not verify OUT with vLLM's loaders (saves about 10 seconds).",
    flag=True,
    envvar="VEXPORT_NO_VERIFY",
)
@overwrite_out_option
@trust_option
@format_option(("text", "json"))
def quantize(
    source: SourceRef,
    out: Path,
    no_verify: bool,
    overwrite: bool,
    trust_remote_code: bool,
    output: OutputOptions,
) -> None:
    """Quantize SOURCE and write the checkpoint to the folder OUT.

    SOURCE is a folder or a hub id (ORG/NAME or ORG/NAME@REVISION). lm_head, embeddings, norms and
    routers stay unquantized. Layers that vLLM fuses share their scales. OUT appears when it is
    complete and has passed the static check and, if vLLM is installed, a dry load. A checkpoint
    that fails is kept as OUT.failed. If the command is interrupted, run it again to resume.

    \b
    Examples:
      vexport quantize MODEL OUT --scheme FP8_DYNAMIC
      vexport quantize MODEL OUT --scheme NVFP4 --calibration chats.jsonl --samples 256
      vexport quantize MODEL OUT --recipe recipe.yaml
      vexport quantize MODEL OUT --scheme W4A16 --group-size 64 --ignore re:.*layers[.]0[.].*
    """
    require_extra("numba", "quantizing")
    require_consistent("quantize")
    # Under torchrun, only the first rank prints.
    is_first = os.environ.get("RANK", "0") == "0"
    text = given_settings("calibration")
    with progress_display(quiet=output.quiet or not is_first, reads=[source]) as on_progress:
        from vexport.api import Calibration
        from vexport.api import quantize as api_quantize
        from vexport.checkpoint.source import DEFAULT
        from vexport.reports.quantized import render_quantized
        from vexport.scenario import problems_at

        with problems_at("calibration"):
            default = Calibration.model_validate({"data": DEFAULT, **text})
        quantized = api_quantize(
            source,
            out,
            **given_settings("quantize"),
            calibration=default if "data" in text else None,
            default_calibration=default,
            verify=not no_verify,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            how_to_keep=_command_that_keeps,
            on_note=note if is_first else _ignore_note,
            on_progress=on_progress,
        )
    if is_first:
        for warning in quantized.warnings:
            click.echo(f"warning: {warning}", err=True)
        print_text(render_quantized(quantized, output.format_, text_width()))


def _ignore_note(text: str) -> None:
    """Print nothing."""


def _command_that_keeps(patterns: Sequence[str]) -> str:
    """Return the current command line in backticks, with --ignore added for each pattern."""
    words = [word for pattern in patterns for word in ("--ignore", pattern)]
    return f"`{shlex.join(['vexport', *sys.argv[1:], *words])}`"


@command()
@click.argument("checkpoint", type=PATH)
@click.argument("out", type=PATH)
@option(
    "--source",
    "Unquantized checkpoint to compare the repaired weights with.",
    PATH,
    heading="Comparison",
)
@overwrite_out_option
@format_option(("text", "json"))
def repair(
    checkpoint: Path, out: Path, source: Path | None, overwrite: bool, output: OutputOptions
) -> None:
    """Repair CHECKPOINT, write the result to OUT, and report how far each fix moves the weights.

    No calibration is needed. Repairs config.json (targets, ignore, arguments, refused keys), global
    scales that differ between fused layers or are stored as reciprocals, and missing KV scales. If
    a fault cannot be repaired, the output names it and OUT is not written. In this case, export the
    checkpoint again.

    With --source, all quantized weights of OUT are compared with the weights of SOURCE. Without it,
    the output lists the assumptions, and a fault with several explanations is not repaired.

    \b
    Examples:
      vexport repair OUT REPAIRED
      vexport repair OUT REPAIRED --source MODEL
    """
    with progress_display(quiet=output.quiet, reads=[str(checkpoint)]) as on_progress:
        from vexport.api import repair as api_repair
        from vexport.checks import INTERNAL
        from vexport.reports.quantized import render_repair

        report = api_repair(
            checkpoint, out, source=source, overwrite=overwrite, on_progress=on_progress
        )
    print_text(render_repair(report, output.format_))
    for each in report.refusals:
        if each.check == INTERNAL:
            raise each.error(EnvironmentFault, each.where)
    if not report.ok:
        first, *others = report.refusals
        where = f"{report.checkpoint}: {first.where}"
        raise first.error(CheckpointFailed, where, others=len(others))
