"""The commands, one file a topic; each imports what it runs, so that `--help` answers at once."""

import click

from vexport.cli.catalog import explain_command, list_command
from vexport.cli.check import check
from vexport.cli.compare import compare
from vexport.cli.demo import demo
from vexport.cli.evaluate import evaluate
from vexport.cli.load import load
from vexport.cli.plan import plan
from vexport.cli.quantize import quantize
from vexport.cli.repair import repair
from vexport.cli.scenario import report, run
from vexport.cli.verdict import verdict_command

COMMANDS: tuple[click.Command, ...] = (
    demo,
    plan,
    quantize,
    check,
    load,
    evaluate,
    run,
    compare,
    report,
    verdict_command,
    repair,
    list_command,
    explain_command,
)
