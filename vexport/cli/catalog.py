"""What vexport knows."""

import click

from vexport.cli.base import command, print_text
from vexport.cli.completion import complete_topic
from vexport.cli.options import Answer, format_option


@command("list", no_args_is_help=True)
@click.argument(
    "what", type=click.Choice(("schemes", "observers", "roundings", "calibration", "checks", "architectures"))
)
@format_option(("text", "json"))
def list_command(what: str, answer: Answer) -> None:
    """List schemes, observers, roundings, calibration data, checks or architectures.

    \b
    Examples:
      vexport list schemes
      vexport list checks --format json
    """
    from vexport.explain.catalog import render_catalog

    print_text(render_catalog(what, answer.format_))


@command("explain")
@click.argument("name", required=False, nargs=-1, shell_complete=complete_topic)
@format_option(("text", "json"))
def explain_command(name: tuple[str, ...], answer: Answer) -> None:
    """Explain a scheme, observer, check, finding or topic.

    NAME is what a report, message or list calls it, in any case. Without NAME: all that can be explained.

    \b
    Examples:
      vexport explain
      vexport explain NVFP4
      vexport explain completeness
      vexport explain margin
    """
    from vexport.explain import explain, render_entry, render_topics

    print_text(
        render_entry(explain(" ".join(name)), answer.format_) if name else render_topics(answer.format_)
    )
