"""Repairs a checkpoint without calibration."""

from pathlib import Path

import click

from vexport.cli.base import command, print_text, require_ok
from vexport.cli.options import PATH, Answer, format_option


@command()
@click.argument("checkpoint", type=PATH)
@click.argument("out", type=PATH)
@click.option(
    "--source",
    type=PATH,
    help="The unquantized checkpoint: quantize from it what rescaling would round twice.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if vexport made it and nothing else is in it.")
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
    from vexport.cli.terminal import progress_display
    from vexport.repair import repair_checkpoint
    from vexport.reports.quantized import render_repair

    with progress_display(quiet=answer.quiet) as on_progress:
        report = repair_checkpoint(checkpoint, out, source, overwrite=overwrite, on_progress=on_progress)
    print_text(render_repair(report, answer.format_))
    require_ok(report.checkpoint, report.ok, report.refusals)
