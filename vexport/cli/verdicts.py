"""Options that say what loss is acceptable and what is warned about, and what they come to."""

from dataclasses import dataclass

import click

from vexport.cli.options import Real, stacked


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictOptions:
    """What loss is acceptable, how sure the answer must be, and what decides."""

    margin: float
    alpha: float
    gate: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftOptions:
    """Beyond which drift of the log-probabilities a verdict warns."""

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
        help="Metric that decides, for a task, a group or all; repeatable "
        "[default: exact_match, else acc, else the first].",
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
