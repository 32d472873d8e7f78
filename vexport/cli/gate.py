"""Is a checkpoint sound, does vLLM load it, how is it repaired, what differs."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from vexport.cli.base import (
    add_step_summary,
    command,
    given,
    is_read,
    print_text,
    require_loaded,
    require_ok,
)
from vexport.cli.options import (
    PATH,
    device_options,
    engine_arg_option,
    format_option,
    interpreter_options,
    session_options,
    vllm_option,
)
from vexport.errors import CheckpointFailed, InputError, raise_all
from vexport.types import CheckReport, DryLoadReport, EngineMode, LoadReport

if TYPE_CHECKING:
    from pydantic import JsonValue

    from vexport.checks import Against
    from vexport.checks.vllm.target import Target
    from vexport.fidelity.activations import Observed
    from vexport.types import OnProgress


@command()
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True)
@click.option(
    "--source",
    metavar="SOURCE",
    help="The unquantized checkpoint (folder or hub id) that each CHECKPOINT was made from: every weight is "
    "dequantized and compared with it, all else must be the same.",
)
@click.option(
    "--calibration",
    type=PATH,
    metavar="FILE.jsonl",
    help="With --source: run this text through SOURCE and compare what its layers compute with the static "
    "scales of inputs and KV cache.",
)
@device_options
@vllm_option
@click.option("--all", "every", is_flag=True, help="List each finding; text has those of one kind as one.")
@format_option()
def check(
    checkpoints: tuple[str, ...],
    source: str | None,
    calibration: Path | None,
    tp: tuple[int, ...] | None,
    sm: tuple[int, ...] | None,
    vllm: tuple[int, int],
    every: bool,
    format_: str,
    quiet: bool,
) -> None:
    """Check that vLLM will load each CHECKPOINT correctly.

    Reads files only: no GPU, no vLLM. Works for checkpoints of any producer. --tp and --sm also check that it
    runs on such GPUs, in the precision that is stored; --vllm checks against another version.
    `vexport list checks` lists the checks.

    \b
    Examples:
      vexport check OUT
      vexport check OUT --tp 1,2,4 --sm 80,90
      vexport check OUT --source MODEL
      vexport check checkpoints/* --format junit -o check.xml
    """
    from vexport.checks import CHECKS, FILES
    from vexport.checks.vllm.target import Target
    from vexport.cli.terminal import progress_display
    from vexport.reports import render_checks, summarize_checks

    if calibration and source is None:
        raise click.UsageError("--calibration needs --source, the model that the text is to run through.")
    target = Target(tp=tp or (), sm=sm or (), vllm=vllm)
    with progress_display(quiet=quiet) as on_progress:
        against = _against(source, calibration, on_progress)
        reports, problems = _checked(checkpoints, target, against, on_progress)
    if format_ != "text" or len(problems) < len(reports):
        print_text(render_checks(reports, format_, (FILES, *CHECKS), every=every))
    if format_ == "github":
        add_step_summary(summarize_checks(reports))
    raise_all(problems)
    for report in reports:
        require_ok(report.checkpoint, report.ok, report.findings)


def _checked(
    names: Sequence[str], target: "Target", against: "Against | None", on_progress: "OnProgress"
) -> tuple[list[CheckReport], list[InputError]]:
    """A report for each name, and what was wrong with those that are no checkpoints at all."""
    from vexport.checkpoint.source import resolve_source
    from vexport.checks import check_checkpoint, findings_of

    reports, problems = [], []
    for name in names:
        try:
            root = resolve_source(name, on_progress)
            reports.append(check_checkpoint(name, target, against, root=root))
        except InputError as problem:
            problems.append(problem)
            reports.append(CheckReport(checkpoint=name, ok=False, findings=findings_of(problem)))
    return reports, problems


def _against(source: str | None, calibration: Path | None, on_progress: "OnProgress") -> "Against | None":
    """The comparison with a source, which alone needs torch."""
    if source is None:
        return None
    from vexport.checkpoint.source import resolve_source
    from vexport.errors.extras import require_extra

    require_extra("torch", "--source")
    from vexport.fidelity.compare import against

    root = resolve_source(source, on_progress)
    observed = _observed(root, calibration, on_progress) if calibration else None
    return against(root, on_layer=partial(on_progress, "compare (layers)"), observed=observed)


def _observed(root: Path, calibration: Path, on_progress: "OnProgress") -> "Observed":
    from vexport.checkpoint.index import read_index
    from vexport.fidelity.activations import observe
    from vexport.quantize.samples import calibration_samples
    from vexport.scenario import Calibration

    index, settings = read_index(root), Calibration(data=calibration)
    samples = calibration_samples(index, settings, settings.samples, trust_remote_code=False)
    return observe(index, samples, on_layer=partial(on_progress, "observe (layers)"))


@command()
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True)
@click.option("--dry", is_flag=True, help="Only the loading, from headers: no weights, no GPU.")
@device_options
@interpreter_options
@click.option(
    "--mode",
    type=click.Choice(("eager", "default", "both")),
    default="eager",
    show_default=True,
    help="eager, default (compiled where the platform compiles; a CPU needs a C++ compiler for it), or both.",
)
@engine_arg_option
@session_options
@format_option()
def load(
    checkpoints: tuple[str, ...],
    dry: bool,
    tp: tuple[int, ...] | None,
    sm: tuple[int, ...] | None,
    vllm_python: tuple[Path, ...],
    mode: Literal["eager", "default", "both"],
    trust_remote_code: bool,
    engine_args: dict[str, "JsonValue"],
    timeout: int,
    max_model_len: int | None,
    format_: str,
    quiet: bool,
) -> None:
    """Load each CHECKPOINT in vLLM and compare it with a reference.

    The reference is transformers with the stored weights dequantized by compressed-tensors. The canaries are
    200 tokens long: numbers that are not finite, repetition, an early end, another script are findings. Each
    --tp is one more engine, on as many devices.

    With --dry, vLLM's model class and weight loaders run on headers alone, for every --tp and --sm: what is
    refused, what gets no value or a converted one, which kernel each layer would get. Without --sm, SM 80,
    89, 90 and 100 are shown, and each --tp must load on one of them.

    Each --vllm-python is one more vLLM to load in: the answer is a matrix of checkpoints and versions.

    \b
    Examples:
      vexport load OUT
      vexport load OUT --dry --tp 1,2,4,8 --sm 80,90,100
      vexport load OUT --mode both --vllm-python old/bin/python --vllm-python new/bin/python
    """
    from vexport.cli.terminal import progress_display

    if not dry and given("sm"):
        raise click.UsageError("--sm needs --dry: a real load uses the devices that are there.")
    if dry and (max_model_len or engine_args or mode != "eager"):
        raise click.UsageError(
            "--max-model-len, --engine-arg and --mode do not go with --dry, which runs nothing."
        )
    if "enforce_eager" in engine_args:
        raise click.UsageError("--engine-arg enforce_eager is what --mode says: use --mode.")
    pythons = vllm_python or (None,)
    reports: Sequence[LoadReport | DryLoadReport]
    with progress_display(quiet=quiet) as on_progress:
        if dry:
            from vexport.engine.dry.checkpoints import dry_load_checkpoints
            from vexport.reports import render_dry_loads

            reports = shown = dry_load_checkpoints(
                checkpoints,
                pythons,
                tp=tp or (1,),
                sm=sm,
                trust_remote_code=trust_remote_code,
                timeout=timeout,
                on_progress=on_progress,
            )
            text = render_dry_loads(shown, format_)
        else:
            from vexport.engine.session import require_engine
            from vexport.scenario.serve import Serve, with_options

            typed = {"max_model_len": max_model_len}
            serves = [
                with_options(Serve(timeout=timeout), {**typed, "tensor_parallel_size": size}, engine_args)
                for size in (tp if tp and given("tp") else (None,))
            ]
            require_engine(pythons)
            from vexport.reports import render_loads
            from vexport.run.loading import load_checkpoints
            from vexport.run.serving import EngineOptions

            options = EngineOptions(
                serve=serves[0],
                vllm_python=None,
                trust_remote_code=trust_remote_code,
                on_progress=on_progress,
            )
            modes: Sequence[EngineMode] = ("eager", "default") if mode == "both" else (mode,)
            reports = real = load_checkpoints(checkpoints, pythons, serves, modes, options)
            text = render_loads(real, format_)
    print_text(text)
    require_loaded(reports)


@command()
@click.argument("checkpoint", type=PATH)
@click.argument("out", type=PATH)
@click.option("--source", type=PATH, help="The unquantized checkpoint that CHECKPOINT was made from.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if vexport made it and nothing else is in it.")
@format_option(("text", "json"))
def repair(
    checkpoint: Path, out: Path, source: Path | None, overwrite: bool, format_: str, quiet: bool
) -> None:
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

    with progress_display(quiet=quiet) as on_progress:
        report = repair_checkpoint(checkpoint, out, source, overwrite=overwrite, on_progress=on_progress)
    print_text(render_repair(report, format_))
    require_ok(report.checkpoint, report.ok, report.refusals)


@command("diff")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@format_option(("text", "json"))
def diff_command(a: Path, b: Path, format_: str, quiet: bool) -> None:
    """Compare two checkpoints: config, tensors, values, sizes.

    Layers are compared dequantized, also a quantized one with its source. Exit code 1 where they differ.

    \b
    Examples:
      vexport diff OUT REPAIRED
      vexport diff MODEL OUT --format json
    """
    from vexport.cli.terminal import progress_display
    from vexport.diff import diff
    from vexport.reports.diff import render_diff

    with progress_display(quiet=quiet) as on_progress:
        report = diff(a, b, on_progress=lambda done, total: on_progress("compare", done, total))
    print_text(render_diff(report, format_))
    if not report.same:
        fix = "see the differences above" if is_read() else "see the differences in the answer"
        raise CheckpointFailed(str(b), got="other contents", need=f"those of {a}", fix=fix)
