"""The commands, one file a topic; each imports what it runs, so that `--help` answers at once."""

import click

from vexport.cli.accuracy import evaluate, verdict_command
from vexport.cli.catalog import explain_command, list_command
from vexport.cli.demo import demo
from vexport.cli.gate import check, diff_command, load, repair
from vexport.cli.quantize import plan, quantize
from vexport.cli.scenario import report, run

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
