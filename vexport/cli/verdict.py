"""Two lm-eval result folders compared, and the options that say what loss is acceptable."""

from dataclasses import dataclass
from pathlib import Path

import click

from vexport.cli.base import add_text_summary, command, conclude, print_text
from vexport.cli.options import PATH, Answer, Real, format_option, stacked


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictOptions:
    """The acceptable loss, the accepted risk, and the metrics that decide."""

    margin: float
    alpha: float
    gate: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftOptions:
    """The drift of the log-probabilities beyond which a verdict warns."""

    kl_limit: float | None
    nll_limit: float | None


def _gates(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """TASK -> METRIC[,FILTER]; without a task it is for all that have it."""
    gates: dict[str, str] = {}
    for value in values:
        task, _, metric = value.rpartition("=")
        if not metric or (task or "*") in gates:
            raise click.BadParameter(f"{value!r} is not [TASK=]METRIC[,FILTER], or its task is given twice.")
        gates[task or "*"] = metric
    return gates


verdict_options = stacked(
    click.option(
        "--margin",
        type=Real(0, 1, max_open=True),
        metavar="M",
        default=0.02,
        show_default=True,
        help="Acceptable loss: 0.02 is 2 points.",
    ),
    click.option(
        "--alpha",
        type=Real(0, 0.5, min_open=True, max_open=True),
        metavar="A",
        default=0.05,
        show_default=True,
        help="Accepted probability of a wrong PASS.",
    ),
    click.option(
        "--gate",
        multiple=True,
        metavar="[TASK=]METRIC[,FILTER]",
        callback=_gates,
        help="Metric that decides; repeatable [default: exact_match, else acc].",
    ),
)
drift_options = stacked(
    click.option(
        "--kl-limit",
        type=Real(0, min_open=True),
        metavar="NATS",
        help="Warn, with --text fail, above this mean KL [default: 0.1].",
    ),
    click.option(
        "--nll-limit",
        type=Real(0, min_open=True),
        metavar="NATS",
        help="The same for the rise of the NLL [default: 0.05].",
    ),
)


@command("verdict")
@click.argument("baseline_results", type=PATH)
@click.argument("results", type=PATH)
@verdict_options
@format_option()
def verdict_command(baseline_results: Path, results: Path, options: VerdictOptions, answer: Answer) -> None:
    """Compare two lm-eval result folders; starts no model.

    The folders may come from anywhere. BASELINE_RESULTS may also be an accepted baseline
    (`vexport eval --accept`). Documents are paired by lm-eval's sample files, which it writes with
    --log_samples.

    \b
    Examples:
      vexport verdict results/base results/quantized --margin 0.02
      vexport verdict results/base results/quantized --gate gsm8k=exact_match,flexible-extract
    """
    from vexport.evaluation.verdict import decide
    from vexport.reports import render_verdict

    verdict = decide(baseline_results, results, margin=options.margin, alpha=options.alpha, gate=options.gate)
    print_text(render_verdict(verdict, answer.format_))
    if answer.format_ == "github":
        add_text_summary(render_verdict(verdict, "text"))
    conclude(verdict.outcome, str(results), verdict.reason)
