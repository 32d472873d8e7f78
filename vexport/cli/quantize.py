"""Commands that write a checkpoint, `quantize` and `repair`, and the options that `plan` takes
too.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.base import command, given, note, print_text, progress_display
from vexport.cli.options import (
    PATH,
    POSITIVE,
    Answer,
    Count,
    Real,
    byte_size,
    format_option,
    option,
    overwrite_out_option,
    revision_option,
    stacked,
    switch,
    tp_option,
    trust_option,
)
from vexport.errors import CheckpointFailed, clip
from vexport.errors.extras import require_extra
from vexport.records import GroupSize, PlanRequest, RepairReport
from vexport.records.calibration import ROUNDINGS

if TYPE_CHECKING:
    from vexport.scenario import Calibration

PLAN_OPTIONS = tuple(field.name for field in fields(PlanRequest))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """Text that shows the inputs of the layers, and where they run."""

    calibration: str | None
    samples: int
    seq_len: int
    seed: int | None
    pack: bool | None
    all_experts: bool
    device: str | None

    @property
    def settings(self) -> "Calibration | None":
        """The calibration; None where no data were named."""
        return self.with_data(self.calibration) if self.calibration is not None else None

    def with_data(self, data: str) -> "Calibration":
        """The calibration on these data."""
        from vexport.scenario import Calibration

        keys = {name: getattr(self, name) for name in CALIBRATION_OPTIONS[1:]}
        return Calibration(data=data, **keys)


CALIBRATION_OPTIONS = tuple(field.name for field in fields(CalibrationOptions))


def given_options(*names: str) -> list[str]:
    """The given options of the running command among these parameters: `--seq-len`."""
    parameters = click.get_current_context().command.params
    return [each.opts[0] for each in parameters if each.name in names and given(each.name)]


def given_values(*names: str) -> list[str]:
    """The given options among these with their values, as words of another command line."""
    words: list[str] = []
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in names and given_options(parameter.name):
            value = context.params[parameter.name]
            if isinstance(value, bool):
                words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
            elif parameter.multiple:
                words += [word for item in value for word in (parameter.opts[0], str(item))]
            else:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words += [parameter.opts[0], text]
    return words


def require_scenario_alone() -> None:
    """Raise UsageError where options stand next to a scenario that decides the same."""
    extra = given_options(*PLAN_OPTIONS, *CALIBRATION_OPTIONS)
    if extra:
        raise click.UsageError(
            f"{', '.join(extra)} cannot be used with a scenario; set it in the scenario."
        )


def require_consistent(request: PlanRequest) -> None:
    """Raise UsageError unless one of scheme and recipe is given, and where options repeat a
    recipe.
    """
    if (request.scheme is None) == (request.recipe is None):
        raise click.UsageError("Name what to quantize to: --scheme S, or --recipe FILE.yaml.")
    extra = given_options("observer", "input_observer", "rounding", "group_size")
    if request.recipe is not None and extra:
        raise click.UsageError(
            f"{', '.join(extra)} cannot be used with --recipe, which says the same."
        )


def _group_size(text: str) -> GroupSize:
    """The number of columns that share a scale, or channel. A type for click."""
    from vexport.scenario import parse_group_size

    try:
        return parse_group_size(int(text) if text.lstrip("-").isdecimal() else text) or "channel"
    except ValueError as error:
        raise click.BadParameter(
            f"{clip(repr(text), 100)} is no group size; need {error}."
        ) from None


scheme_option = stacked(
    option("--scheme", "Scheme for all linear layers; see `vexport list schemes`.", metavar="S"),
    option("--recipe", "Recipe of llm-compressor in the place of a scheme.", PATH, "FILE.yaml"),
)
plan_options = stacked(
    option(
        "--group-size",
        "Columns that share a scale, or channel: a whole row.",
        _group_size,
        "N|channel",
    ),
    option(
        "--observer", "How weight ranges are found [default: what suits the rounding].", metavar="O"
    ),
    option(
        "--input-observer",
        "How static ranges of inputs are found [default: static_minmax].",
        metavar="O",
    ),
    option(
        "--rounding",
        "How weights are rounded [default: by bits and text].",
        click.Choice(ROUNDINGS),
    ),
    option(
        "--ignore",
        "Keep these layers: a name, its end, or re:REGEX; repeatable.",
        metavar="PATTERN",
        multiple=True,
    ),
    option(
        "--kv-cache", "Calibrate scales of an fp8 KV cache.", click.Choice(("fp8", "fp8_per_head"))
    ),
    option(
        "--smoothing",
        "How far large channels of inputs are scaled down [default: 0.5 for INT8 and 4-bit "
        "inputs where text "
        "is given, else 0].",
        Real(0, 1),
        "S",
    ),
    option(
        "--on-unsupported-shape",
        "Layers whose shape vLLM could not run.",
        click.Choice(("refuse", "keep", "smaller-group")),
        default="refuse",
        shown=True,
    ),
    tp_option,
)
calibration_options = stacked(
    option(
        "--calibration",
        "Text for rounding and static scales: a file, a folder, a data set of the hub "
        "(ORG/NAME:SPLIT:COLUMN), or default, which ships with vexport.",
        metavar="DATA",
    ),
    option("--samples", "Samples to use.", POSITIVE, default=128, shown=True),
    option("--seq-len", "Tokens of a sample to use.", POSITIVE, default=512, shown=True),
    option("--seed", "Choose rows at random, by this seed. [default: the first]", Count(0)),
    switch(
        "--pack",
        "Join rows into samples of --seq-len tokens, or take each row alone. [default: join "
        "text files]",
    ),
    switch(
        "--calibrate-all-experts all_experts",
        "Show every expert all tokens, or those routed to it.",
        default=True,
    ),
    option(
        "--device",
        "Where calibration runs: cpu, cuda, cuda:1 ... [default: cuda if there is one].",
        metavar="D",
    ),
)


@command()
@click.argument("source")
@click.argument("out", type=PATH)
@revision_option
@scheme_option
@plan_options
@calibration_options
@option(
    "--max-shard-size", "Largest file of weights.", byte_size, "SIZE", default="5GB", shown=True
)
@option(
    "--no-verify",
    "Leave out the dry load of OUT in vLLM, which takes about 10 seconds.",
    flag=True,
    envvar="VEXPORT_NO_VERIFY",
)
@overwrite_out_option
@trust_option
@format_option(("text", "json"))
def quantize(
    source: str,
    out: Path,
    revision: str | None,
    request: PlanRequest,
    calibration: CalibrationOptions,
    max_shard_size: int,
    no_verify: bool,
    overwrite: bool,
    trust_remote_code: bool,
    answer: Answer,
) -> None:
    """Quantize SOURCE, a folder or a hub id (ORG/NAME or ORG/NAME@REVISION), into the folder OUT.

    lm_head, embeddings, norms and routers are kept. Layers that vLLM fuses share their scales. OUT
    is written atomically; rerun an interrupted command to resume. Its config and names are checked
    first, and vLLM, where it is installed, loads it dry: what fails becomes OUT.failed.

    \b
    Examples:
      vexport quantize MODEL OUT --scheme FP8_DYNAMIC
      vexport quantize MODEL OUT --scheme NVFP4 --calibration chats.jsonl --samples 256
      vexport quantize MODEL OUT --recipe recipe.yaml
      vexport quantize MODEL OUT --scheme W4A16 --group-size 64 --ignore re:.*layers[.]0[.].*
    """
    require_extra("numba", "quantizing")
    from vexport.checkpoint.source import DEFAULT, with_revision
    from vexport.engine.gate import Prover
    from vexport.plan.source import requested, with_needed_text
    from vexport.quantize.answer import quantized_answer
    from vexport.quantize.job import QuantizeJob, quantize_source
    from vexport.reports.quantized import render_quantized

    is_first = (
        os.environ.get("RANK", "0") == "0"
    )  # of torchrun's ranks, or alone: the one that speaks
    tell: Callable[[str], None] = note if is_first else lambda text: None
    require_consistent(request)
    rules, settings = requested(request, (), tell, trust_remote_code=trust_remote_code)
    text, default = calibration.settings, calibration.with_data(DEFAULT)
    notes: list[str] = []
    rules, settings, text = with_needed_text(rules, settings, text, default, notes.append)

    def accepted() -> None:
        for line in notes:
            tell(line)

    with progress_display(quiet=answer.quiet or not is_first) as on_progress:
        job = QuantizeJob(
            source=with_revision(source, revision),
            out=out,
            rules=rules,
            planning=settings,
            calibration=text,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            shard_bytes=max_shard_size,
            prove=Prover(note=note, keeping=_keeping, dry=not no_verify).failure,
            on_progress=on_progress,
        )
        quantized = quantized_answer(str(out), *quantize_source(job, accepted))
    if is_first:
        for warning in quantized.warnings:
            click.echo(f"warning: {warning}", err=True)
        print_text(render_quantized(quantized, answer.format_))


def _keeping(patterns: Sequence[str]) -> str:
    """This command, with layers kept that it did not keep."""
    words = [word for pattern in patterns for word in ("--ignore", pattern)]
    return f"`{shlex.join(['vexport', *sys.argv[1:], *words])}`"


@command()
@click.argument("checkpoint", type=PATH)
@click.argument("out", type=PATH)
@option("--source", "The unquantized checkpoint, to compare the repaired values with.", PATH)
@overwrite_out_option
@format_option(("text", "json"))
def repair(
    checkpoint: Path, out: Path, source: Path | None, overwrite: bool, answer: Answer
) -> None:
    """Repair CHECKPOINT into OUT and report the error each fix adds.

    Needs no calibration. Repairs config.json (targets, ignore, arguments, refused keys), global
    scales that fused layers do not share or that are reciprocals, and missing KV scales. If
    something cannot be repaired, it is named and nothing is written: export the checkpoint again.

    With --source, all quantized weights of OUT are compared with the source's. Without it, `repair`
    reports what it assumes, and refuses a fault that has several explanations.

    \b
    Examples:
      vexport repair OUT REPAIRED
      vexport repair OUT REPAIRED --source MODEL
    """
    from vexport.repair import repair_checkpoint
    from vexport.reports.quantized import render_repair

    with progress_display(quiet=answer.quiet) as on_progress:
        report = repair_checkpoint(
            checkpoint, out, source, overwrite=overwrite, on_progress=on_progress
        )
    print_text(render_repair(report, answer.format_))
    if not report.ok:
        raise _not_repaired(report)


def _not_repaired(report: RepairReport) -> CheckpointFailed:
    """Return the first error that could not be repaired, and the number of the others."""
    first, others = report.refusals[0], len(report.refusals) - 1
    return CheckpointFailed(
        f"{report.checkpoint}: {first.where}",
        got=first.got,
        need=first.expected,
        fix=f"{first.fix} ({others:,} more)" if others else first.fix,
    )
