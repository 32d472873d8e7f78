"""Two lm-eval result folders compared."""

from pathlib import Path

import click

from vexport.cli.base import command, conclude, print_text
from vexport.cli.options import PATH, Answer, format_option
from vexport.cli.verdicts import VerdictOptions, verdict_options


@command("verdict")
@click.argument("baseline_results", type=PATH)
@click.argument("results", type=PATH)
@verdict_options
@format_option()
def verdict_command(
    baseline_results: Path,
    results: Path,
    options: VerdictOptions,
    answer: Answer,
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

    verdict = decide(baseline_results, results, margin=options.margin, alpha=options.alpha, gate=options.gate)
    print_text(render_verdict(verdict, answer.format_))
    conclude(verdict.outcome, str(results), verdict.reason)
