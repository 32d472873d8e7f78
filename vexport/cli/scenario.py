"""A scenario from start to end, and its report."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.base import add_step_summary, command, conclude, note, print_text
from vexport.cli.engine import (
    ExplanationOptions,
    Interpreter,
    attribution_options,
    interpreter_option,
    serve_options,
)
from vexport.cli.options import FORMATS, PATH, Answer, answer_file, format_option

if TYPE_CHECKING:
    from pydantic import JsonValue

REPORT_FORMATS = (*FORMATS, "html", "markdown", "card")


@command()
@click.argument("scenario", type=PATH)
@click.option("--run-dir", type=PATH, help="Where everything goes [default: runs/NAME].")
@click.option("--overwrite", is_flag=True, help="Start again in a run directory that exists.")
@attribution_options
@interpreter_option
@serve_options
@format_option(REPORT_FORMATS)
def run(
    scenario: Path,
    run_dir: Path | None,
    overwrite: bool,
    explanation: ExplanationOptions,
    interpreter: Interpreter,
    tp: int | None,
    engine_args: "dict[str, JsonValue]",
    answer: Answer,
) -> None:
    """Run every stage of SCENARIO and give one verdict.

    The stages: plan, calibrate, quantize, check, load in vLLM, evaluate, report. A second call resumes.

    \b
    Examples:
      vexport run SCENARIO.yaml
      vexport run SCENARIO.yaml --run-dir runs/nightly --format github
    """
    from vexport.cli.terminal import progress_display
    from vexport.engine.session import require_engine
    from vexport.plan.needs import with_default_text
    from vexport.reports import render
    from vexport.scenario import read_scenario
    from vexport.scenario.serve import with_options

    (parsed,) = with_default_text([read_scenario(scenario)], note)
    serve = with_options(parsed.serve, {"tensor_parallel_size": tp}, engine_args)
    parsed = parsed.model_copy(update={"serve": serve})
    require_engine((interpreter.vllm_python,))
    from vexport.run.stages import run_scenario

    folder = run_dir or parsed.run_dir
    with progress_display(quiet=answer.quiet) as on_progress:
        options = interpreter.options(parsed.serve, on_progress)
        report = run_scenario(
            parsed, folder, options, overwrite=overwrite, file=scenario, explaining=explanation.settings
        )
    print_text(render(report, answer.format_, scenario=scenario))
    if answer.format_ == "github":
        add_step_summary(render(report, "markdown"))
    click.echo(f"report: {folder / 'report.html'}", err=answer.format_ != "text")
    conclude(report.outcome, report.name, report.reason)


@command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=PATH)
@format_option(REPORT_FORMATS)
def report(run_dirs: tuple[Path, ...], answer: Answer) -> None:
    """Show a run's report again, or several runs in one table.

    The outcome of the run, of the newest of several, is the exit code. Of several runs the smallest that
    passes is marked. `--format card` is a model card for the checkpoint's README.md.

    \b
    Examples:
      vexport report runs/nightly
      vexport report runs/nightly --format card -o README.md
      vexport report runs/monday runs/tuesday -o runs.html
    """
    from vexport.errors import VexportError
    from vexport.errors.extras import attempt, raise_problems
    from vexport.reports import render, render_comparison
    from vexport.reports.run import compared_run, marked
    from vexport.run.directory import read_report

    outcomes = [(folder, attempt(partial(read_report, folder), str(folder))) for folder in run_dirs]
    problems = [outcome for _, outcome in outcomes if isinstance(outcome, VexportError)]
    reports = [(folder, report) for folder, report in outcomes if not isinstance(report, VexportError)]
    reports.sort(key=lambda pair: pair[1].created)
    if len(reports) == 1:
        (folder, only), file = reports[0], answer_file(click.get_current_context())
        page = file.parent if file else Path()
        print_text(render(only, answer.format_, folder=folder, page=page))
    elif reports:
        rows = marked([compared_run(report, str(folder)) for folder, report in reports])
        print_text(render_comparison(rows, answer.format_))
    raise_problems(problems)
    _, newest = reports[-1]
    conclude(newest.outcome, newest.name, newest.reason)
