"""Commands that measure accuracy: `eval`, and `verdict` for results that exist already."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vexport.cli.base import (
    add_text_summary,
    command,
    conclude,
    note,
    pause,
    print_text,
    progress_display,
    text_width,
)
from vexport.cli.engine import (
    Interpreter,
    Session,
    attribution_options,
    interpreter_option,
    serve_options,
    session_options,
)
from vexport.cli.options import (
    FORMATS,
    PATH,
    OutputOptions,
    format_option,
    option,
    output_file,
    require_apart,
)
from vexport.cli.prompting import (
    EVALUATE_SYNTAXES,
    chat_template_option,
    evaluation_settings,
    given_evaluation,
)
from vexport.cli.settings import given_settings, setting_options
from vexport.errors import InputError
from vexport.names import AcceptedFile, ModelRef, parse_model
from vexport.rules import usage as rules

if TYPE_CHECKING:
    from pydantic import JsonValue

    from vexport.judge.accepted_settings import CompletedSettings
    from vexport.records import Verdict
    from vexport.run.eval_run import Evaluations

VERDICT_FORMATS = (*FORMATS, "html", "markdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    """Options of `eval` for the baseline, and for writing an accepted baseline."""

    baseline: ModelRef | None
    against: Path | None
    accept: Path | None

    def consistent(self, options: Mapping[str, Any]) -> "ComparisonOptions":
        """Return these options, corrected.

        If `baseline` is the file of an accepted baseline, it is moved to `against`.

        Raises InputError if options of `eval` contradict each other.
        """
        baseline = self.baseline
        against = self.against
        if not against and isinstance(baseline, AcceptedFile):
            against = baseline.path
            baseline = None
        if baseline and against or not (baseline or against or self.accept):
            needed = "--baseline SOURCE or --against FILE, or --accept FILE alone"
            raise InputError.of(rules.REQUIRED, "vexport eval", needed=needed)
        if (options["kl_limit"] or options["nll_limit"]) and not baseline:
            limits = "--kl-limit and --nll-limit"
            raise InputError.of(rules.NEEDS_OPTION, limits, other="--baseline")
        if against is None and bool(options["tasks"]) == bool(options["text"]):
            needed = "--task NAME_OR_YAML, or --text DATA in the place of tasks"
            raise InputError.of(rules.REQUIRED, "vexport eval", needed=needed)
        if options["text"] is None and any(
            map(options.get, ("text_rows", "text_tokens", "speculative"))
        ):
            of_text = "--text-rows, --text-tokens and --speculative"
            raise InputError.of(rules.NEEDS_OPTION, of_text, other="--text")
        if options["text"] and (baseline is None or self.accept):
            needed = "--baseline SOURCE alone, without --against or --accept"
            raise InputError.of(rules.REQUIRED, "--text", needed=needed)
        if len(options["checkpoints"]) > 1 and self.accept:
            needed = "a single CHECKPOINT, because it stores the scores of one model"
            raise InputError.of(rules.REQUIRED, "--accept", needed=needed)
        return replace(self, baseline=baseline, against=against)


@command("eval")
@click.argument(
    "checkpoints", metavar="CHECKPOINT|URL...", nargs=-1, required=True, type=parse_model
)
@option(
    "--baseline",
    "Model to compare with: the unquantized or another checkpoint, results, or a server.",
    parse_model,
    "SOURCE|URL",
    heading="Comparison",
)
@option(
    "--against",
    "Accepted baseline to compare with. Its tasks and settings are the defaults. Starts only one "
    "engine.",
    PATH,
    "FILE",
    heading="Comparison",
)
@option(
    "--accept",
    "Write CHECKPOINT's scores to FILE as an accepted baseline, unless the verdict is FAIL.",
    PATH,
    "FILE",
    heading="Comparison",
)
@setting_options("evaluate", EVALUATE_SYNTAXES)
@chat_template_option
@attribution_options("if it is not PASS")
@option(
    "--output-dir",
    "Folder for lm-eval's results and the report [default: runs/eval-NAME].",
    PATH,
    "DIR",
    heading="Output",
)
@option(
    "--overwrite",
    "Replace the output folder if it contains only files that vexport wrote.",
    heading="Output",
    flag=True,
)
@interpreter_option
@serve_options
@session_options
@format_option(VERDICT_FORMATS, names="-o --output-file --output")
def evaluate(
    checkpoints: tuple[ModelRef, ...],
    comparison: ComparisonOptions,
    attribution: bool | None,
    attribution_seconds: int,
    output_dir: Path | None,
    overwrite: bool,
    interpreter: Interpreter,
    tp: int | None,
    session: Session,
    output: OutputOptions,
) -> None:
    """Compare the accuracy of CHECKPOINT with the accuracy of its baseline.

    lm-eval runs both models in vLLM on the same documents. The verdict (PASS, FAIL or INCONCLUSIVE)
    is printed first. If it is not PASS, vexport then searches for the cause. Several checkpoints
    give a table.

    An accepted baseline is a small file for git with the score of each document. Write it with
    --accept, and compare later checkpoints with it by --against, which takes its tasks and settings
    as defaults. CHECKPOINT and SOURCE may also be results of lm-eval, or the address of a server
    with OpenAI's API. VEXPORT_API_KEY is its key.

    The output folder contains lm-eval's results in `baseline` and `candidate`, and a report
    (report.html). A second call resumes. `vexport explain keys of evaluate` lists further settings,
    which only scenarios have.

    \b
    Examples:
      vexport eval OUT --baseline MODEL --task gsm8k --margin 0.02
      vexport eval OUT --task gsm8k --accept accepted.json
      vexport eval NEXT --against accepted.json
      vexport eval OUT --baseline MODEL --text held-out.jsonl
      vexport eval http://new:8000/v1 --baseline http://old:8000/v1 --task gsm8k
    """
    from vexport.engine.session import require_engine
    from vexport.outputs.replaceable import NamedPath
    from vexport.scores.inputs import evaluation_inputs, require_inputs

    options = click.get_current_context().params
    comparison = comparison.consistent(options)
    keys = given_evaluation()
    if comparison.baseline is not None:
        keys["baseline"] = comparison.baseline
    serve = session.serve(tp)
    completed: CompletedSettings | None = None
    if comparison.against is not None:
        from vexport.judge.accepted_settings import with_accepted_settings

        completed = with_accepted_settings(keys, serve, comparison.against, command="eval")
        keys, serve = dict(completed.keys), completed.serve
        if completed.filled and not output.quiet:
            note(f"settings from {comparison.against}: {_shown_settings(completed.filled)}")
    settings = evaluation_settings("eval", keys)
    folder = output_dir or Path("runs") / f"eval-{_name(checkpoints)}"
    written = [NamedPath(label="--output-dir", path=folder)]
    require_apart(click.get_current_context(), list(evaluation_inputs(settings, "--task")), written)
    models: list[ModelRef] = [*checkpoints]
    if comparison.baseline is not None:
        models.insert(0, comparison.baseline)
    # Print the verdict before the search for its cause, which takes minutes. Files and machine
    # formats get the whole output at the end.
    is_first = output.format_ == "text" and output_file(click.get_current_context()) is None
    with progress_display(quiet=output.quiet, reads=models) as on_progress:
        # The functions that start engines import torch, which takes seconds.
        require_inputs(models, settings)
        require_engine((interpreter.vllm_python,))
        from vexport import api

        def show(judged: "Evaluations") -> None:
            pause(on_progress)
            _show_verdicts(judged, as_text=is_first, quiet=output.quiet)

        evaluations = api.evaluate_all(
            checkpoints,
            settings,
            folder,
            engine=api.Engine(
                serve=serve,
                vllm_python=interpreter.vllm_python,
                trust_remote_code=interpreter.trust_remote_code,
            ),
            against=completed,
            accept=comparison.accept,
            overwrite=overwrite,
            attribution=attribution,
            attribution_seconds=attribution_seconds,
            on_judged=show,
            on_progress=on_progress,
        )
    _print_rest(evaluations, output.format_, is_shown=is_first)


def _show_verdicts(evaluations: "Evaluations", *, as_text: bool, quiet: bool) -> None:
    """Print the verdicts as the command's output, or a line for each on stderr."""
    from vexport.run.comparison import outcome_and_reason

    if as_text and evaluations.verdicts:
        print_text(_text(evaluations))
    elif not quiet:
        for verdict in evaluations.verdicts:
            click.echo(f"{verdict.checkpoint}: {outcome_and_reason(verdict)}", err=True)


def _name(checkpoints: Sequence[ModelRef]) -> str:
    """Return a folder name: the first checkpoint's name, and the number of others."""
    more = f"-and-{len(checkpoints) - 1}-more" if len(checkpoints) > 1 else ""
    return checkpoints[0].file_name + more


def _shown_settings(settings: "Mapping[str, JsonValue]") -> str:
    """Return settings in words: `tasks gsm8k, arc_easy; limit 100`."""
    shown = []
    for key, value in settings.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else json.dumps(value)
        shown.append(f"{key} {text}")
    return "; ".join(shown)


def _text(evaluations: "Evaluations") -> str:
    """Return the verdict as text, or a table if there are several checkpoints.

    Returns an empty string if there is no baseline.
    """
    from vexport.reports import render_comparison, render_verdicts

    if not evaluations.verdicts:
        return ""
    if len(evaluations.runs) > 1:
        return render_comparison(evaluations.rows, "text")
    return render_verdicts(evaluations.verdicts, "text", width=text_width())


def _remaining_text(evaluations: "Evaluations", *, is_shown: bool) -> str:
    """Return the causes of losses as text, after the verdicts if `is_shown` is False."""
    from vexport.reports import render_cause

    verdicts = evaluations.verdicts
    if len(verdicts) == 1:
        if not is_shown:
            return _text(evaluations)  # it includes the cause
        cause = render_cause(verdicts[0], width=text_width())
        return f"\n{cause}" if cause else ""
    text = "" if is_shown else _text(evaluations)
    for verdict in verdicts:
        if cause := render_cause(verdict, width=text_width()):
            text += f"\n{verdict.checkpoint}\n{cause}"
    return text


def _rendered(evaluations: "Evaluations", format_: str) -> str:
    """Return the whole output in a format other than text.

    Returns an empty string if there is no baseline.
    """
    from vexport.reports import render, render_comparison, render_verdicts

    if not evaluations.verdicts:
        return ""
    if format_ not in ("html", "markdown"):
        return render_verdicts(evaluations.verdicts, format_)
    if len(evaluations.runs) > 1:
        return render_comparison(evaluations.rows, format_)
    file = output_file(click.get_current_context())
    page = file.parent if file else Path()
    folder = evaluations.runs[0].folder
    return render(evaluations.reports[0], format_, folder=folder, page=page)


def _print_rest(evaluations: "Evaluations", format_: str, *, is_shown: bool) -> None:
    verdicts = evaluations.verdicts
    if format_ == "text":
        text = _remaining_text(evaluations, is_shown=is_shown)
    else:
        text = _rendered(evaluations, format_)
    if text:
        print_text(text)
    if format_ == "github" and verdicts:
        add_text_summary(_text(evaluations))
    if evaluations.accepted:
        click.echo(evaluations.accepted, err=bool(verdicts) or format_ != "text")
    if evaluations.reports:
        for run in evaluations.runs:
            click.echo(f"report: {run.folder / 'report.html'}", err=format_ != "text")
    for outcome in ("FAIL", "INCONCLUSIVE"):
        for verdict in verdicts:
            if verdict.outcome == outcome:
                _conclude(verdict, verdict.checkpoint)


def _conclude(verdict: "Verdict", name: str) -> None:
    from vexport.reports.formatting import advice, next_step_of_verdict

    conclude(verdict.outcome, name, verdict.reason, advice(next_step_of_verdict(verdict)))


@command("verdict")
@click.argument("baseline_results", type=PATH)
@click.argument("results", type=PATH)
@setting_options("verdict", {key: EVALUATE_SYNTAXES[key] for key in ("gate", "margin", "tasks")})
@format_option(VERDICT_FORMATS)
def verdict_command(baseline_results: Path, results: Path, output: OutputOptions) -> None:
    """Compare the results of two models, without starting a model.

    Both are folders or files of lm-eval, lighteval or EvalScope, or JSON lines with task, id and
    score. BASELINE_RESULTS may also be an accepted baseline (`vexport eval --accept`). Documents
    are paired by their ids. lm-eval writes the responses with --log_samples.

    \b
    Examples:
      vexport verdict results/base results/quantized --margin 0.02
      vexport verdict results/base results/quantized --margin wikitext=2%
      vexport verdict results/base results/quantized --task gsm8k,arc_easy
      vexport verdict base.jsonl quantized.jsonl
      vexport verdict results/base results/quantized --gate gsm8k=exact_match,flexible-extract
    """
    from vexport.api import verdict as api_verdict
    from vexport.reports import render_verdicts

    verdict = api_verdict(baseline_results, results, **given_settings("verdict"))
    print_text(render_verdicts([verdict], output.format_, width=text_width()))
    if output.format_ == "github":
        add_text_summary(render_verdicts([verdict], "text"))
    _conclude(verdict, str(results))
