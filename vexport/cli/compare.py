"""Several schemes of one model in one table."""

from pathlib import Path

import click

from vexport.cli.base import command, conclude, note, print_text
from vexport.cli.engine import Interpreter, interpreter_option
from vexport.cli.options import PATH, Answer, format_option
from vexport.errors.extras import raise_problems


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
@click.option("--run-dir", type=PATH, help="Folder of a run for each scheme [default: runs/compare-NAME].")
@click.option("--overwrite", is_flag=True, help="Start again in a run directory that exists.")
@interpreter_option
@format_option(("text", "json", "html", "markdown"))
def compare(
    source: str,
    schemes: tuple[str, ...],
    scenario_file: Path | None,
    run_dir: Path | None,
    overwrite: bool,
    interpreter: Interpreter,
    answer: Answer,
) -> None:
    """Run SOURCE in each scheme with one baseline, and show one table.

    The baseline is served once; a second call resumes. Without --scenario the text that ships with vexport
    decides, and no task. Exit code 0: a scheme passes; 1: all fail; 3: anything else.

    \b
    Examples:
      vexport compare MODEL --schemes FP8_DYNAMIC,W4A16,NVFP4A16
      vexport compare MODEL --schemes FP8_DYNAMIC,W8A8 --scenario qwen3.yaml
    """
    from vexport.cli.terminal import progress_display
    from vexport.engine.session import require_engine
    from vexport.reports import render_comparison
    from vexport.scenario import base_scenario

    if not schemes:
        raise click.UsageError("--schemes: name at least one scheme.")
    base = base_scenario(source, schemes[0], scenario_file)
    require_engine((interpreter.vllm_python,))
    from vexport.plan.needs import with_default_text
    from vexport.run.stages import compare_schemes, with_scheme

    scenarios = with_default_text([with_scheme(base, scheme) for scheme in schemes], note)
    folder = run_dir or Path("runs") / f"compare-{base.name}"
    with progress_display(quiet=answer.quiet) as on_progress:
        options = interpreter.options(base.serve, on_progress)
        by_scheme = dict(zip(schemes, scenarios, strict=True))
        runs, faults = compare_schemes(by_scheme, folder, options, overwrite=overwrite)
    print_text(render_comparison(runs, answer.format_))
    raise_problems(faults)
    passed = any(run.outcome == "PASS" for run in runs)
    outcome = "PASS" if passed else "FAIL" if all(run.outcome == "FAIL" for run in runs) else "INCONCLUSIVE"
    conclude(outcome, base.name, "; ".join(f"{run.schemes}: {run.reason}" for run in runs))
