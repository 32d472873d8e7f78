"""Commands that write a checkpoint: `quantize` and `repair`."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from vexport.cli.base import command, note, print_text, progress_display, require_ok
from vexport.cli.options import (
    PATH,
    Answer,
    byte_size,
    format_option,
    option,
    overwrite_out_option,
    revision_option,
    trust_option,
)
from vexport.cli.planning import (
    CalibrationOptions,
    calibration_options,
    note_estimate,
    plan_options,
    require_consistent,
    scheme_option,
)
from vexport.errors.extras import require_extra
from vexport.records import Plan, PlanRequest


@command()
@click.argument("source")
@click.argument("out", type=PATH)
@revision_option
@scheme_option
@plan_options
@calibration_options
@option("--max-shard-size", "Largest file of weights.", byte_size, "SIZE", default="5GB", shown=True)
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

    lm_head, embeddings, norms and routers are kept. Layers that vLLM fuses share their scales. OUT is written
    atomically; rerun an interrupted command to resume. Its config and names are checked first, and vLLM,
    where it is installed, loads it dry: what fails becomes OUT.failed.

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
    from vexport.plan.source import default_text_note, requested, with_needed_text
    from vexport.quantize.job import QuantizeJob, quantize_source
    from vexport.quantize.text import Step
    from vexport.reports.quantized import quantized_answer, render_quantized

    is_first = os.environ.get("RANK", "0") == "0"  # of torchrun's ranks, or alone: the one that speaks
    require_consistent(request)
    rules, settings = requested(request, (), note)
    rules, settings, text = with_needed_text(
        rules, settings, calibration.settings, calibration.with_data(DEFAULT)
    )
    is_default = text is not None and calibration.calibration is None

    def notes(plan: Plan) -> None:
        if is_default and is_first:
            note(default_text_note(rules))

    def estimated(steps: tuple[Step, ...]) -> None:
        if is_first:
            note_estimate("default" if is_default else "this", steps)

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
            prove=Prover(
                out=out,
                tp=tuple(settings.ranks),
                dry=not no_verify,
                trust_remote_code=trust_remote_code,
                note=note,
                keeping=_keeping,
                on_progress=on_progress,
            ).failure,
            on_progress=on_progress,
            on_estimate=estimated,
        )
        quantized = quantized_answer(str(out), *quantize_source(job, notes))
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
@option("--source", "The unquantized checkpoint: quantize from it what rescaling would round twice.", PATH)
@overwrite_out_option
@format_option(("text", "json"))
def repair(checkpoint: Path, out: Path, source: Path | None, overwrite: bool, answer: Answer) -> None:
    """Repair CHECKPOINT into OUT and report the error each fix adds.

    Needs no calibration. Repairs config.json (targets, ignore, arguments, refused keys), global scales that
    fused layers do not share or that are reciprocals, and missing KV scales. If something cannot be repaired,
    it is named and nothing is written: export the checkpoint again.

    \b
    Examples:
      vexport repair OUT REPAIRED
      vexport repair OUT REPAIRED --source MODEL
    """
    from vexport.repair import repair_checkpoint
    from vexport.reports.quantized import render_repair

    with progress_display(quiet=answer.quiet) as on_progress:
        report = repair_checkpoint(checkpoint, out, source, overwrite=overwrite, on_progress=on_progress)
    print_text(render_repair(report, answer.format_))
    require_ok(report.checkpoint, report.ok, report.refusals)
