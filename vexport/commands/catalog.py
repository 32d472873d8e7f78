"""What vexport knows."""

import click

from vexport.commands.base import command, print_text
from vexport.commands.options import format_option


@command("list", no_args_is_help=True)
@click.argument("what", type=click.Choice(("schemes", "observers", "checks", "architectures")))
@format_option(("text", "json"))
def list_command(what: str, format_: str, quiet: bool) -> None:
    """List schemes, observers, checks or architectures.

    \b
    Examples:
      vexport list schemes
      vexport list checks --format json
    """
    from vexport.catalog import render_catalog

    print_text(render_catalog(what, format_))
