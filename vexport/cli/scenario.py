"""Commands for whole scenarios: `demo`, `run` and `report`."""

import logging
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from vexport.cli.base import (
    add_step_summary,
    command,
    conclude,
    note,
    print_text,
    progress_display,
    text_width,
)
from vexport.cli.engine import Interpreter, attribution_options, interpreter_option, serve_options
from vexport.cli.options import (
    FORMATS,
    PATH,
    OutputOptions,
    format_option,
    option,
    output_file,
    overwrite_run_option,
    require_apart,
)
from vexport.errors import InputError, VexportError, first_line
from vexport.errors.extras import attempt, install_fix, is_installed, raise_problems
from vexport.rules import usage
from vexport.rules.scenario import REPORT

if TYPE_CHECKING:
    from pydantic import JsonValue

    from vexport.reports.run_record import Report
    from vexport.run.history import Result, RunResult

T = TypeVar("T")
# The arguments of `conclude`. Without an outcome, the exit code is 0.
_Conclusion = tuple[str, str, str, str]
_NO_CONCLUSION = ("", "", "", "")
REPORT_FORMATS = (*FORMATS, "html", "markdown", "card")


@command()
@click.argument("scenario", type=PATH)
@option("--run-dir", "Folder for all output files [default: runs/NAME].", PATH, heading="Output")
@overwrite_run_option
@attribution_options("always")
@interpreter_option
@serve_options
@format_option(REPORT_FORMATS)
def run(
    scenario: Path,
    run_dir: Path | None,
    overwrite: bool,
    attribution: bool | None,
    attribution_seconds: int,
    interpreter: Interpreter,
    tp: int | None,
    engine_args: "dict[str, JsonValue]",
    output: OutputOptions,
) -> None:
    """Run all stages of SCENARIO and print one verdict.

    The stages are plan, calibrate, quantize, check, load in vLLM, evaluate and report. A second
    call resumes.

    \b
    Examples:
      vexport run SCENARIO.yaml
      vexport run SCENARIO.yaml --run-dir runs/nightly --format github
    """
    from vexport.engine.session import require_engine
    from vexport.outputs.replaceable import NamedPath
    from vexport.reports import render
    from vexport.scenario import read_scenario
    from vexport.scores.inputs import require_scenario_inputs, scenario_inputs

    parsed = read_scenario(scenario)
    folder = run_dir or parsed.run_dir
    written = [NamedPath(label="--run-dir", path=folder)]
    require_apart(click.get_current_context(), list(scenario_inputs(parsed, scenario)), written)
    with progress_display(quiet=output.quiet, reads=[parsed.source]) as on_progress:
        # The functions that start engines import torch, which takes seconds.
        require_scenario_inputs(parsed)
        require_engine((interpreter.vllm_python,))
        from vexport.api import run as api_run

        report = api_run(
            scenario,
            run_dir=folder,
            overwrite=overwrite,
            tp=tp,
            engine_args=engine_args,
            engine=interpreter.engine,
            attribution=attribution,
            attribution_seconds=attribution_seconds,
            on_note=note,
            on_progress=on_progress,
        )
    print_text(render(report, output.format_, scenario=scenario, width=text_width()))
    if output.format_ == "github":
        add_step_summary(render(report, "markdown"))
    click.echo(f"report: {folder / 'report.html'}", err=output.format_ != "text")
    conclude(*_conclusion_of(report))


@command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, type=PATH)
@option(
    "--history",
    "Show the results as a history, even if they differ in source or schemes.",
    heading="Output",
    flag=True,
)
@format_option(REPORT_FORMATS)
def report(run_dirs: tuple[Path, ...], history: bool, output: OutputOptions) -> None:
    """Show the report of a run again, or several runs in one table.

    Runs of one checkpoint, or of the same source and schemes, are shown as a history, with accepted
    baselines (`eval --accept FILE`). The first run that regressed is marked, with the changes of
    vLLM and of the checkpoint. For other runs, the smallest checkpoint that passes is marked. The
    exit code is the outcome of the run, or of the newest run. `--format card` writes a model card
    for the checkpoint's README.md.

    \b
    Examples:
      vexport report runs/nightly
      vexport report runs/nightly --format card -o README.md
      vexport report baselines/accepted.json runs/night-* -o history.html
    """
    if not run_dirs:
        needed = (
            "RUN_DIR, the folder of a finished run, such as runs/NAME, which `vexport run` and "
            "`vexport eval` write"
        )
        raise InputError.of(usage.REQUIRED, "vexport report", needed=needed)
    if len(run_dirs) == 1 and not history and not run_dirs[0].is_file():
        # Comparisons import scipy, which takes a second.
        _show_one(run_dirs[0], output)
        return
    from vexport.run.history import RunResult, is_one_model, read_result, without_repetitions

    outcomes = [attempt(partial(read_result, path), str(path)) for path in run_dirs]
    problems = [outcome for outcome in outcomes if isinstance(outcome, VexportError)]
    found, repeated = without_repetitions(
        [outcome for outcome in outcomes if not isinstance(outcome, VexportError)]
    )
    runs = [result for result in found if isinstance(result, RunResult)]
    conclusion = _NO_CONCLUSION
    if history or len(runs) < len(found):
        conclusion = _show_history(found, output)
    elif len(runs) == 1:
        conclusion = _show_run(runs[0].folder, runs[0].report, output)
    elif runs and is_one_model(runs):
        conclusion = _show_history(runs, output)
    elif runs:
        conclusion = _show_comparison(runs, output)
    raise_problems([*problems, *repeated])
    conclude(*conclusion)


def _show_one(folder: Path, output: OutputOptions) -> None:
    from vexport.api import report as api_report

    conclude(*_show_run(folder, api_report(folder), output))


def _show_run(folder: Path, report: "Report", output: OutputOptions) -> _Conclusion:
    from vexport.reports import render

    file = output_file(click.get_current_context())
    page = file.parent if file else Path()
    make = partial(render, report, output.format_, folder=folder, page=page, width=text_width())
    print_text(_render_report(folder, make))
    return _conclusion_of(report)


def _show_comparison(runs: "Sequence[RunResult]", output: OutputOptions) -> _Conclusion:
    """Print a table of runs, oldest first. The outcome is the outcome of the newest run."""
    from vexport.reports import render_comparison
    from vexport.run.comparison import compared_run, mark_smallest

    ordered = sorted(runs, key=lambda run: run.report.call.created)
    compared = [
        _render_report(run.folder, partial(compared_run, run.report, run.name)) for run in ordered
    ]
    print_text(render_comparison(mark_smallest(compared), output.format_))
    return _conclusion_of(ordered[-1].report)


def _conclusion_of(report: "Report") -> _Conclusion:
    from vexport.reports.formatting import advice, next_step

    return report.outcome, report.name, report.reason, advice(next_step(report))


def _show_history(results: "Sequence[Result]", output: OutputOptions) -> _Conclusion:
    """Print the history of one model. The outcome is the outcome of the newest run."""
    from vexport.reports import render_history
    from vexport.run.history import history_of

    if not results:
        return _NO_CONCLUSION
    history = _render_reports(results, lambda: history_of(results))
    print_text(_render_reports(results, partial(render_history, history, output.format_)))
    decisive = history.decisive
    if decisive is None or history.outcome is None:
        return _NO_CONCLUSION
    fix = "see the events and the changes in the table"
    reason = f"{decisive.title}: {decisive.reason}"
    return history.outcome, history.name, reason, fix


def _render_report(folder: Path, make: Callable[[], T]) -> T:
    """Return the result of `make`, which renders the report in `folder`.

    Raises InputError if the report's values contradict each other.
    """
    from vexport.run.directory import REPORT_FILE

    return _call_renderer(str(folder / REPORT_FILE), make)


def _render_reports(results: "Sequence[Result]", make: Callable[[], T]) -> T:
    """Return the result of `make`, which renders several results.

    Raises InputError if their values contradict each other.
    """
    return _call_renderer(", ".join(result.name for result in results), make)


def _call_renderer(where: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        AssertionError,
    ) as error:
        logging.getLogger(__name__).debug("%s", where, exc_info=error)
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError.of(REPORT, where, reason=reason) from None


@command()
@click.argument("folder", metavar="[DIR]", type=PATH, default="vexport-demo")
@option("--overwrite", "Replace DIR if it contains only a demo.", heading="Output", flag=True)
def demo(folder: Path, overwrite: bool, quiet: bool) -> None:
    """Write a small model and example scenarios to DIR.

    The default DIR is vexport-demo. The model has 2 million parameters. Its calibration data and
    its lm-eval tasks are included, so nothing is downloaded. The output shows the next command.

    \b
    Examples:
      vexport demo
      vexport demo /tmp/demo --overwrite
    """
    _write_demo(folder, overwrite)
    first = shlex.quote(str(folder / "demo-nvfp4.yaml"))
    step = f"next: vexport run {first}"
    if not is_installed("vllm"):
        step = (
            f"next: vexport plan {first}\nthen: vexport run {first}, which needs vLLM; "
            f"{install_fix('vllm')}"
        )
    print_text(f"{folder}: the demo's scenarios, model, calibration data and tasks\n{step}")


def _write_demo(folder: Path, overwrite: bool) -> None:
    """Copy the demo's files into `folder`. A new folder is created atomically.

    Raises InputError if the folder is not empty, unless `overwrite` is set and the folder contains
    only a demo.
    """
    from vexport.outputs.manifest import record
    from vexport.outputs.replaceable import FolderKind
    from vexport.scenario.shipped import demo_files, scenarios

    kind = FolderKind(
        name="a demo that vexport wrote",
        mark=".vexport-demo",
        text="Written by `vexport demo`, which replaces the demo's files here with --overwrite.\n",
    )
    root = scenarios()
    files = list(demo_files(root))
    kind.require_replaceable(folder, overwrite=overwrite)
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{folder.name}.") as temporary:
        new = Path(temporary) / folder.name
        kind.begin(new)
        for file in files:
            record(new / file)
            (new / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, new / file)
        if not folder.exists():
            new.rename(folder)
            return
        kind.begin(folder)
        for file in files:
            record(folder / file)
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (new / file).replace(folder / file)
