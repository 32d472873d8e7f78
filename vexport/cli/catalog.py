"""The tables and the reference: `list` and `explain`."""

import json
import sys
from dataclasses import asdict

import click

from vexport.cli.base import command, print_text
from vexport.cli.options import Answer, answer_file, format_option


@command("list", no_args_is_help=True)
@click.argument("what", type=click.Choice(("schemes", "observers", "roundings", "checks", "architectures")))
@format_option(("text", "json"))
def list_command(what: str, answer: Answer) -> None:
    """List schemes, observers, roundings, checks or architectures.

    \b
    Examples:
      vexport list schemes
      vexport list checks --format json
    """
    from vexport.reports.catalog import render_catalog

    print_text(render_catalog(what, answer.format_))


@command("explain")
@click.argument("name", required=False, nargs=-1)
@format_option(("text", "json"))
def explain_command(name: tuple[str, ...], answer: Answer) -> None:
    """Print the section of the reference that explains a scheme, observer, check, finding or topic.

    NAME is what a report, message or list calls it, in any case. Without NAME: the pages and their sections.

    \b
    Examples:
      vexport explain
      vexport explain NVFP4
      vexport explain completeness
      vexport explain margin
    """
    from vexport.reports.catalog import all_sections, contents, find_section

    if not name:
        sections = [asdict(section) for section in all_sections()]
        print_text(contents() if answer.format_ == "text" else json.dumps(sections, indent=2) + "\n")
        return
    section = find_section(" ".join(name))
    if answer.format_ == "json":
        print_text(json.dumps(asdict(section), indent=2) + "\n")
    elif sys.stdout.isatty() and answer_file(click.get_current_context()) is None:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(section.text))
    else:
        print_text(section.text + "\n")
