"""Which scheme to start with, for a model and a GPU."""

from typing import TYPE_CHECKING

import click

from vexport.cli.base import command, print_text
from vexport.cli.options import (
    Answer,
    format_option,
    is_scenario,
    revision_option,
    server_options,
    vllm_option,
)

if TYPE_CHECKING:
    from vexport.formats.gpus import Card


@command()
@click.argument("source", metavar="SOURCE")
@revision_option
@server_options(required=True)
@vllm_option
@format_option(("text", "json"))
def recommend(
    source: str,
    revision: str | None,
    card: "Card",
    tp: int,
    context: int,
    vllm: tuple[int, int],
    answer: Answer,
) -> None:
    """Recommend a scheme for a model on a GPU.

    SOURCE is a folder or a hub id (ORG/NAME or ORG/NAME@REVISION). Reads headers only, also from the hub.
    Shows for each scheme how vLLM would run it there, the memory, and a bound on speed by data sheets.
    Nothing is measured: accuracy is for `vexport eval`.

    \b
    Examples:
      vexport recommend MODEL --gpu L40S
      vexport recommend MODEL --gpu H100 --tp 2 --context 16384
    """
    from vexport.checkpoint.source import with_revision
    from vexport.cli.terminal import progress_display
    from vexport.plan.recommend import Target
    from vexport.plan.source import recommendation_of
    from vexport.reports.recommendation import render_recommendation

    if is_scenario(source):
        raise click.UsageError("SOURCE is a model; `vexport plan` takes a scenario.")
    target = Target(card=card, tp=tp, context=context, vllm=vllm)
    with progress_display(quiet=answer.quiet) as on_progress:
        found = recommendation_of(with_revision(source, revision), target, on_progress)
    print_text(render_recommendation(found, answer.format_))
