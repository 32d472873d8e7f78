"""A plan from headers, and the checkpoint that comes of it."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.base import command, note, print_text, require_plan
from vexport.cli.completion import complete_scheme
from vexport.cli.effects import (
    CALIBRATION_OPTIONS,
    PLAN_OPTIONS,
    given_values,
    note_unused,
    note_unused_calibration,
    require_scenario_alone,
)
from vexport.cli.options import (
    PATH,
    POSITIVE,
    ByteSize,
    format_option,
    is_scenario,
    plan_options,
    revision_option,
    trust_option,
)
from vexport.types import ExpertCoverage, KvCache, OnUnsupportedShape, Plan

if TYPE_CHECKING:
    from vexport.plan.estimates import Samples
    from vexport.scenario import Calibration


@command()
@click.argument("source", metavar="SOURCE|SCENARIO")
@revision_option
@click.option(
    "--scheme",
    metavar="S",
    shell_complete=complete_scheme,
    help="Scheme for all linear layers; see `vexport list schemes`.",
)
@click.option(
    "--run-dir", type=PATH, help="Where `run` measured what scheme: auto chooses by [default: runs/NAME]."
)
@plan_options
@format_option(("text", "json"))
def plan(
    source: str,
    revision: str | None,
    scheme: str | None,
    run_dir: Path | None,
    observer: str,
    ignore: tuple[str, ...],
    kv_cache: KvCache | None,
    on_unsupported_shape: OnUnsupportedShape,
    tp: tuple[int, ...] | None,
    format_: str,
    quiet: bool,
) -> None:
    """Show what quantizing would do: layers, size, problems, time.

    SOURCE is a folder or a hub id (ORG/NAME or ORG/NAME@REVISION). Reads headers only, also from the hub.
    Without --scheme it compares all schemes.

    \b
    Examples:
      vexport plan MODEL
      vexport plan MODEL --scheme FP8_DYNAMIC
      vexport plan MODEL --scheme W4A16 --tp 2
      vexport plan SCENARIO.yaml
    """
    from vexport.checkpoint.source import with_revision
    from vexport.cli.terminal import progress_display
    from vexport.plan import Settings
    from vexport.plan.outlook import outlook
    from vexport.plan.source import ignored_rules, plan_headers, rules_for, table_of_schemes
    from vexport.reports.plan import render_plan, render_table
    from vexport.scenario import read_scenario
    from vexport.sensitivity.auto import plan_scenario

    evaluate = None
    if run_dir and not is_scenario(source):
        raise click.UsageError("--run-dir needs a SCENARIO: scheme: auto chooses by what a run measured.")
    if is_scenario(source):
        scenario = read_scenario(Path(source))
        require_scenario_alone()
        if revision:
            raise click.UsageError("--revision cannot be used with a scenario; set `revision` in it.")
        if run_dir and scenario.auto is None:
            note("--run-dir has no effect: no rule of the scenario has scheme: auto")
        with progress_display(quiet=quiet) as on_progress:
            index, made = plan_scenario(scenario, run_dir, on_progress)
        evaluate, samples = scenario.evaluate, _samples(scenario.calibration)
        then = shlex.join(["vexport", "run", source, *given_values("run_dir")])
    elif scheme:
        settings = Settings(ranks=tp or (1,), on_unsupported_shape=on_unsupported_shape, kv_cache=kv_cache)
        rules = rules_for(scheme, observer=observer, ignore=ignore)
        with progress_display(quiet=quiet) as on_progress:
            index, made = plan_headers(with_revision(source, revision), rules, settings, on_progress)
        samples = _samples(None)
        then = _quantize_command(source, made)
    else:
        note_unused(("observer", "on_unsupported_shape"), "without --scheme")
        settings = Settings(ranks=tp or (1,), kv_cache=kv_cache)
        kept = ignored_rules(ignore)
        with progress_display(quiet=quiet) as on_progress:
            table = table_of_schemes(with_revision(source, revision), kept, settings, on_progress)
        print_text(render_table(table, format_))
        return
    seen = outlook(index, made, samples, then)
    print_text(render_plan(made, seen, format_, evaluate))
    require_plan(source, made)


def _quantize_command(source: str, plan: Plan) -> str:
    """The command that does what was planned, into a folder named after source and scheme."""
    from vexport.plan.needs import calibration_need

    out = f"{Path(source).resolve().name}-{'-'.join(plan.schemes)}"
    calibration = ["--calibration", "FILE.jsonl"] if calibration_need(plan) else []
    return shlex.join(
        ["vexport", "quantize", source, out, *given_values("revision", *PLAN_OPTIONS), *calibration]
    )


def _samples(settings: "Calibration | None") -> "Samples":
    """The calibration samples of a scenario, or those that `quantize` takes by itself."""
    from vexport.plan.estimates import Samples
    from vexport.scenario import DEFAULT_SAMPLES, DEFAULT_SEQ_LEN

    if settings is None:
        return Samples(number=DEFAULT_SAMPLES, tokens=DEFAULT_SEQ_LEN)
    return Samples(number=settings.samples, tokens=settings.seq_len)


@command()
@click.argument("source")
@click.argument("out", type=PATH)
@revision_option
@click.option(
    "--scheme",
    metavar="S",
    required=True,
    shell_complete=complete_scheme,
    help="Scheme for all linear layers; see `vexport list schemes`.",
)
@plan_options
@click.option("--calibration", type=PATH, metavar="FILE.jsonl", help="Samples for static input scales.")
@click.option(
    "--samples", type=POSITIVE, default=128, show_default=True, help="Rows of the calibration to use."
)
@click.option("--seq-len", type=POSITIVE, default=512, show_default=True, help="Tokens of a row to use.")
@click.option(
    "--calibrate-all-experts/--no-calibrate-all-experts",
    "all_experts",
    default=True,
    show_default=True,
    help="Show every expert all tokens, or those routed to it.",
)
@click.option(
    "--device",
    metavar="D",
    help="Where calibration runs: cpu, cuda, cuda:1 ... [default: cuda if there is one].",
)
@click.option(
    "--max-shard-size", type=ByteSize(), default="5GB", show_default=True, help="Largest file of weights."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if vexport made it and nothing else is in it.")
@trust_option
@format_option(("text", "json"))
def quantize(
    source: str,
    out: Path,
    revision: str | None,
    scheme: str,
    observer: str,
    ignore: tuple[str, ...],
    kv_cache: KvCache | None,
    on_unsupported_shape: OnUnsupportedShape,
    tp: tuple[int, ...] | None,
    calibration: Path | None,
    samples: int,
    seq_len: int,
    all_experts: bool,
    device: str | None,
    max_shard_size: int,
    overwrite: bool,
    trust_remote_code: bool,
    format_: str,
    quiet: bool,
) -> None:
    """Quantize SOURCE, a folder or a hub id (ORG/NAME or ORG/NAME@REVISION), into the folder OUT.

    lm_head, embeddings, norms and routers are kept. Layers that vLLM fuses share their scales. OUT is written
    atomically; rerun an interrupted command to resume.

    \b
    Examples:
      vexport quantize MODEL OUT --scheme FP8_DYNAMIC
      vexport quantize MODEL OUT --scheme NVFP4 --calibration chats.jsonl --samples 256
      vexport quantize MODEL OUT --scheme W4A16 --ignore re:.*layers[.]0[.].*
    """
    from vexport.checkpoint.source import with_revision
    from vexport.cli.terminal import progress_display
    from vexport.plan import Settings
    from vexport.plan.source import rules_for
    from vexport.quantize.job import QuantizeJob, is_rank_zero, quantize_source
    from vexport.reports.quantized import quantized_answer, render_quantized
    from vexport.scenario import Calibration

    settings = None
    if calibration is None and is_rank_zero():
        note_unused(CALIBRATION_OPTIONS, "without --calibration")
    if calibration:
        settings = Calibration(
            data=calibration, samples=samples, seq_len=seq_len, all_experts=all_experts, device=device
        )
    with progress_display(quiet=quiet or not is_rank_zero()) as on_progress:
        job = QuantizeJob(
            source=with_revision(source, revision),
            out=out,
            rules=rules_for(scheme, observer=observer, ignore=ignore),
            planning=Settings(ranks=tp or (1,), on_unsupported_shape=on_unsupported_shape, kv_cache=kv_cache),
            calibration=settings,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            shard_bytes=max_shard_size,
            on_progress=on_progress,
        )
        notes = note_unused_calibration if calibration and is_rank_zero() else lambda plan: None
        made, seen = quantize_source(job, notes)
    if not is_rank_zero():
        return
    experts: tuple[ExpertCoverage, ...] = ()
    if seen is not None:
        from vexport.calibration.coverage import expert_coverage

        experts = expert_coverage(seen)
    answer = quantized_answer(str(out), made, seen, experts)
    for warning in answer.warnings:
        click.echo(f"warning: {warning}", err=True)
    print_text(render_quantized(answer, format_))
