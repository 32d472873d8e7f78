"""Count the drafts of speculative decoding that a model accepts."""

from collections.abc import Sequence

from vexport.inference.model import Model, TokenIds
from vexport.records import DraftCounts


def count_drafts(model: Model, prompts: Sequence[TokenIds]) -> tuple[DraftCounts, ...]:
    """Continue the prompts greedily, one at a time, and count the drafts of each.

    Raises the errors of `Model.count_draft`.
    """
    counts: list[DraftCounts] = []
    for number, prompt in enumerate(prompts):
        model.on_progress("drafts", number, len(prompts))
        counts.append(model.count_draft(prompt))
    model.on_progress("drafts", len(prompts), len(prompts))
    return tuple(counts)
