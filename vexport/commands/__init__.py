"""The commands, one file a topic; each imports what it runs, so that `--help` answers at once."""

import click

from vexport.commands.accuracy import evaluate, verdict_command
from vexport.commands.catalog import explain_command, list_command
from vexport.commands.demo import demo
from vexport.commands.gate import check, diff_command, load, repair
from vexport.commands.quantize import plan, quantize
from vexport.commands.scenario import report, run

COMMANDS: tuple[click.Command, ...] = (
    demo,
    plan,
    quantize,
    check,
    load,
    evaluate,
    run,
    report,
    verdict_command,
    repair,
    diff_command,
    list_command,
    explain_command,
)
