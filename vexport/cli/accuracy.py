"""Is a checkpoint accurate enough."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from vexport.cli.base import command, conclude, print_text
from vexport.cli.completion import complete_task
from vexport.cli.effects import note_unused
from vexport.cli.help import RenamedOption
from vexport.cli.options import (
    PATH,
    drift_options,
    engine_options,
    format_option,
    serve_options,
    session_options,
    verdict_options,
)
from vexport.cli.prompting import GenerationValues, prompting_options
from vexport.types import BatchSize

if TYPE_CHECKING:
    from pydantic import JsonValue


@command("eval")
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
    "--task",
    "tasks",
    multiple=True,
    required=True,
    metavar="NAME_OR_YAML",
    shell_complete=complete_task,
    help="lm-eval task; repeatable.",
)
@verdict_options
@drift_options
@click.option(
    "--stopping",
    type=click.Choice(("fixed", "early")),
    default="fixed",
    show_default=True,
    help="early: stop as soon as the result is statistically clear.",
)
@prompting_options
@click.option(
    "--output-dir",
    "--output",
    cls=RenamedOption,
    type=PATH,
    metavar="DIR",
    help="Folder for lm-eval's files [default: runs/eval-NAME].",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the output folder if vexport made it and nothing else is in it.",
)
@engine_options
@serve_options
@session_options
@format_option(names=("-o", "--output-file"))
def evaluate(
    checkpoint: str,
    baseline: str | None,
    against: Path | None,
    accept: Path | None,
    tasks: tuple[str, ...],
    margin: float,
    alpha: float,
    gate: dict[str, str],
    kl_limit: float | None,
    nll_limit: float | None,
    stopping: Literal["fixed", "early"],
    num_fewshot: int | None,
    apply_chat_template: bool | None,
    chat_template: str | None,
    fewshot_as_multiturn: bool | None,
    system_instruction: str | None,
    gen_kwargs: GenerationValues,
    max_gen_toks: int | None,
    think_end_token: str | None,
    enable_thinking: bool | None,
    include_path: tuple[Path, ...],
    batch_size: BatchSize,
    limit: int | float | None,
    output_dir: Path | None,
    overwrite: bool,
    vllm_python: Path | None,
    trust_remote_code: bool,
    tp: int | None,
    engine_args: dict[str, "JsonValue"],
    timeout: int,
    max_model_len: int | None,
    format_: str,
    quiet: bool,
) -> None:
    """Compare CHECKPOINT's accuracy with its baseline's, by lm-eval in vLLM.

    Both answer the same documents; the verdict is PASS, FAIL or INCONCLUSIVE. An accepted baseline is a small
    file for git: each document's score, and what else could change scores. Make one with --accept, and
    compare later checkpoints --against it.

    \b
    Examples:
      vexport eval OUT --baseline MODEL --task gsm8k --margin 0.02
      vexport eval OUT --task gsm8k --accept accepted.json
      vexport eval NEXT --task gsm8k --against accepted.json
    """
    from vexport.engine.session import require_engine
    from vexport.scenario.serve import Serve, with_options

    if chat_template and apply_chat_template is False:
        raise click.UsageError("--chat-template names a template, --no-apply-chat-template applies none.")
    if fewshot_as_multiturn and apply_chat_template is False:
        raise click.UsageError("--fewshot-as-multiturn needs a chat template: drop --no-apply-chat-template.")
    if enable_thinking and not think_end_token:
        raise click.UsageError("--enable-thinking needs --think-end-token, to cut the thinking off answers.")
    _require_a_question(baseline, against, accept, early=stopping == "early", limits=kl_limit or nll_limit)
    if not (baseline or against):
        note_unused(("margin", "alpha", "format_"), "with --accept alone: nothing is compared")
    typed = {"tensor_parallel_size": tp, "max_model_len": max_model_len}
    serve = with_options(Serve(timeout=timeout), typed, engine_args)
    require_engine((vllm_python,))
    from vexport.cli.terminal import progress_display
    from vexport.evaluation.accepted import (
        accept_results,
        choice_of,
        gates_of,
        read_accepted,
        require_writable,
    )
    from vexport.reports import render_verdict
    from vexport.run.evaluating import EvalJob, evaluate_checkpoint
    from vexport.run.serving import CANDIDATE, EngineOptions
    from vexport.scenario import DEFAULT_KL_LIMIT, DEFAULT_NLL_LIMIT, Evaluate, problems_at

    if accept:
        require_writable(accept)
    with problems_at("eval"):
        settings = Evaluate(
            tasks=tasks,
            num_fewshot=num_fewshot,
            apply_chat_template=chat_template or apply_chat_template,
            fewshot_as_multiturn=fewshot_as_multiturn,
            system_instruction=system_instruction,
            gen_kwargs=gen_kwargs,
            max_gen_toks=max_gen_toks,
            think_end_token=think_end_token,
            enable_thinking=enable_thinking,
            include_path=tuple(path.resolve() for path in include_path),
            batch_size=batch_size,
            margin=margin,
            alpha=alpha,
            gate=gate,
            stopping=stopping,
            limit=limit,
            baseline=baseline,
            kl_limit=kl_limit or DEFAULT_KL_LIMIT,
            nll_limit=nll_limit or DEFAULT_NLL_LIMIT,
        )
    folder = output_dir or Path("runs") / f"eval-{Path(checkpoint).name}"
    with progress_display(quiet=quiet) as on_progress:
        options = EngineOptions(
            serve=serve,
            vllm_python=vllm_python,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
        verdict = evaluate_checkpoint(
            EvalJob(
                checkpoint=checkpoint,
                settings=settings,
                folder=folder,
                options=options,
                overwrite=overwrite,
                against=against,
                accept=accept,
            )
        )
    if verdict:
        print_text(render_verdict(verdict, format_))
    if accept and (verdict is None or verdict.outcome != "FAIL"):
        choice = choice_of(read_accepted(against)) if against else gate
        accepted = accept_results(folder / CANDIDATE, accept, choice)
        click.echo(f"accepted: {accept}: {gates_of(accepted)}", err=verdict is not None)
    if verdict:
        conclude(verdict.outcome, checkpoint, verdict.reason)


def _require_a_question(
    baseline: str | None, against: Path | None, accept: Path | None, *, early: bool, limits: float | None
) -> None:
    """UsageError where options of `eval` do not go together."""
    if baseline and against or not (baseline or against or accept):
        raise click.UsageError("Give --baseline SOURCE or --against FILE, or --accept FILE alone.")
    if early and (accept or not (baseline or against)):
        raise click.UsageError("--stopping early needs a baseline, and leaves too little to --accept.")
    if limits and not baseline:
        raise click.UsageError(
            "--kl-limit and --nll-limit need --baseline, whose log-probabilities they bound."
        )


@command("verdict")
@click.argument("baseline_results", type=PATH)
@click.argument("results", type=PATH)
@verdict_options
@format_option()
def verdict_command(
    baseline_results: Path,
    results: Path,
    margin: float,
    alpha: float,
    gate: dict[str, str],
    format_: str,
    quiet: bool,
) -> None:
    """Compare two lm-eval result folders; starts no model.

    The folders may come from anywhere. BASELINE_RESULTS may also be an accepted baseline
    (`vexport eval --accept`). Documents are paired by lm-eval's sample files (--log_samples); without them
    the means are compared by their standard errors, which takes many times the documents.

    \b
    Examples:
      vexport verdict results/base results/quantized --margin 0.02
      vexport verdict results/base results/quantized --gate gsm8k=exact_match,flexible-extract
    """
    from vexport.evaluation.verdict import decide
    from vexport.reports import render_verdict

    verdict = decide(baseline_results, results, margin=margin, alpha=alpha, gate=gate)
    print_text(render_verdict(verdict, format_))
    conclude(verdict.outcome, str(results), verdict.reason)
