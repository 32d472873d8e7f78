"""What vexport knows."""

import click

from vexport.commands.base import command, print_text
from vexport.commands.options import format_option


@command("list")
@click.argument("what", type=click.Choice(("schemes", "observers", "checks", "architectures")))
@format_option(("text", "json"))
def list_command(what: str, format_: str, quiet: bool) -> None:
    """What vexport knows: schemes, observers, checks or architectures."""
    from vexport.catalog import render_catalog

    print_text(render_catalog(what, format_))
