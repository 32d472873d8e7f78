"""A first scenario to run."""

import shlex
from pathlib import Path

import click

from vexport.cli.base import command, print_text
from vexport.cli.options import PATH


@command()
@click.argument("folder", metavar="[DIR]", type=PATH, default="vexport-demo")
@click.option("--overwrite", is_flag=True, help="Replace DIR if it holds a demo.")
def demo(folder: Path, overwrite: bool, quiet: bool) -> None:
    """Write a small model and scenarios to try it with into DIR.

    DIR is vexport-demo unless given. The model has 2 M parameters; its calibration data and its lm-eval tasks
    come with it, so that nothing is downloaded. The answer names the next command.

    \b
    Examples:
      vexport demo
      vexport demo /tmp/demo --overwrite
    """
    from vexport.errors.extras import fix, is_installed
    from vexport.scenario.demo import write_demo

    first = shlex.quote(str(write_demo(folder, overwrite=overwrite)))
    lines = [f"{folder}: the demo's scenarios, model, calibration data and tasks"]
    if is_installed("vllm"):
        lines.append(f"next: vexport run {first}")
    else:
        lines.append(f"next: vexport plan {first}")
        lines.append(f"then: vexport run {first}, which needs vLLM; {fix('vllm')}")
    print_text("\n".join(lines))
