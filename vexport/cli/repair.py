"""How a checkpoint is repaired, and in what two differ."""

from pathlib import Path

import click

from vexport.cli.base import command, is_read, print_text, require_ok
from vexport.cli.options import PATH, Answer, format_option
from vexport.errors import CheckpointFailed


@command()
@click.argument("checkpoint", type=PATH)
@click.argument("out", type=PATH)
@click.option("--source", type=PATH, help="The unquantized checkpoint that CHECKPOINT was made from.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if vexport made it and nothing else is in it.")
@format_option(("text", "json"))
def repair(checkpoint: Path, out: Path, source: Path | None, overwrite: bool, answer: Answer) -> None:
    """Repair CHECKPOINT into OUT and report the error each fix adds.

    Needs no calibration. Repairs global scales, targets and ignore, refused config keys, dtypes and shapes,
    the index, missing KV scales; with --source also missing tensors. If something cannot be repaired, it is
    named and nothing is written.

    \b
    Examples:
      vexport repair OUT REPAIRED
      vexport repair OUT REPAIRED --source MODEL
    """
    from vexport.cli.terminal import progress_display
    from vexport.repair import repair_checkpoint
    from vexport.reports.repair import render_repair

    with progress_display(quiet=answer.quiet) as on_progress:
        report = repair_checkpoint(checkpoint, out, source, overwrite=overwrite, on_progress=on_progress)
    print_text(render_repair(report, answer.format_))
    require_ok(report.checkpoint, report.ok, report.refusals)


@command("diff")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@format_option(("text", "json"))
def diff_command(a: Path, b: Path, answer: Answer) -> None:
    """Compare two checkpoints: config, tensors, values, sizes.

    Layers are compared dequantized, also a quantized one with its source. Exit code 1 where they differ.

    \b
    Examples:
      vexport diff OUT REPAIRED
      vexport diff MODEL OUT --format json
    """
    from vexport.cli.terminal import progress_display
    from vexport.fidelity.diff import diff
    from vexport.reports.diff import render_diff

    with progress_display(quiet=answer.quiet) as on_progress:
        report = diff(a, b, on_progress=lambda done, total: on_progress("compare", done, total))
    print_text(render_diff(report, answer.format_))
    if not report.same:
        fix = "see the differences above" if is_read() else "see the differences in the answer"
        raise CheckpointFailed(str(b), got="other contents", need=f"those of {a}", fix=fix)
