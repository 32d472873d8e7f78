"""Is a checkpoint accurate enough."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.base import add_text_summary, command, conclude, print_text
from vexport.cli.engine import (
    ExplanationOptions,
    Interpreter,
    Session,
    attribution_options,
    interpreter_option,
    serve_options,
    session_options,
)
from vexport.cli.options import PATH, POSITIVE, Answer, Real, answer_file, format_option, stacked
from vexport.cli.prompting import PromptOptions, prompting_options
from vexport.cli.verdict import DriftOptions, VerdictOptions, drift_options, verdict_options
from vexport.records.accuracy import DEFAULT_CONCURRENCY, REQUEST_SECONDS

if TYPE_CHECKING:
    from vexport.records import Verdict
    from vexport.run.evaluating import EvalJob, Judged
    from vexport.scenario import Evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The baseline, and the file that CHECKPOINT's answers are accepted into."""

    baseline: str | None
    against: Path | None
    accept: Path | None

    def with_accepted(self) -> "Comparison":
        """With an accepted baseline that is given as --baseline in its place."""
        from vexport.evaluation.accepted import is_accepted

        path = Path(self.baseline or "")
        if self.against or path.suffix != ".json" or not is_accepted(path):
            return self
        return replace(self, baseline=None, against=path)

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
    """The questions to both models: tasks, or text that they read."""

    tasks: tuple[str, ...]
    text: str | None
    text_rows: int | None
    text_tokens: int | None
    speculative: str | None

    def require_consistent(self, comparison: Comparison) -> None:
        """UsageError where options of `eval` do not go together."""
        if bool(self.tasks) == bool(self.text):
            raise click.UsageError("Give --task NAME_OR_YAML, or --text DATA in the place of tasks.")
        if self.text is None:
            if self.text_rows or self.text_tokens or self.speculative:
                raise click.UsageError("--text-rows, --text-tokens and --speculative need --text.")
            return
        if comparison.baseline is None or comparison.accept:
            raise click.UsageError("--text needs --baseline SOURCE alone: both models read it.")


def _tasks(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Each task; a name that is the path of a file is one, whatever is in it."""
    return tuple(
        task.strip()
        for value in values
        for task in ([value] if Path(value).exists() else value.split(","))
        if task.strip()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a served model is asked."""

    tokenizer: str | None
    model: str | None
    baseline_model: str | None
    concurrency: int
    request_timeout: float
    retry_seconds: float


served_options = stacked(
    click.option("--tokenizer", metavar="T", help="Folder or ORG/NAME of a served model's tokenizer."),
    click.option("--model", metavar="NAME", help="The model, where a server has several."),
    click.option("--baseline-model", metavar="NAME", help="The same for the baseline [default: --model]."),
    click.option(
        "--concurrency",
        type=click.IntRange(1, 4096),
        metavar="N",
        default=DEFAULT_CONCURRENCY,
        show_default=True,
        help="Requests under way at a server.",
    ),
    click.option(
        "--request-timeout",
        type=Real(0, min_open=True),
        metavar="S",
        default=REQUEST_SECONDS,
        help="Longest time for one answer of a server [default: 300].",
    ),
    click.option(
        "--retry-seconds",
        type=Real(0),
        metavar="S",
        default=REQUEST_SECONDS,
        help="How long a server that fails is tried again [default: 300].",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The folder of lm-eval's files."""

    output_dir: Path | None
    overwrite: bool


# Few need these; the reference has them.
@command(
    "eval",
    unlisted=(
        "text_rows",
        "text_tokens",
        "speculative",
        "batch_size",
        "fewshot_as_multiturn",
        "baseline_model",
        "request_timeout",
        "retry_seconds",
        "attribution_seconds",
        "timeout",
    ),
)
@click.argument("checkpoints", metavar="CHECKPOINT|URL...", nargs=-1, required=True)
@click.option("--baseline", metavar="SOURCE|URL", help="The unquantized checkpoint to compare with.")
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
    "--tasks",
    "tasks",
    multiple=True,
    metavar="T,...",
    callback=_tasks,
    help="Tasks of lm-eval, by name or YAML file; repeatable.",
)
@click.option(
    "--text",
    metavar="DATA",
    help="Held-out text that decides in the place of tasks.",
)
@click.option("--text-rows", type=POSITIVE, metavar="N", help="Rows of the text [default: 32].")
@click.option("--text-tokens", type=POSITIVE, metavar="N", help="Tokens of a row [default: 512].")
@click.option(
    "--speculative",
    metavar="METHOD",
    help="Also compare the acceptance length of drafts: mtp, ngram, eagle3=FOLDER.",
)
@verdict_options
@drift_options
@attribution_options
@prompting_options
@served_options
@click.option(
    "--output-dir",
    type=PATH,
    metavar="DIR",
    help="Folder for lm-eval's files [default: runs/eval-NAME].",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the output folder, if it is vexport's alone.",
)
@interpreter_option
@serve_options
@session_options
@format_option(names=("-o", "--output-file", "--output"))
def evaluate(
    checkpoints: tuple[str, ...],
    comparison: Comparison,
    subject: Subject,
    verdict: VerdictOptions,
    drift: DriftOptions,
    explanation: ExplanationOptions,
    prompts: PromptOptions,
    asking: Asking,
    results: Results,
    interpreter: Interpreter,
    tp: int | None,
    session: Session,
    answer: Answer,
) -> None:
    """Compare CHECKPOINT's accuracy with its baseline's, by lm-eval in vLLM.

    Both answer the same documents; the verdict (PASS, FAIL or INCONCLUSIVE) comes first, then the cause
    where it is not PASS. Several checkpoints give a table. An accepted baseline is a small file for git with
    each document's score: make one with --accept, and compare later checkpoints --against it. Either side
    may be lm-eval's results, or the address of a server's OpenAI API, whose key is VEXPORT_API_KEY.

    \b
    Examples:
      vexport eval OUT --baseline MODEL --task gsm8k --margin 0.02
      vexport eval OUT --task gsm8k --accept accepted.json
      vexport eval NEXT --task gsm8k --against accepted.json
      vexport eval OUT --baseline MODEL --text held-out.jsonl
      vexport eval http://new:8000/v1 --baseline http://old:8000/v1 --task gsm8k
    """
    from vexport.cli.terminal import progress_display
    from vexport.engine.session import require_engine

    prompts.require_consistent()
    comparison = comparison.with_accepted()
    comparison.require_consistent(drift)
    subject.require_consistent(comparison)
    serve = session.serve(tp)
    require_engine((interpreter.vllm_python,))
    from vexport.run.evaluating import EvalJob, evaluate_checkpoints, explained

    if len(checkpoints) > 1 and comparison.accept:
        raise click.UsageError("--accept takes the answers of one CHECKPOINT.")
    last = f"and-{len(checkpoints) - 1}-more" if len(checkpoints) > 1 else ""
    first = checkpoints[0].partition("://")[2].replace(":", "-").split("/")[0] or Path(checkpoints[0]).name
    name = "-".join(filter(None, (first, last)))
    with progress_display(quiet=answer.quiet) as on_progress:
        job = EvalJob(
            checkpoints=checkpoints,
            settings=_settings(subject, comparison.baseline, verdict, drift, prompts, asking),
            folder=results.output_dir or Path("runs") / f"eval-{name}",
            options=interpreter.options(serve, on_progress),
            overwrite=results.overwrite,
            against=comparison.against,
            accept=comparison.accept,
        )
        judged = evaluate_checkpoints(job)
    is_shown = _show_first(judged, answer)
    with progress_display(quiet=answer.quiet) as on_progress:
        judged = [explained(job, one, explanation.settings, on_progress) for one in judged]
    _answer(job, judged, answer, is_shown=is_shown)


def _settings(
    subject: Subject,
    baseline: str | None,
    verdict: VerdictOptions,
    drift: DriftOptions,
    prompts: PromptOptions,
    asking: Asking,
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
            speculative=subject.speculative,
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
            seeds=prompts.seeds,
            max_gen_toks=prompts.max_gen_toks,
            think_end_token=prompts.think_end_token,
            enable_thinking=prompts.enable_thinking,
            include_path=tuple(path.resolve() for path in prompts.include_path),
            batch_size=prompts.batch_size,
            limit=prompts.limit,
            **asdict(asking),
        )


def _show_first(judged: "Sequence[Judged]", answer: Answer) -> bool:
    """Return whether the answer is shown before its cause is looked for: of another form, or in a file, it
    is whole.

    Then a line on stderr tells it.
    """
    from vexport.run.judging import first_line

    verdicts = [one.verdict for one in judged if one.verdict]
    is_shown = answer.format_ == "text" and answer_file(click.get_current_context()) is None
    if is_shown and verdicts:
        print_text(_text(judged))
    elif not answer.quiet:
        for verdict in verdicts:
            click.echo(f"{verdict.checkpoint}: {first_line(verdict)}", err=True)
    return is_shown


def _text(judged: "Sequence[Judged]") -> str:
    """The verdict, or the table of several checkpoints."""
    from vexport.reports import render_comparison, render_verdict
    from vexport.run.evaluating import compared

    if len(judged) > 1:
        return render_comparison(compared(judged), "text")
    assert judged[0].verdict is not None
    return render_verdict(judged[0].verdict, "text")


def _whole(judged: "Sequence[Judged]", verdicts: "Sequence[Verdict]", format_: str, *, is_shown: bool) -> str:
    """The answer, or of one whose verdict is shown the causes."""
    from vexport.reports import render_cause, render_verdict, render_verdicts

    if format_ != "text":
        return (
            render_verdict(verdicts[0], format_) if len(verdicts) == 1 else render_verdicts(verdicts, format_)
        )
    if len(verdicts) == 1:
        cause = render_cause(verdicts[0])
        return _text(judged) if not is_shown else f"\n{cause}" if cause else ""
    causes = [f"\n{verdict.checkpoint}\n{cause}" for verdict in verdicts if (cause := render_cause(verdict))]
    return "".join(causes if is_shown else [_text(judged), *causes])


def _answer(job: "EvalJob", judged: "Sequence[Judged]", answer: Answer, *, is_shown: bool) -> None:
    """Print what has not been shown, write the accepted baseline, and exit by the outcome."""
    from vexport.run.evaluating import accept_answers

    verdicts = [one.verdict for one in judged if one.verdict]
    if verdicts and (text := _whole(judged, verdicts, answer.format_, is_shown=is_shown)):
        print_text(text)
    if verdicts and answer.format_ == "github":
        add_text_summary(_text(judged))
    if text := accept_answers(job, verdicts[0] if verdicts else None):
        click.echo(text, err=bool(verdicts))
    for outcome in ("FAIL", "INCONCLUSIVE"):
        for verdict in verdicts:
            if verdict.outcome == outcome:
                conclude(outcome, verdict.checkpoint, verdict.reason)
