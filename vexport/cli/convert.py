"""How a checkpoint of another quantization method becomes one of compressed-tensors."""

from pathlib import Path

import click

from vexport.cli.base import command, print_text, require_ok
from vexport.cli.options import PATH, Answer, format_option


@command()
@click.argument("checkpoint", type=PATH)
@click.argument("out", type=PATH)
@click.option("--overwrite", is_flag=True, help="Replace OUT if vexport made it and nothing else is in it.")
@format_option(("text", "json"))
def convert(checkpoint: Path, out: Path, overwrite: bool, answer: Answer) -> None:
    """Convert CHECKPOINT (fp8, modelopt, gptq, awq) to compressed-tensors in OUT, without loss.

    Reads fp8, modelopt, gptq, awq, auto-round and quark. Needs no source and no calibration. Each layer is
    dequantized before and after, which must give the same values. If a layer cannot be converted, it is named
    and nothing is written.

    \b
    Examples:
      vexport convert deepseek-fp8 OUT
      vexport convert llama-gptq OUT --format json
    """
    from vexport.cli.terminal import progress_display
    from vexport.errors.extras import require_extra

    require_extra("torch", "convert")
    from vexport.repair.convert import convert_checkpoint, errors
    from vexport.reports.convert import render_convert

    with progress_display(quiet=answer.quiet) as on_progress:
        report = convert_checkpoint(checkpoint, out, overwrite=overwrite, on_progress=on_progress)
    print_text(render_convert(report, answer.format_))
    require_ok(report.checkpoint, report.ok, errors(report))
