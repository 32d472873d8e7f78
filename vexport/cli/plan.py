"""Commands that only show: a plan from headers, the tables of `list`, the sections of `explain`."""

import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.base import command, note, print_text, progress_display, require_plan
from vexport.cli.options import (
    READ_PATH,
    Answer,
    answer_file,
    format_option,
    option,
    require_apart,
    revision_option,
    trust_option,
)
from vexport.cli.quantize import (
    CALIBRATION_OPTIONS,
    PLAN_OPTIONS,
    CalibrationOptions,
    calibration_options,
    given_options,
    given_values,
    plan_options,
    require_consistent,
    require_scenario_alone,
    scheme_option,
)
from vexport.errors import InputError
from vexport.records import PlanRequest

if TYPE_CHECKING:
    from vexport.formats.plan import Plan
    from vexport.scenario import Scenario


@command(unlisted=("smoothing", "input_observer", "seed", "pack", "all_experts", "device"))
@click.argument("source", metavar="SOURCE|SCENARIO")
@revision_option
@scheme_option
@option(
    "--run-dir", "Run directory with the losses for `scheme: auto` [default: runs/NAME].", READ_PATH
)
@plan_options
@calibration_options
@trust_option
@format_option(("text", "json"))
def plan(
    source: str,
    revision: str | None,
    request: PlanRequest,
    run_dir: Path | None,
    calibration: CalibrationOptions,
    trust_remote_code: bool,
    answer: Answer,
) -> None:
    """Show what quantizing would do: layers, groups, size, problems.

    SOURCE is a folder or a hub id. Reads headers only. Without --scheme it compares all schemes.
    Takes the options of quantize: with --calibration the plan rounds weights by text.

    \b
    Examples:
      vexport plan MODEL
      vexport plan MODEL --scheme W4A16 --tp 2
      vexport plan MODEL --scheme W4A16 --calibration chats.jsonl
      vexport plan SCENARIO.yaml
    """
    from vexport.checkpoint.source import with_revision
    from vexport.scenario import is_scenario

    if run_dir and not is_scenario(source):
        raise click.UsageError(
            "--run-dir needs a SCENARIO: scheme: auto chooses by what a run measured."
        )
    if is_scenario(source):
        _plan_scenario(source, revision, run_dir, answer, trust_remote_code=trust_remote_code)
    elif request.scheme or request.recipe:
        name = with_revision(source, revision)
        _plan_rules(source, name, request, calibration, answer, trust_remote_code=trust_remote_code)
    elif extra := given_options(*CALIBRATION_OPTIONS):
        raise click.UsageError(
            f"{', '.join(extra)} needs --scheme or --recipe: what the text is for."
        )
    else:
        _compare_schemes(with_revision(source, revision), request, answer)


def _plan_scenario(
    source: str,
    revision: str | None,
    run_dir: Path | None,
    answer: Answer,
    *,
    trust_remote_code: bool,
) -> None:
    """The plan of a scenario, and how many documents its evaluation takes."""
    from vexport.evaluation.inputs import scenario_inputs
    from vexport.outputs.replaceable import NamedPath
    from vexport.plan.source import require_trusted_scenario
    from vexport.quantize.auto import plan_scenario
    from vexport.scenario import read_scenario

    scenario = read_scenario(Path(source))
    require_trusted_scenario(scenario, Path(source), trusted=trust_remote_code)
    folder = NamedPath(label="--run-dir", path=run_dir or scenario.run_dir)
    require_apart(click.get_current_context(), [folder, *scenario_inputs(scenario, Path(source))])
    require_scenario_alone()
    if revision:
        raise click.UsageError("--revision cannot be used with a scenario; set `revision` in it.")
    with progress_display(quiet=answer.quiet) as on_progress:
        _, plan = plan_scenario(scenario, run_dir, on_progress, trust_remote_code=trust_remote_code)
    needs_trust = trust_remote_code or (scenario.evaluate and scenario.evaluate.suite == "code")
    trust = ("--trust-remote-code",) if needs_trust else ()
    then = shlex.join(["vexport", "run", source, *given_values("run_dir"), *trust])
    _note_missing_data(scenario)
    _print(source, plan, then, answer, scenario)


def _note_missing_data(scenario: "Scenario") -> None:
    """A note for each text that is named and not there: a plan does without it, a run does not."""
    from vexport.checkpoint.source import require_data

    calibration = scenario.calibration.data if scenario.calibration else None
    text = scenario.evaluate.text if scenario.evaluate else None
    for name in filter(None, (calibration, text)):
        try:
            require_data(name)
        except InputError as problem:
            note(f"{problem}; `vexport run` needs it")


def _plan_rules(
    source: str,
    name: str,
    request: PlanRequest,
    calibration: CalibrationOptions,
    answer: Answer,
    *,
    trust_remote_code: bool,
) -> None:
    """The plan of a scheme or recipe for a model; `name` is the source with its revision."""
    from vexport.checkpoint.source import require_data
    from vexport.plan.rules import calibration_need
    from vexport.plan.source import plan_headers, requested

    require_consistent(request)
    rules, settings = requested(request, (), note, trust_remote_code=trust_remote_code)
    text = calibration.settings
    planning = replace(settings, has_text=text is not None)
    with progress_display(quiet=answer.quiet) as on_progress:
        _, plan = plan_headers(
            name, rules, planning, on_progress, trust_remote_code=trust_remote_code
        )
    if text is not None:
        require_data(text.data)
        if calibration_need(plan) is None:
            note("this plan does not need the text")
    out = "-".join((Path(source).resolve().name, *(plan.schemes or ("KV",))))
    trust = ("--trust-remote-code",) if trust_remote_code else ()
    options = (*given_values("revision", *PLAN_OPTIONS, *CALIBRATION_OPTIONS), *trust)
    _print(source, plan, shlex.join(["vexport", "quantize", source, out, *options]), answer)


def _compare_schemes(name: str, request: PlanRequest, answer: Answer) -> None:
    """Print the table of all schemes."""
    from vexport.plan.build import PlanSettings
    from vexport.plan.source import ignored_rules, table_of_schemes
    from vexport.reports.plan import render_table

    settings = PlanSettings(ranks=request.tp or (1,), kv_cache=request.kv_cache)
    with progress_display(quiet=answer.quiet) as on_progress:
        table = table_of_schemes(
            name, ignored_rules(request.ignore), settings, on_progress, request.group_size
        )
    print_text(render_table(table, answer.format_))


def _print(
    source: str, plan: "Plan", then: str, answer: Answer, scenario: "Scenario | None" = None
) -> None:
    """The answer; exit with 2 where the plan has refusals."""
    from vexport.reports.plan import render_plan
    from vexport.scenario.evaluate import TYPICAL_DISAGREEMENT

    evaluate, needed = scenario.evaluate if scenario else None, None
    if evaluate and evaluate.tasks and evaluate.margin > 0 and answer.format_ != "json":
        from vexport.evaluation.statistics import documents_for_power

        needed = documents_for_power(evaluate.margin, TYPICAL_DISAGREEMENT, evaluate.alpha)
    print_text(render_plan(plan, answer.format_, then, evaluate, needed))
    require_plan(source, plan)


@command("list", no_args_is_help=True)
@click.argument(
    "what", type=click.Choice(("schemes", "observers", "roundings", "checks", "architectures"))
)
@format_option(("text", "json"))
def list_command(what: str, answer: Answer) -> None:
    """List schemes, observers, roundings, checks or architectures.

    \b
    Examples:
      vexport list schemes
      vexport list checks --format json
    """
    from vexport.reports.catalog import render_catalog

    print_text(render_catalog(what, answer.format_))


@command("explain")
@click.argument("name", required=False, nargs=-1)
@format_option(("text", "json"))
def explain_command(name: tuple[str, ...], answer: Answer) -> None:
    """Print the section of the reference that explains a scheme, observer, check, finding or topic.

    NAME is what a report, message or list calls it, in any case. Without NAME: the pages and their
    sections.

    \b
    Examples:
      vexport explain
      vexport explain NVFP4
      vexport explain completeness
      vexport explain margin
    """
    from vexport.reports.catalog import all_sections, contents, find_section

    if not name:
        sections = [asdict(section) for section in all_sections()]
        print_text(
            contents() if answer.format_ == "text" else json.dumps(sections, indent=2) + "\n"
        )
        return
    section = find_section(" ".join(name))
    if answer.format_ == "json":
        print_text(json.dumps(asdict(section), indent=2) + "\n")
    elif sys.stdout.isatty() and answer_file(click.get_current_context()) is None:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(section.text))
    else:
        print_text(section.text + "\n")
