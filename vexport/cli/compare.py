"""The command `compare`: several schemes of one model, or several ways to serve one checkpoint."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from vexport.cli.arguments import parse_arguments
from vexport.cli.base import (
    add_step_summary,
    command,
    conclude,
    is_shown_to_user,
    note,
    print_text,
    progress_display,
    text_width,
)
from vexport.cli.engine import (
    VLLM_PYTHON,
    Session,
    interpreters_option,
    serve_options,
    session_options,
)
from vexport.cli.options import (
    FORMATS,
    PATH,
    OutputOptions,
    capabilities,
    format_option,
    given,
    option,
    output_file,
    overwrite_run_option,
    require_apart,
    stacked,
)
from vexport.cli.prompting import (
    EVALUATE_SYNTAXES,
    chat_template_option,
    evaluation_settings,
    given_evaluation,
)
from vexport.cli.settings import (
    PLAIN,
    SETTINGS,
    Syntax,
    option_names,
    setting_option,
    setting_options,
)
from vexport.errors import CheckpointFailed, InputError, VexportError
from vexport.errors.extras import raise_problems
from vexport.names import SourceRef, parse_source
from vexport.rules import conclusion
from vexport.rules import usage as rules
from vexport.words import listed

if TYPE_CHECKING:
    from pydantic import JsonValue

    from vexport.api import Engine
    from vexport.reports.run_record import Report
    from vexport.scenario import Evaluate, Scenario, Serve

# Options of other comparisons, with the names of their parameters.
_NOT_VERSIONS = {"--schemes": "schemes", "--scenario": "scenario_file"}
# Values of --format with --schemes. With --serve, all values of the option are valid.
SCHEMES_FORMATS = ("text", "json", "html", "markdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreters:
    """Interpreters from the command line, and permission to run a checkpoint's code."""

    vllm_python: tuple[Path, ...]
    trust_remote_code: bool

    @property
    def default(self) -> Path | None:
        """The interpreter that VEXPORT_VLLM_PYTHON names, or None for vexport's interpreter."""
        path = os.environ.get(VLLM_PYTHON)
        return Path(path) if path else None

    @property
    def named(self) -> tuple[Path, ...]:
        """The interpreters that the command line names."""
        return self.vllm_python if given("vllm_python") else ()

    def engine(self, python: Path | None, serve: "Serve | None" = None) -> "Engine":
        """Return the engine of vexport.api with one of these interpreters."""
        from vexport.api import Engine, Serve

        return Engine(
            serve=serve or Serve(),
            vllm_python=python,
            trust_remote_code=self.trust_remote_code,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Run directory from the command line. If `overwrite`, existing results in it are replaced."""

    run_dir: Path | None
    overwrite: bool


def _schemes(text: str) -> tuple[str, ...]:
    """Parse scheme names separated by commas. Duplicates are dropped. A type for click."""
    from vexport.formats.schemes import get_scheme, scheme_name

    parts = [part.strip() for part in text.split(",") if part.strip()]
    return tuple(dict.fromkeys(get_scheme(scheme_name(part)).name for part in parts))


def _versions(text: str) -> tuple[str, ...]:
    """Parse versions of vLLM: `0.30..0.33`, or `0.31,0.33`. A type for click."""
    from vexport.architectures.versions import parse_versions
    from vexport.version import short_version

    try:
        return tuple(map(short_version, parse_versions(text)))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionOptions:
    """Versions of vLLM from the command line, and how they are tried."""

    versions: tuple[str, ...] | None
    install: bool
    bisect: bool
    sm: tuple[int, ...] | None


# Settings of servers are left out, because a variant runs on this machine.
_evaluate_options = stacked(
    *(
        setting_option("evaluate", key, EVALUATE_SYNTAXES.get(key, PLAIN))
        for key, record in SETTINGS["evaluate"].items()
        if record.heading != "Servers"
    )
)


@command()
@click.argument("source", metavar="SOURCE|CHECKPOINT", type=parse_source)
@click.argument("others", metavar="", nargs=-1)
@option(
    "--schemes",
    "Quantize SOURCE in each of these schemes; see `vexport list schemes`.",
    _schemes,
    "A,B,...",
    heading="Comparison",
)
@setting_options("variants", {"serve": Syntax(item=parse_arguments)})
@option(
    "--versions",
    "Load CHECKPOINT dry in these versions of vLLM; with a CPU build, also compare text.",
    _versions,
    "A..B|A,B,...",
    heading="Comparison",
)
@option(
    "--install",
    "Make missing environments in the cache (4 to 10 GB each).",
    heading="Comparison",
    flag=True,
)
@option(
    "--bisect",
    "Try only the versions of a binary search.",
    heading="Comparison",
    flag=True,
)
@option(
    "--sm",
    "With --versions: GPUs, such as 90 or H100 [default: 80,89,90,100].",
    capabilities,
    "N,...",
    heading="Comparison",
)
@interpreters_option
@option(
    "--scenario scenario_file",
    "Scenario with settings and tasks; with --schemes, also with rules and calibration.",
    PATH,
    "FILE",
    heading="Comparison",
)
@_evaluate_options
@chat_template_option
@serve_options
@session_options
@option(
    "--run-dir",
    "Folder of the results [default: runs/{compare,variants,versions}-NAME].",
    PATH,
    heading="Output",
)
@overwrite_run_option
@format_option((*FORMATS, "html", "markdown"))
def compare(
    source: SourceRef,
    others: tuple[str, ...],
    schemes: tuple[str, ...] | None,
    version_options: VersionOptions,
    interpreters: Interpreters,
    scenario_file: Path | None,
    tp: int | None,
    session: Session,
    run_directory: RunDirectory,
    output: OutputOptions,
) -> None:
    """Compare schemes of SOURCE, or settings and versions of vLLM for CHECKPOINT.

    With --schemes, SOURCE is quantized in each scheme. The baseline is served once. Without
    --scenario, the verdict is based on the text that ships with vexport. Exit code 0: a scheme
    passes; 1: all fail; 4: the environment failed in a run; 3: anything else.

    With --serve, CHECKPOINT is served in each setting, by vexport's interpreter (or
    VEXPORT_VLLM_PYTHON) and by each --vllm-python. The first variant is the baseline. A setting
    that vLLM refuses is a row with the reason. Exit code 0: every variant passes; 1: one fails or
    is refused; 4: the environment failed; 3: one is inconclusive.

    With --versions, the first version that refuses CHECKPOINT or differs is named. Exit code 1:
    there is one; 3: a version could not be judged; 4: an environment is missing.

    A second call resumes.

    \b
    Examples:
      vexport compare MODEL --schemes FP8_DYNAMIC,W4A16,NVFP4A16
      vexport compare MODEL --schemes FP8_DYNAMIC,W8A8 --scenario qwen3.yaml
      vexport compare OUT --serve kv_cache_dtype=auto --serve kv_cache_dtype=fp8 --task gsm8k
      vexport compare OUT --vllm-python new/bin/python --task gsm8k
      vexport compare OUT --versions 0.30..0.33 --install --bisect
    """
    if others:
        raise InputError.of(
            rules.SECOND_CHECKPOINT, "compare", first=quote(str(source)), second=quote(others[0])
        )
    if version_options.versions is not None:
        shared = session.serve(tp)
        _compare_versions(source, version_options, interpreters, shared, run_directory, output)
        return
    _require_no_options_of_versions()
    if schemes is None:
        scenario = _read_scenario(scenario_file, interpreters)
        shared = session.serve(tp, scenario.serve if scenario else None)
        _compare_variants(source, interpreters, scenario, shared, run_directory, output)
    else:
        _compare_schemes(source, schemes, interpreters, scenario_file, run_directory, output)


def _require_no_options_of_versions() -> None:
    if others := [f"--{name}" for name in ("install", "bisect", "sm") if given(name)]:
        raise InputError.of(rules.NEEDS_OPTION, ", ".join(others), other="--versions")


def _compare_versions(
    checkpoint: SourceRef,
    version_options: VersionOptions,
    interpreters: Interpreters,
    shared: "Serve",
    run_directory: RunDirectory,
    output: OutputOptions,
) -> None:
    """Try CHECKPOINT in each version of vLLM, and print the table of the versions.

    `shared` are the arguments of vLLM.
    """
    from vexport.outputs.replaceable import NamedPath
    from vexport.reports import render_versions

    settings = _text_of_versions()
    folder = run_directory.run_dir or Path("runs") / f"versions-{checkpoint.file_name}"
    written = [NamedPath(label="--run-dir", path=folder)]
    require_apart(click.get_current_context(), (), written)
    faults: list[VexportError] = []
    with progress_display(quiet=output.quiet, reads=[checkpoint]) as on_progress:
        # The functions that start engines import torch, which takes seconds.
        from vexport.api import Engine, compare_versions

        report = compare_versions(
            checkpoint,
            version_options.versions or (),
            folder,
            settings=settings,
            vllm_python=interpreters.named,
            install=version_options.install,
            bisect=version_options.bisect,
            sm=version_options.sm,
            engine=Engine(
                serve=shared,
                vllm_python=interpreters.default,
                trust_remote_code=interpreters.trust_remote_code,
            ),
            overwrite=run_directory.overwrite,
            on_problem=faults.append,
            on_progress=on_progress,
        )
    print_text(render_versions(report, output.format_, width=text_width()))
    if output.format_ == "github":
        add_step_summary(render_versions(report, "markdown"))
    click.echo(f"report: {folder / 'report.html'}", err=output.format_ != "text")
    step = "see the changes of each version in the output"
    if report.outcome == "FAIL":
        conclude("FAIL", str(checkpoint), report.reason, step)
    raise_problems(faults)
    conclude(report.outcome, str(checkpoint), report.reason, step)


def _text_of_versions() -> "Evaluate":
    """Return the settings of the text. Raises UsageError for options of other comparisons."""
    keys = given_evaluation()
    others = option_names("variants")
    others += [name for name, parameter in _NOT_VERSIONS.items() if given(parameter)]
    others += [SETTINGS["evaluate"][key].names[0] for key in keys if not key.startswith("text")]
    if others:
        remedy = "remove it: --versions compares loads, and the log-probabilities of text"
        raise InputError.of(rules.EXCLUDED, ", ".join(others), other="--versions", remedy=remedy)
    from vexport.run.versions_run import VERSION_TEXT

    return evaluation_settings("compare", {**VERSION_TEXT, **keys})


def _compare_schemes(
    source: SourceRef,
    schemes: tuple[str, ...],
    interpreters: Interpreters,
    scenario_file: Path | None,
    run_directory: RunDirectory,
    output: OutputOptions,
) -> None:
    from vexport.engine.session import require_engine
    from vexport.outputs.replaceable import NamedPath
    from vexport.reports import render_comparison
    from vexport.scenario import base_scenario
    from vexport.scores.inputs import require_scenario_inputs, scenario_inputs

    _require_no_options_of_variants(schemes, interpreters, output)
    base = base_scenario(source, schemes[0], scenario_file)
    python = interpreters.named[0] if interpreters.named else interpreters.default
    faults: list[VexportError] = []
    with progress_display(quiet=output.quiet, reads=[source]) as on_progress:
        # The functions that start engines import torch, which takes seconds.
        require_scenario_inputs(base)
        require_engine((python,))
        from vexport.api import compare as api_compare
        from vexport.run.comparison import outcome_of
        from vexport.run.scenario_run import compare_folder

        written = [NamedPath(label="--run-dir", path=run_directory.run_dir or compare_folder(base))]
        inputs = list(scenario_inputs(base, scenario_file))
        require_apart(click.get_current_context(), inputs, written)
        runs = api_compare(
            source,
            schemes,
            scenario=scenario_file,
            run_dir=run_directory.run_dir,
            overwrite=run_directory.overwrite,
            engine=interpreters.engine(python),
            on_note=note,
            on_problem=faults.append,
            on_progress=on_progress,
        )
    print_text(render_comparison(runs, output.format_))
    raise_problems(faults)
    reasons = "; ".join(f"{run.schemes}: {run.reason}" for run in runs)
    conclude(outcome_of(runs), base.name, reasons, "see the report in the folder of each run")


def _require_no_options_of_variants(
    schemes: tuple[str, ...], interpreters: Interpreters, output: OutputOptions
) -> None:
    if not schemes:
        raise InputError.of(rules.REQUIRED, "--schemes", needed="at least one scheme")
    if given("serve"):
        remedy = "remove one of the two: --schemes quantizes a model, --serve serves a checkpoint"
        raise InputError.of(rules.EXCLUDED, "--serve", other="--schemes", remedy=remedy)
    others = option_names("evaluate", "serve")
    if given("chat_template"):
        others.append("--chat-template")
    if click.get_current_context().params["engine_args"]:
        others.append("--engine-arg")
    if others:
        remedy = "set tasks and settings in --scenario FILE"
        raise InputError.of(rules.EXCLUDED, ", ".join(others), other="--schemes", remedy=remedy)
    if len(interpreters.named) > 1:
        needed = "a single interpreter, because --schemes uses one vLLM"
        raise InputError.of(rules.REQUIRED, "--vllm-python", needed=needed)
    if output.format_ not in SCHEMES_FORMATS:
        formats = f"{listed(SCHEMES_FORMATS, 'or')} with --schemes"
        raise InputError.of(rules.FORMAT, "--format", format=output.format_, formats=formats)


def _compare_variants(
    checkpoint: SourceRef,
    interpreters: Interpreters,
    scenario: "Scenario | None",
    shared: "Serve",
    run_directory: RunDirectory,
    output: OutputOptions,
) -> None:
    """Serve CHECKPOINT in each variant, and print the table of the variants.

    `shared` are the settings of vLLM that all variants share.
    """
    from vexport.engine.session import require_engine
    from vexport.outputs.replaceable import NamedPath
    from vexport.reports import render_variants
    from vexport.scores.inputs import evaluation_inputs, require_inputs

    serve, others = _variants(scenario, interpreters)
    settings = _evaluate(scenario)
    folder = run_directory.run_dir or Path("runs") / f"variants-{checkpoint.file_name}"
    inputs = list(evaluation_inputs(settings, "--task"))
    written = [NamedPath(label="--run-dir", path=folder)]
    require_apart(click.get_current_context(), inputs, written)
    faults: list[VexportError] = []
    with progress_display(quiet=output.quiet, reads=[checkpoint]) as on_progress:
        # The functions that start engines import torch, which takes seconds.
        require_inputs([checkpoint], settings)
        require_engine((interpreters.default, *others))
        from vexport.api import compare_variants

        report = compare_variants(
            checkpoint,
            settings,
            folder,
            serve=serve,
            vllm_python=others,
            engine=interpreters.engine(interpreters.default, shared),
            overwrite=run_directory.overwrite,
            on_problem=faults.append,
            on_progress=on_progress,
        )
    file = output_file(click.get_current_context())
    page = file.parent if file else Path()
    print_text(
        render_variants(report, output.format_, folder=folder, page=page, width=text_width())
    )
    if output.format_ == "github":
        add_step_summary(render_variants(report, "markdown", folder=folder, page=page))
    click.echo(f"report: {folder / 'report.html'}", err=output.format_ != "text")
    _conclude_variants(report, faults)


def _read_scenario(file: Path | None, interpreters: Interpreters) -> "Scenario | None":
    """Return the scenario in the file. Raise InputError if it would run code without permission."""
    if file is None:
        return None
    from vexport.engine.installed import installed_version
    from vexport.plan.source import require_trusted_scenario
    from vexport.scenario import read_scenario

    scenario, vllm = read_scenario(file), installed_version(interpreters.default)
    require_trusted_scenario(scenario, file, trusted=interpreters.trust_remote_code, vllm=vllm)
    return scenario


def _variants(
    scenario: "Scenario | None", interpreters: Interpreters
) -> "tuple[Sequence[Mapping[str, JsonValue]], Sequence[Path]]":
    """Return (settings, interpreters) of the variants.

    `Interpreters.default` is not in the list, because every comparison includes it.

    Settings and interpreters on the command line replace the scenario's settings and interpreters.
    Raises InputError if there is nothing to compare.
    """
    from vexport.scenario.variants import parse_setting, setting_text

    serve: Sequence[Mapping[str, JsonValue]] = [
        parse_setting(setting, f"--serve {setting_text(setting)}")
        for setting in click.get_current_context().params["serve"]
    ]
    others: Sequence[Path] = interpreters.named
    if scenario is not None and scenario.variants is not None:
        serve = serve or scenario.variants.serve
        others = others or scenario.variants.vllm_python
    if not serve and not others:
        needed = (
            "--schemes A,B,... to compare schemes, or --serve KEY=VALUE or --vllm-python PATH to "
            "compare settings and versions of vLLM"
        )
        raise InputError.of(rules.REQUIRED, "vexport compare", needed=needed)
    if len(serve) == 1 and not others:
        needed = "a second variant, such as --serve '{}' for vLLM's defaults, or --vllm-python"
        raise InputError.of(rules.REQUIRED, "vexport compare", needed=needed)
    return serve, others


def _evaluate(scenario: "Scenario | None") -> "Evaluate":
    """Return the settings of the evaluation: the scenario's, overridden by the command line.

    Raises InputError without tasks and text, and InputErrors if settings contradict each other.
    """
    from vexport.scenario.evaluate import ModelSettings

    keys = given_evaluation()
    if scenario is not None and scenario.evaluate is not None:
        # The baseline is the first variant, and all variants run on this machine.
        models = {*ModelSettings.model_fields}
        kept = scenario.evaluate.model_dump(exclude_unset=True, exclude=models)
        keys = {**kept, **keys}
    if not (keys.get("tasks") or keys.get("text")):
        needed = "--task NAME_OR_YAML, or --text DATA in the place of tasks"
        raise InputError.of(rules.REQUIRED, "vexport compare", needed=needed)
    return evaluation_settings("compare", keys)


def _conclude_variants(report: "Report", faults: Sequence[VexportError]) -> None:
    """Exit by the outcome: 1 if a variant fails or is refused, 4 for a fault, 3 if inconclusive."""
    from vexport.reports.formatting import advice, next_step

    first = report.variants[0]
    if first.outcome == "REFUSED":
        why = "" if is_shown_to_user() else f": {first.reason}"
        raise CheckpointFailed.of(
            conclusion.REFUSED_BASELINE, report.name, name=first.name, why=why
        )
    step = advice(next_step(report))
    if report.outcome == "FAIL":
        conclude("FAIL", report.name, report.reason, step)
    raise_problems(faults)
    conclude(report.outcome, report.name, report.reason, step)
