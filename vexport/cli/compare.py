"""Several schemes of one model on one page."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.base import command, is_read, print_text
from vexport.cli.effects import with_default_text
from vexport.cli.engine import Interpreter, interpreter_option
from vexport.cli.options import PATH, Answer, format_option, server_options
from vexport.errors import CheckpointFailed, Inconclusive
from vexport.errors.extras import raise_problems

if TYPE_CHECKING:
    from vexport.formats.gpus import Card
    from vexport.scenario import Scenario
    from vexport.types import SchemeComparison


def _schemes(text: str) -> tuple[str, ...]:
    """Names of schemes separated by commas, each once. A type for click."""
    from vexport.formats.schemes import get_scheme, scheme_name

    parts = [part.strip() for part in text.split(",") if part.strip()]
    return tuple(dict.fromkeys(get_scheme(scheme_name(part)).name for part in parts))


@command()
@click.argument("source", metavar="SOURCE")
@click.option(
    "--schemes", type=_schemes, metavar="A,B,...", required=True, help="Schemes; see `vexport list schemes`."
)
@click.option(
    "--scenario",
    "scenario_file",
    type=PATH,
    metavar="FILE",
    help="Its rules, with each scheme in turn, its calibration, tasks and settings.",
)
@server_options(required=False)
@click.option("--run-dir", type=PATH, help="Where everything goes [default: runs/compare-NAME].")
@click.option("--overwrite", is_flag=True, help="Start again in a run directory that exists.")
@interpreter_option
@format_option(("text", "json", "html", "markdown"))
def compare(
    source: str,
    schemes: tuple[str, ...],
    scenario_file: Path | None,
    card: "Card | None",
    tp: int,
    context: int,
    run_dir: Path | None,
    overwrite: bool,
    interpreter: Interpreter,
    answer: Answer,
) -> None:
    """Quantize SOURCE to each scheme, evaluate and time it, and say which to take.

    Every scheme is a run of its own in the run directory, with the baseline served once; a second call
    resumes. Without --scenario the text that ships with vexport decides, and no task. Speed is measured where
    the kernels are native; with --gpu there is a bound for that GPU next to it. Exit code 0: one is
    recommended; 3: the data does not decide; 1: all fail.

    \b
    Examples:
      vexport compare MODEL --schemes FP8_DYNAMIC,W4A16,NVFP4A16 --gpu H100
      vexport compare MODEL --schemes FP8_DYNAMIC,W8A8 --scenario qwen3.yaml
    """
    from vexport.cli.terminal import progress_display
    from vexport.engine.session import require_engine
    from vexport.reports import render_comparison

    if not schemes:
        raise click.UsageError("--schemes: name at least one scheme.")
    base = _base(source, schemes[0], scenario_file)
    require_engine((interpreter.vllm_python,))
    from vexport.plan.recommend import Target
    from vexport.run.comparing import compare_schemes, with_scheme

    scenarios = with_default_text([with_scheme(base, scheme) for scheme in schemes])
    target = Target(card=card, tp=tp, context=context) if card else None
    folder = run_dir or Path("runs") / f"compare-{base.name}"
    with progress_display(quiet=answer.quiet) as on_progress:
        options = interpreter.options(base.serve, on_progress)
        found = compare_schemes(
            base.name,
            dict(zip(schemes, scenarios, strict=True)),
            folder,
            options,
            target,
            overwrite=overwrite,
        )
    print_text(render_comparison(found.comparison, answer.format_))
    click.echo(f"page: {folder / 'compare.html'}", err=answer.format_ != "text")
    raise_problems(found.faults)
    _conclude(found.comparison)


def _base(source: str, scheme: str, file: Path | None) -> "Scenario":
    """What all schemes have in common: the scenario of a file, or text and speed with all defaults."""
    from vexport.checkpoint.data_name import DEFAULT
    from vexport.scenario import Evaluate, Rule, Scenario, Speed, read_scenario

    if file is not None:
        return read_scenario(file).model_copy(update={"source": source})
    path = Path(source).expanduser()
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.resolve().name if path.is_dir() else path.name)
    return Scenario(
        name=name.lstrip("._-") or "model",
        source=source,
        rules=(Rule(match="Linear", scheme=scheme),),
        evaluate=Evaluate(text=DEFAULT),
        speed=Speed(),
    )


def _conclude(comparison: "SchemeComparison") -> None:
    if comparison.recommended:
        return
    got = "no scheme that is recommended" if is_read() else "; ".join(comparison.reasons)
    if all(one.outcome == "FAIL" for one in comparison.schemes):
        fix = "choose schemes with more bits"
        raise CheckpointFailed(comparison.name, got=got, need="a scheme that passes", fix=fix)
    fix = "choose by what the table shows, or measure more"
    raise Inconclusive(comparison.name, got=got, need="one scheme that is ahead", fix=fix)
