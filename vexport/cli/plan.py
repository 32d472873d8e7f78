"""Commands that only show something: `plan`, `list` and `explain`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.base import (
    command,
    note,
    print_text,
    progress_display,
    require_plan,
    text_width,
)
from vexport.cli.options import (
    READ_PATH,
    OutputOptions,
    capabilities,
    format_option,
    gpus,
    option,
    output_file,
    require_apart,
    trust_option,
)
from vexport.cli.quantize import SYNTAXES, require_consistent
from vexport.cli.settings import given_settings, option_names, option_words, setting_options
from vexport.errors import InputError
from vexport.names import Server, SourceRef, parse_source
from vexport.records import OnProgress
from vexport.rules import usage as rules

if TYPE_CHECKING:
    from vexport.formats.gpus import Card
    from vexport.formats.plan import Plan
    from vexport.scenario import Calibration, Scenario

OTHER_GROUP_SIZES = (
    "Other group sizes: add _G and the number of columns, or _CHANNEL for one scale per row, as in "
    "W4A16_G64 and W4A16_CHANNEL. `--scheme W4A16 --group-size 64` has the same effect."
)
# Settings that affect the table of all schemes.
TABLE_OPTIONS = ("revision", "group_size", "ignore", "kv_cache", "tp")


@command()
@click.argument("source", metavar="SOURCE|SCENARIO", type=parse_source)
@setting_options("plan", SYNTAXES)
@setting_options("calibration")
@option(
    "--run-dir",
    "Run directory with the measured losses for `scheme: auto` [default: runs/NAME].",
    READ_PATH,
    heading="Output",
)
@option(
    "--gpu cards",
    "Show how each scheme runs on this GPU, such as L40S, and recommend schemes.",
    gpus,
    "NAME",
    heading="vLLM",
)
@option(
    "--sm",
    "Like --gpu, for a compute capability such as 89.",
    capabilities,
    "N",
    heading="vLLM",
)
@option(
    "--all every",
    "Show all schemes, or all kinds of layers of a plan.",
    heading="Output",
    flag=True,
)
@trust_option
@format_option(("text", "json"))
def plan(
    source: SourceRef,
    run_dir: Path | None,
    cards: tuple["Card", ...] | None,
    sm: tuple[int, ...] | None,
    every: bool,
    trust_remote_code: bool,
    output: OutputOptions,
) -> None:
    """Show how a model would be quantized: layers, groups, size and problems.

    SOURCE is a folder or a hub id. Only headers are read. Without --scheme, the output compares the
    schemes to start with, or all schemes (--all). The options of `quantize` change the plan. For
    example, --calibration changes how weights of fewer than 8 bits are rounded. With --gpu or --sm,
    the output has known faults of the supported version of vLLM.

    \b
    Examples:
      vexport plan MODEL
      vexport plan MODEL --gpu L40S
      vexport plan MODEL --scheme W4A16 --tp 2
      vexport plan MODEL --scheme W4A16 --calibration chats.jsonl
      vexport plan SCENARIO.yaml
    """
    from vexport.scenario import is_scenario

    settings = given_settings("plan")
    gpu = _one_gpu(cards, sm)
    if is_scenario(str(source)) and not isinstance(source, Server):
        if gpu is not None:
            remedy = "set serve.compute in the scenario"
            raise InputError.of(rules.EXCLUDED, "--gpu and --sm", other="a scenario", remedy=remedy)
        _plan_scenario(
            source.path, run_dir, output, trust_remote_code=trust_remote_code, every=every
        )
    elif run_dir:
        other = "a SCENARIO with `scheme: auto`"
        raise InputError.of(rules.NEEDS_OPTION, "--run-dir", other=other)
    elif "scheme" in settings or "recipe" in settings:
        _plan_rules(source, output, gpu, trust_remote_code=trust_remote_code, every=every)
    elif extra := option_names("calibration"):
        other = "--scheme or --recipe"
        raise InputError.of(rules.NEEDS_OPTION, ", ".join(extra), other=other)
    else:
        _compare_schemes(source, output, gpu, every=every)


def _one_gpu(cards: "Sequence[Card] | None", sm: Sequence[int] | None) -> "Card | int | None":
    """Return the GPU of --gpu or the compute capability of --sm, or None without both.

    Raises InputError if there are several.
    """
    given: list[Card | int] = [*(cards or ()), *(sm or ())]
    if len(given) > 1:
        raise InputError.of(rules.ONE_GPU, "--gpu and --sm", count=len(given))
    return given[0] if given else None


def _plan_scenario(
    file: Path, run_dir: Path | None, output: OutputOptions, *, trust_remote_code: bool, every: bool
) -> None:
    """Print the plan of a scenario, the documents that its evaluation needs, and the next command.

    Raises InputError if options repeat settings of the scenario.
    """
    from vexport.api import plan as api_plan
    from vexport.outputs.replaceable import NamedPath
    from vexport.scenario import read_scenario
    from vexport.scores.inputs import scenario_inputs

    scenario = read_scenario(file)
    folder = NamedPath(label="--run-dir", path=run_dir or scenario.run_dir)
    require_apart(click.get_current_context(), [folder, *scenario_inputs(scenario, file)])
    if extra := option_names("plan", "calibration"):
        remedy = "set it in the scenario"
        raise InputError.of(rules.EXCLUDED, ", ".join(extra), other="a scenario", remedy=remedy)
    with progress_display(quiet=output.quiet) as on_progress:
        plan = api_plan(
            file,
            run_dir=run_dir,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
    _note_missing_data(scenario)
    needs_trust = trust_remote_code or (scenario.evaluate and scenario.evaluate.suite == "code")
    words = ["vexport", "run", str(file)]
    if run_dir is not None:
        words += ["--run-dir", str(run_dir)]
    if needs_trust:
        words.append("--trust-remote-code")
    _print(str(file), plan, shlex.join(words), output, scenario, every=every)


def _note_missing_data(scenario: "Scenario") -> None:
    """Print a note for each text that is missing or has no rows.

    The plan does not need the text, but a run does.
    """
    from vexport.calibration.data import require_rows

    texts = list(scenario.calibration.sources() if scenario.calibration else ())
    if scenario.evaluate and (held_out := scenario.evaluate.held_out()):
        texts.append(held_out)
    for text in texts:
        try:
            require_rows(text)
        except InputError as problem:
            note(f"{problem}; `vexport run` needs it")


def _plan_rules(
    source: SourceRef,
    output: OutputOptions,
    gpu: "Card | int | None",
    *,
    trust_remote_code: bool,
    every: bool,
) -> None:
    from vexport.api import Calibration
    from vexport.api import plan as api_plan
    from vexport.calibration.data import require_rows
    from vexport.plan.rules import calibration_need
    from vexport.scenario import problems_at

    require_consistent("plan")
    given_text = given_settings("calibration")
    text = None
    if "data" in given_text:
        with problems_at("calibration"):
            text = Calibration.model_validate(given_text)
    with progress_display(quiet=output.quiet) as on_progress:
        plan = api_plan(
            source,
            **given_settings("plan"),
            gpu=_gpu_name(gpu),
            has_text=text is not None,
            trust_remote_code=trust_remote_code,
            on_note=note,
            on_progress=on_progress,
        )
        if text is not None:
            for data in text.sources():
                require_rows(data)
            if calibration_need(plan) is not None:
                _require_chat_template(source, text, on_progress, trusted=trust_remote_code)
    if text is not None and calibration_need(plan) is None:
        note("this plan does not need the text")
    elif text is not None:
        _note_little_text(plan, text)
    out = "-".join((source.file_name, *(plan.schemes or ("KV",))))
    trust = ("--trust-remote-code",) if trust_remote_code else ()
    words = ("vexport", "quantize", str(source), out, *option_words("plan", "calibration"), *trust)
    _print(str(source), plan, shlex.join(words), output, gpu=gpu, text=text, every=every)


def _note_little_text(plan: "Plan", text: "Calibration") -> None:
    """Print a note if even the longest samples of the text are too short for some layers."""
    from vexport.quantize.warnings import little_text_of_plan

    line = little_text_of_plan(plan, text.samples * text.seq_len, at_most=True)
    if line is not None:
        note(line)


def _require_chat_template(
    source: SourceRef, text: "Calibration", on_progress: OnProgress, *, trusted: bool
) -> None:
    """Raise InputError if the text has conversations and the model has no chat template.

    Nothing is checked if the tokenizer's code is trusted, because the code may set a template that
    is not in its files.
    """
    from vexport.calibration.data import has_conversations, require_chat_template
    from vexport.checkpoint.source import source_headers, with_revision

    rendered = [data for data in text.sources() if has_conversations(data)]
    if trusted or not rendered:
        return
    revision = click.get_current_context().params.get("revision")
    with source_headers(with_revision(source, revision), on_progress) as root:
        require_chat_template(root, rendered[0], name=str(source))


def _duration(plan: "Plan", text: "Calibration | None") -> str | None:
    """Return a line about the time of calibration, if it will take long on this machine's CPU."""
    from vexport.plan.duration import duration_line
    from vexport.plan.rules import calibration_need
    from vexport.quantize.result import NVIDIA_DEVICE
    from vexport.scenario.calibration import default_calibration

    settings = text or default_calibration()
    device = settings.device or ("cuda" if NVIDIA_DEVICE.exists() else "cpu")
    if not device.startswith("cpu") or calibration_need(plan) is None:
        return None
    return duration_line(plan, samples=settings.samples, seq_len=settings.seq_len)


def _compare_schemes(
    source: SourceRef, output: OutputOptions, gpu: "Card | int | None", *, every: bool
) -> None:
    from vexport.api import plan_schemes
    from vexport.reports.plan import render_table

    settings = {key: value for key, value in given_settings("plan").items() if key in TABLE_OPTIONS}
    with progress_display(quiet=output.quiet) as on_progress:
        table = plan_schemes(source, **settings, gpu=_gpu_name(gpu), on_progress=on_progress)
    print_text(render_table(table, output.format_, text_width(), every=every))


def _gpu_name(gpu: "Card | int | None") -> str | None:
    if gpu is None:
        return None
    return str(gpu) if isinstance(gpu, int) else gpu.name


def _print(
    source: str,
    plan: "Plan",
    next_command: str,
    output: OutputOptions,
    scenario: "Scenario | None" = None,
    gpu: "Card | int | None" = None,
    text: "Calibration | None" = None,
    *,
    every: bool,
) -> None:
    """Print a plan and the next command. Exit with code 2 if the plan has refusals."""
    from vexport.records.margin import margin_of_shares
    from vexport.reports.plan import render_plan
    from vexport.scenario.evaluate import TYPICAL_DISAGREEMENT

    evaluate, needed = scenario.evaluate if scenario else None, None
    margin = margin_of_shares(evaluate.margin) if evaluate else 0.0
    if evaluate and evaluate.tasks and margin > 0 and output.format_ != "json":
        from vexport.judge.statistics import documents_for_power

        needed = documents_for_power(margin, TYPICAL_DISAGREEMENT, evaluate.alpha)
    sm = gpu if gpu is None or isinstance(gpu, int) else gpu.sm
    text = text or (scenario.calibration if scenario else None)
    duration = None
    if output.format_ != "json" and not plan.refusals:
        duration = _duration(plan, text)
    print_text(
        render_plan(
            plan,
            output.format_,
            next_command,
            text_width(),
            evaluate,
            needed,
            sm=sm,
            calibration=text,
            duration=duration,
            every=every,
        )
    )
    require_plan(source, plan)


@command("list", no_args_is_help=True)
@click.argument(
    "what", type=click.Choice(("schemes", "observers", "roundings", "checks", "architectures"))
)
@format_option(("text", "json"))
def list_command(what: str, output: OutputOptions) -> None:
    """List schemes, observers, roundings, checks or architectures.

    \b
    Examples:
      vexport list schemes
      vexport list checks --format json
    """
    from vexport.api import entries
    from vexport.reports.catalog import render_catalog
    from vexport.reports.renderers.text import MAX_WIDTH

    caption = OTHER_GROUP_SIZES if what == "schemes" else ""
    # In a file or pipe, each scheme stays on a line.
    width = text_width(MAX_WIDTH)
    print_text(render_catalog(entries(what), output.format_, width, caption))


@command("explain")
@click.argument("name", required=False, nargs=-1)
@format_option(("text", "json"))
def explain_command(name: tuple[str, ...], output: OutputOptions) -> None:
    """Print the section of the reference about a scheme, observer, check, finding or topic.

    NAME is the name in a report, message or list, in upper or lower case. Without NAME, all pages
    and their sections are listed.

    \b
    Examples:
      vexport explain
      vexport explain NVFP4
      vexport explain versions/model-class
      vexport explain margin
    """
    from vexport.api import explain, explain_all
    from vexport.reports.catalog import render_contents, render_section

    if not name:
        print_text(render_contents(explain_all(), output.format_))
        return
    section = explain(" ".join(name))
    is_file = output_file(click.get_current_context()) is not None
    if output.format_ == "text" and sys.stdout.isatty() and not is_file:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(section.text))
    else:
        print_text(render_section(section, output.format_))
