"""Options that could as well be left out: contradictions are errors, harmless extras are notes on stderr.

Permissions and limits (--trust-remote-code, --overwrite, --timeout, --quiet, --debug) act only where they are
needed; they are never worth a note.
"""

import click
from click.core import ParameterSource

from vexport.cli.base import note
from vexport.types import Plan

CALIBRATION_OPTIONS = ("samples", "seq_len", "seed", "pack", "all_experts", "device")
PLAN_OPTIONS = (
    "scheme",
    "recipe",
    "group_size",
    "observer",
    "input_observer",
    "rounding",
    "ignore",
    "kv_cache",
    "smoothing",
    "on_unsupported_shape",
    "tp",
)


def given_options(*names: str) -> list[str]:
    """Those parameters of the running command that stand on its command line, as options: `--seq-len`.

    Values that come from the environment are no part of the call: a team sets them for all commands.
    """
    context = click.get_current_context()
    return [
        parameter.secondary_opts[0] if context.params[parameter.name] is False else parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


def given_values(*names: str) -> list[str]:
    """As `given_options`, each with its value, as they would stand on another command line."""
    words: list[str] = []
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in names and given_options(parameter.name):
            value = context.params[parameter.name]
            if parameter.multiple:
                words += [word for item in value for word in (parameter.opts[0], str(item))]
            else:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words += [parameter.opts[0], text]
    return words


def require_scenario_alone() -> None:
    """UsageError where options stand next to a scenario that decides the same."""
    extra = given_options(*PLAN_OPTIONS)
    if extra:
        raise click.UsageError(f"{_listed(extra)} cannot be used with a scenario; set it in the scenario.")


def note_unused(names: tuple[str, ...], reason: str) -> None:
    """A note on those of the options that stand on the command line: `--samples has no effect REASON`."""
    extra = given_options(*names)
    if extra:
        note(f"{_listed(extra)} {'has' if len(extra) == 1 else 'have'} no effect {reason}")


def note_unused_calibration(plan: Plan) -> None:
    """Notes on calibration options that change nothing in a plan."""
    from vexport.architectures.fusion import moe_layer
    from vexport.plan.needs import calibration_need

    if calibration_need(plan) is None:
        names = ("calibration", *CALIBRATION_OPTIONS)
        note_unused(names, f"on {', '.join(plan.schemes)}: no calibration data is needed or read")
    elif not any(moe_layer(member.name) for group in plan.groups for member in group.members):
        note_unused(("all_experts",), "on a model without routed experts")


def _listed(options: list[str]) -> str:
    *first, last = options
    return f"{', '.join(first)} and {last}" if first else last
