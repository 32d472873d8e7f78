"""Is a checkpoint accurate enough."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.base import command, conclude, print_text
from vexport.cli.engine import (
    Interpreter,
    Session,
    interpreter_option,
    serve_options,
    session_options,
)
from vexport.cli.options import PATH, POSITIVE, Answer, format_option
from vexport.cli.prompting import PromptOptions, prompting_options
from vexport.cli.verdict import DriftOptions, VerdictOptions, drift_options, verdict_options
from vexport.types import Verdict

if TYPE_CHECKING:
    from vexport.run.evaluating import EvalJob
    from vexport.scenario import Evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What CHECKPOINT is compared with, and where its answers go as the next baseline."""

    baseline: str | None
    against: Path | None
    accept: Path | None

    def require_consistent(self, drift: DriftOptions) -> None:
        """UsageError where options of `eval` do not go together."""
        compared = bool(self.baseline or self.against)
        if self.baseline and self.against or not (compared or self.accept):
            raise click.UsageError("Give --baseline SOURCE or --against FILE, or --accept FILE alone.")
        if (drift.kl_limit or drift.nll_limit) and not self.baseline:
            raise click.UsageError(
                "--kl-limit and --nll-limit need --baseline, whose log-probabilities they bound."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What both models are asked: tasks, or text that they read."""

    tasks: tuple[str, ...]
    text: str | None
    text_rows: int | None
    text_tokens: int | None

    def require_consistent(self, comparison: Comparison) -> None:
        """UsageError where options of `eval` do not go together."""
        if bool(self.tasks) == bool(self.text):
            raise click.UsageError("Give --task NAME_OR_YAML, or --text DATA in the place of tasks.")
        if self.text is None:
            if self.text_rows or self.text_tokens:
                raise click.UsageError("--text-rows and --text-tokens need --text.")
            return
        if comparison.baseline is None or comparison.accept:
            raise click.UsageError("--text needs --baseline SOURCE alone: both models read it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Where lm-eval's files go."""

    output_dir: Path | None
    overwrite: bool


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
    metavar="NAME_OR_YAML",
    help="lm-eval task; repeatable.",
)
@click.option(
    "--text",
    metavar="DATA",
    help="Held-out text that decides in the place of tasks (file or data set).",
)
@click.option("--text-rows", type=POSITIVE, metavar="N", help="Rows of the text [default: 32].")
@click.option("--text-tokens", type=POSITIVE, metavar="N", help="Tokens of a row [default: 512].")
@verdict_options
@drift_options
@prompting_options
@click.option(
    "--output-dir",
    type=PATH,
    metavar="DIR",
    help="Folder for lm-eval's files [default: runs/eval-NAME].",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the output folder if vexport made it and nothing else is in it.",
)
@interpreter_option
@serve_options
@session_options
@format_option(names=("-o", "--output-file"))
def evaluate(
    checkpoint: str,
    comparison: Comparison,
    subject: Subject,
    verdict: VerdictOptions,
    drift: DriftOptions,
    prompts: PromptOptions,
    results: Results,
    interpreter: Interpreter,
    tp: int | None,
    session: Session,
    answer: Answer,
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
      vexport eval OUT --baseline MODEL --text held-out.jsonl
    """
    from vexport.cli.terminal import progress_display
    from vexport.engine.session import require_engine

    prompts.require_consistent()
    comparison.require_consistent(drift)
    subject.require_consistent(comparison)
    serve = session.serve(tp)
    require_engine((interpreter.vllm_python,))
    from vexport.run.evaluating import EvalJob, evaluate_checkpoint

    with progress_display(quiet=answer.quiet) as on_progress:
        job = EvalJob(
            checkpoint=checkpoint,
            settings=_settings(subject, comparison.baseline, verdict, drift, prompts),
            folder=results.output_dir or Path("runs") / f"eval-{Path(checkpoint).name}",
            options=interpreter.options(serve, on_progress),
            overwrite=results.overwrite,
            against=comparison.against,
            accept=comparison.accept,
        )
        judged = evaluate_checkpoint(job)
    _answer(job, judged, answer)


def _settings(
    subject: Subject,
    baseline: str | None,
    verdict: VerdictOptions,
    drift: DriftOptions,
    prompts: PromptOptions,
) -> "Evaluate":
    """The options as what a scenario says under `evaluate`; InputErrors for values out of bounds."""
    from vexport.scenario import (
        DEFAULT_KL_LIMIT,
        DEFAULT_NLL_LIMIT,
        DEFAULT_TEXT_ROWS,
        DEFAULT_TEXT_TOKENS,
        Evaluate,
        problems_at,
    )

    with problems_at("eval"):
        return Evaluate(
            tasks=subject.tasks,
            text=subject.text,
            text_rows=subject.text_rows or DEFAULT_TEXT_ROWS,
            text_tokens=subject.text_tokens or DEFAULT_TEXT_TOKENS,
            baseline=baseline,
            margin=verdict.margin,
            alpha=verdict.alpha,
            gate=verdict.gate,
            kl_limit=drift.kl_limit or DEFAULT_KL_LIMIT,
            nll_limit=drift.nll_limit or DEFAULT_NLL_LIMIT,
            num_fewshot=prompts.num_fewshot,
            apply_chat_template=prompts.chat_template or prompts.apply_chat_template,
            fewshot_as_multiturn=prompts.fewshot_as_multiturn,
            system_instruction=prompts.system_instruction,
            gen_kwargs=prompts.gen_kwargs,
            max_gen_toks=prompts.max_gen_toks,
            think_end_token=prompts.think_end_token,
            enable_thinking=prompts.enable_thinking,
            include_path=tuple(path.resolve() for path in prompts.include_path),
            batch_size=prompts.batch_size,
            limit=prompts.limit,
        )


def _answer(job: "EvalJob", verdict: Verdict | None, answer: Answer) -> None:
    """Print the verdict, write the accepted baseline, and exit by the outcome."""
    from vexport.reports import render_verdict
    from vexport.run.evaluating import accept_answers

    if verdict:
        print_text(render_verdict(verdict, answer.format_))
    if text := accept_answers(job, verdict):
        click.echo(text, err=verdict is not None)
    if verdict:
        conclude(verdict.outcome, job.checkpoint, verdict.reason)
