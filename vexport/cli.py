"""The command line: thin commands over the pipeline; the only module that prints or exits.

Nothing heavy is imported at the top, so that `--help` answers at once: each command imports what it runs.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from vexport.errors import CheckpointFailed, Inconclusive, VexportError
from vexport.options import (
    FORMATS,
    PATH,
    POSITIVE,
    ByteSize,
    common_options,
    device_options,
    engine_options,
    format_option,
    plan_options,
    session_options,
    verdict_options,
)
from vexport.types import DryLoadReport, Finding, KvCache, LoadReport, OnMisfit
from vexport.version import __version__

REPORT_FORMATS = (*FORMATS, "html", "markdown")
ENVIRONMENT = 4
INTERRUPTED = 130
EXIT_CODES = """
Exit codes: 0 pass; 1 the checkpoint fails; 2 bad usage or input; 3 inconclusive; 4 the environment is at
fault (vLLM missing, crashed, out of memory, timed out); 130 interrupted.
"""


def main() -> None:
    """Run a command; every outcome becomes an exit code and one line an error."""
    try:
        result = cli.main(prog_name="vexport", standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        code = _say("interrupted; the same command goes on where it stopped", INTERRUPTED)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "vexport"
        code = _say(f"{command}: {error.format_message()} See `{command} --help`.", error.exit_code)
    except VexportError as error:
        code = _say(str(error), error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        code = _say(_unforeseen(error), ENVIRONMENT)
    sys.exit(code)


def _unforeseen(error: Exception) -> str:
    """One line for what no stage turned into an error of its own."""
    if isinstance(error, MemoryError):
        return "memory: got no more, need more than this machine has; free some or use a larger machine"
    if isinstance(error, OSError):
        place, reason = error.filename or "file system", error.strerror or error
        return (
            f"{place}: got {reason}, need a file that can be read and written; check path, space and rights"
        )
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"vexport: got an internal error ({text}), need none; call again with --debug and report it"


def _say(message: str, code: int) -> int:
    if "--debug" in sys.argv:
        traceback.print_exc()
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=EXIT_CODES
)
@click.version_option(__version__, prog_name="vexport")
def cli() -> None:
    """Quantize a Hugging Face checkpoint for vLLM, and show that it loads and is accurate enough.

    \b
    Start here:
      vexport run scenarios/demo-nvfp4.yaml                       everything, one verdict
      vexport quantize MODEL OUT --scheme FP8_DYNAMIC             a checkpoint for vLLM
      vexport check OUT                                           is it sound? no GPU, no vLLM
      vexport eval OUT --baseline MODEL --task gsm8k              is it accurate enough?
    """


@cli.command(epilog=EXIT_CODES)
@click.argument("scenario", type=PATH)
@click.option("--run-dir", type=PATH, help="Where everything goes [default: runs/NAME].")
@click.option("--overwrite", is_flag=True, help="Start again in a run directory that exists.")
@engine_options
@format_option(REPORT_FORMATS)
@common_options
def run(
    scenario: Path,
    run_dir: Path | None,
    overwrite: bool,
    vllm_python: Path | None,
    trust_remote_code: bool,
    format_: str,
    quiet: bool,
) -> None:
    """Every stage of SCENARIO: plan, calibrate, quantize, check, load in vLLM, evaluate, report.

    A second call goes on where the first one stopped.
    """
    from vexport.reports import render
    from vexport.run import run_scenario
    from vexport.scenario import read_scenario
    from vexport.serving import EngineOptions
    from vexport.terminal import progress_display

    parsed = read_scenario(scenario)
    folder = run_dir or Path("runs") / parsed.name
    with progress_display(quiet=quiet) as on_progress:
        options = EngineOptions(
            serve=parsed.serve,
            vllm_python=vllm_python,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
        report = run_scenario(parsed, folder, options, overwrite=overwrite)
    _print(render(report, format_))
    click.echo(f"report: {folder / 'report.html'}", err=format_ != "text")
    _conclude(report.outcome, report.name, report.reason)


@cli.command(epilog=EXIT_CODES)
@click.argument("source", metavar="SOURCE|SCENARIO")
@click.option("--scheme", metavar="S", help="Scheme for all linear layers; see `vexport list schemes`.")
@plan_options
@format_option(("text", "json"))
@common_options
def plan(
    source: str,
    scheme: str | None,
    observer: str,
    ignore: tuple[str, ...],
    kv_cache: KvCache | None,
    on_misfit: OnMisfit,
    tp: tuple[int, ...] | None,
    format_: str,
    quiet: bool,
) -> None:
    """What would be done to SOURCE (a folder or a hub id) or SCENARIO: layers, groups, sizes, refusals.

    Reads headers only.
    """
    from vexport.pipeline import plan_scenario, plan_source, rules_for
    from vexport.plan import Settings, require_accepted
    from vexport.reports.plan import render_plan
    from vexport.scenario import read_scenario

    evaluate = None
    if source.endswith((".yaml", ".yml")):
        if scheme:
            raise click.UsageError("--scheme does not go with a scenario, which has its own rules.")
        scenario = read_scenario(Path(source))
        _, made = plan_scenario(scenario)
        evaluate = scenario.evaluate
    elif scheme:
        settings = Settings(ranks=tp or (1,), on_misfit=on_misfit, kv_cache=kv_cache)
        _, made = plan_source(source, rules_for(scheme, observer=observer, ignore=ignore), settings)
    else:
        raise click.UsageError("SOURCE needs --scheme.")
    text = render_plan(made, format_)
    if evaluate is not None and format_ == "text":
        from vexport.reports.power import documents_needed

        text += documents_needed(evaluate)
    _print(text)
    require_accepted(made)


@cli.command(epilog=EXIT_CODES)
@click.argument("source")
@click.argument("out", type=PATH)
@click.option(
    "--scheme", metavar="S", required=True, help="Scheme for all linear layers; see `vexport list schemes`."
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
@click.option("--device", metavar="D", help="Where calibration runs [default: cuda if there is one].")
@click.option(
    "--max-shard-size", type=ByteSize(), default="5GB", show_default=True, help="Largest file of weights."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--trust-remote-code", is_flag=True, help="Let the checkpoint's own Python code run.")
@common_options
def quantize(
    source: str,
    out: Path,
    scheme: str,
    observer: str,
    ignore: tuple[str, ...],
    kv_cache: KvCache | None,
    on_misfit: OnMisfit,
    tp: tuple[int, ...] | None,
    calibration: Path | None,
    samples: int,
    seq_len: int,
    all_experts: bool,
    device: str | None,
    max_shard_size: int,
    overwrite: bool,
    trust_remote_code: bool,
    quiet: bool,
) -> None:
    """Quantize SOURCE (a folder or a hub id) into the folder OUT.

    lm_head, embeddings, norms and routers are kept. Layers that vLLM fuses share their scales. OUT
    appears whole or not at all; a call that was broken off goes on where it was when it is called again.
    """
    from vexport.pipeline import quantize_source, rules_for
    from vexport.plan import Settings
    from vexport.reports.sentences import size_change
    from vexport.scenario import Calibration
    from vexport.terminal import progress_display

    settings = None
    if calibration:
        settings = Calibration(
            data=calibration, samples=samples, seq_len=seq_len, all_experts=all_experts, device=device
        )
    with progress_display(quiet=quiet) as on_progress:
        made = quantize_source(
            source,
            out,
            rules_for(scheme, observer=observer, ignore=ignore),
            settings,
            planning=Settings(ranks=tp or (1,), on_misfit=on_misfit, kv_cache=kv_cache),
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
            shard_bytes=max_shard_size,
        )
    click.echo(f"{out}: {scheme}, {size_change(made)}")


@cli.command(epilog=EXIT_CODES)
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True)
@format_option()
@common_options
def check(checkpoints: tuple[str, ...], format_: str, quiet: bool) -> None:
    """Is each CHECKPOINT one that vLLM loads as it was meant? Reads files only: no GPU, no vLLM.

    Knows checkpoints of any producer. `vexport list checks` says what is looked at.
    """
    from vexport.checks import check_checkpoint
    from vexport.reports import render_checks

    reports = [check_checkpoint(name) for name in checkpoints]
    _print(render_checks(reports, format_))
    for report in reports:
        _require_ok(report.checkpoint, report.ok, report.findings)


@cli.command(epilog=EXIT_CODES)
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True)
@click.option("--dry", is_flag=True, help="Only the loading, from headers: no weights, no GPU.")
@device_options
@engine_options
@session_options
@format_option()
@common_options
def load(
    checkpoints: tuple[str, ...],
    dry: bool,
    tp: tuple[int, ...] | None,
    sm: tuple[int, ...] | None,
    vllm_python: Path | None,
    trust_remote_code: bool,
    timeout: int,
    max_model_len: int | None,
    format_: str,
    quiet: bool,
) -> None:
    """Load each CHECKPOINT in the real vLLM: greedy canaries, and log-probabilities against a reference.

    The reference is transformers with the stored weights dequantized by compressed-tensors.

    With --dry, vLLM's model class and weight loaders run on headers alone, for every --tp and --sm: what is
    refused, what gets no value or a converted one, which kernel each layer would get. Without --sm, SM 80,
    89, 90 and 100 are shown, and each --tp must load on one of them.
    """
    from vexport.reports import render_dry_loads, render_loads
    from vexport.scenario import Serve
    from vexport.serving import EngineOptions, dry_load_checkpoints, load_checkpoint
    from vexport.terminal import progress_display

    if not dry and (tp or sm):
        raise click.UsageError("--tp and --sm need --dry: a real load uses the devices that are there.")
    if dry and max_model_len:
        raise click.UsageError("--max-model-len does not go with --dry, which runs nothing.")
    with progress_display(quiet=quiet) as on_progress:
        options = EngineOptions(
            serve=Serve(timeout=timeout, max_model_len=max_model_len),
            vllm_python=vllm_python,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
        reports: Sequence[LoadReport | DryLoadReport]
        if dry:
            reports = shown = dry_load_checkpoints(checkpoints, tp or (1,), sm, options)
            text = render_dry_loads(shown, format_)
        else:
            reports = real = [load_checkpoint(name, options) for name in checkpoints]
            text = render_loads(real, format_)
    _print(text)
    for report in reports:
        _require_ok(report.checkpoint, report.ok, report.findings)


@cli.command("eval", epilog=EXIT_CODES)
@click.argument("checkpoint")
@click.option("--baseline", metavar="SOURCE", help="The unquantized checkpoint to compare with.")
@click.option(
    "--against", type=PATH, metavar="FILE", help="An accepted baseline to compare with; starts one engine."
)
@click.option(
    "--accept",
    type=PATH,
    metavar="FILE",
    help="Write CHECKPOINT's answers as an accepted baseline, unless it fails.",
)
@click.option(
    "--task", "tasks", multiple=True, required=True, metavar="NAME_OR_YAML", help="lm-eval task; repeatable."
)
@verdict_options
@click.option(
    "--stopping",
    type=click.Choice(("fixed", "early")),
    default="fixed",
    show_default=True,
    help="early: read CHECKPOINT's documents in random order until they decide.",
)
@click.option("--limit", type=POSITIVE, help="Use the first N documents of each task.")
@click.option("--output", type=PATH, help="Folder for lm-eval's files [default: runs/eval-NAME].")
@click.option("--overwrite", is_flag=True, help="Replace the output folder if it exists.")
@engine_options
@session_options
@format_option()
@common_options
def evaluate(
    checkpoint: str,
    baseline: str | None,
    against: Path | None,
    accept: Path | None,
    tasks: tuple[str, ...],
    margin: float,
    alpha: float,
    gate: dict[str, str],
    stopping: Literal["fixed", "early"],
    limit: int | None,
    output: Path | None,
    overwrite: bool,
    vllm_python: Path | None,
    trust_remote_code: bool,
    timeout: int,
    max_model_len: int | None,
    format_: str,
    quiet: bool,
) -> None:
    """Score CHECKPOINT and its baseline with lm-eval in vLLM, paired by document, and give a verdict.

    An accepted baseline is a small file for git: each document's score, and what else could change scores.
    Make one with --accept, in later runs compare --against it.
    """
    from vexport.evaluation.accepted import (
        accept_results,
        choice_of,
        gates_of,
        read_accepted,
        require_writable,
    )
    from vexport.reports import render_verdict
    from vexport.scenario import Evaluate, Serve
    from vexport.serving import CANDIDATE, EngineOptions, evaluate_checkpoint
    from vexport.terminal import progress_display

    if baseline and against or not (baseline or against or accept):
        raise click.UsageError("Give --baseline SOURCE or --against FILE, or --accept FILE alone.")
    if accept:
        require_writable(accept)
    if stopping == "early" and (accept or not (baseline or against)):
        raise click.UsageError("--stopping early needs a baseline, and leaves too little to --accept.")
    settings = Evaluate(
        tasks=tasks,
        margin=margin,
        alpha=alpha,
        gate=gate,
        stopping=stopping,
        limit=limit,
        baseline=baseline,
    )
    folder = output or Path("runs") / f"eval-{Path(checkpoint).name}"
    with progress_display(quiet=quiet) as on_progress:
        options = EngineOptions(
            serve=Serve(timeout=timeout, max_model_len=max_model_len),
            vllm_python=vllm_python,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
        verdict = evaluate_checkpoint(
            checkpoint, settings, folder, options, overwrite=overwrite, against=against
        )
    if verdict:
        _print(render_verdict(verdict, format_))
    if accept and (verdict is None or verdict.outcome != "FAIL"):
        choice = choice_of(read_accepted(against)) if against else gate
        accepted = accept_results(folder / CANDIDATE, accept, choice)
        click.echo(f"accepted: {accept}: {gates_of(accepted)}", err=verdict is not None)
    if verdict:
        _conclude(verdict.outcome, checkpoint, verdict.reason)


@cli.command("verdict", epilog=EXIT_CODES)
@click.argument("baseline_results", type=PATH)
@click.argument("results", type=PATH)
@verdict_options
@format_option()
@common_options
def verdict_command(
    baseline_results: Path,
    results: Path,
    margin: float,
    alpha: float,
    gate: dict[str, str],
    format_: str,
    quiet: bool,
) -> None:
    """PASS, FAIL or INCONCLUSIVE from two lm-eval output folders, wherever they were made.

    BASELINE_RESULTS may also be an accepted baseline (`vexport eval --accept`).

    Starts no model. Documents are paired by lm-eval's sample files (--log_samples); without them the means
    are compared by their standard errors, which takes many times the documents.
    """
    from vexport.reports import render_verdict
    from vexport.verdict import decide

    verdict = decide(baseline_results, results, margin=margin, alpha=alpha, gate=gate)
    _print(render_verdict(verdict, format_))
    _conclude(verdict.outcome, str(results), verdict.reason)


@cli.command(epilog=EXIT_CODES)
@click.argument("run_dir", type=PATH)
@format_option(REPORT_FORMATS)
@common_options
def report(run_dir: Path, format_: str, quiet: bool) -> None:
    """The report of a finished RUN_DIR in another form; its outcome is the exit code."""
    from vexport.reports import render
    from vexport.run import read_report

    read = read_report(run_dir)
    _print(render(read, format_))
    _conclude(read.outcome, read.name, read.reason)


@cli.command(epilog=EXIT_CODES)
@click.argument("checkpoint", type=PATH)
@click.argument("out", type=PATH)
@click.option("--source", type=PATH, help="The unquantized checkpoint that CHECKPOINT was made from.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@format_option(("text", "json"))
@common_options
def repair(
    checkpoint: Path, out: Path, source: Path | None, overwrite: bool, format_: str, quiet: bool
) -> None:
    """Mend CHECKPOINT into the folder OUT without calibration, and say what each mend costs.

    Global scales, targets and ignore, refused config keys, dtypes and shapes, index, missing KV scales; with
    --source also missing tensors. What cannot be mended is named, and then nothing is written.
    """
    from vexport.repair import repair_checkpoint
    from vexport.reports.repair import render_repair
    from vexport.terminal import progress_display

    with progress_display(quiet=quiet) as on_progress:
        report = repair_checkpoint(checkpoint, out, source, overwrite=overwrite, on_progress=on_progress)
    _print(render_repair(report, format_))
    _require_ok(report.checkpoint, report.ok, report.refusals)


@cli.command("diff", epilog=EXIT_CODES)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@format_option(("text", "json"))
@common_options
def diff_command(a: Path, b: Path, format_: str, quiet: bool) -> None:
    """What differs between the checkpoints A and B: config, tensors, values, sizes.

    Layers are compared dequantized, also a quantized one with its source. Exit code 1 where they differ.
    """
    from vexport.diff import diff
    from vexport.reports.diff import render_diff
    from vexport.terminal import progress_display

    with progress_display(quiet=quiet) as on_progress:
        report = diff(a, b, on_progress=lambda done, total: on_progress("compare", done, total))
    _print(render_diff(report, format_))
    if not report.same:
        raise CheckpointFailed(str(b), got="a checkpoint that differs", need=f"that of {a}", fix="see above")


@cli.command("list")
@click.argument("what", type=click.Choice(("schemes", "observers", "checks", "architectures")))
@format_option(("text", "json"))
@common_options
def list_command(what: str, format_: str, quiet: bool) -> None:
    """What vexport knows: schemes, observers, checks or architectures."""
    from vexport.catalog import render_catalog

    _print(render_catalog(what, format_))


def _print(text: str) -> None:
    click.echo(text, nl=not text.endswith("\n"))


def _require_ok(checkpoint: str, ok: bool, findings: Sequence[Finding]) -> None:
    """Exit with 1 where a checkpoint has an error finding, naming the first."""
    if ok:
        return
    errors = [finding for finding in findings if finding.severity == "error"]
    more = f" ({len(errors) - 1} more above)" if len(errors) > 1 else ""
    first = errors[0]
    raise CheckpointFailed(
        f"{checkpoint}: {first.where}", got=first.got, need=first.expected, fix=first.fix + more
    )


def _conclude(outcome: str, name: str, reason: str) -> None:
    """Exit with 1 for FAIL and 3 for INCONCLUSIVE."""
    if outcome == "FAIL":
        fix = "see the report; keep the worst layers or choose a scheme with more bits"
        raise CheckpointFailed(name, got=f"FAIL: {reason}", need="a loss within the margin", fix=fix)
    if outcome == "INCONCLUSIVE":
        fix = "use more documents or a wider margin"
        raise Inconclusive(name, got=f"INCONCLUSIVE: {reason}", need="evidence that settles it", fix=fix)
