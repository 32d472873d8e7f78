"""Read the rows of a held-out text as a model's token ids."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vexport.calibration.data import read_samples
from vexport.engine.messages import KL_TOKENS
from vexport.errors import InputError
from vexport.inference.answers import Rows
from vexport.inference.prompts import limited_length
from vexport.rules import prompts as rules
from vexport.scenario import Evaluate
from vexport.words import plural

# The first token of a row is not predicted.
_MIN_TOKENS = 2
LOG = logging.getLogger(__name__)


def read_rows(
    settings: Evaluate,
    tokenizer: Path,
    *,
    longest: int | None,
    vocabulary: int,
    trust_tokenizer: bool,
    shows_notes: bool,
) -> Rows:
    """Return the rows of the text in `settings`, or an empty tuple if there is no text.

    A row has `settings.text_tokens` tokens, or fewer if the maximum sequence length requires it.
    The maximum is `longest`, or by default the limit of the model in the folder `tokenizer`. The
    incomplete row at the end is left out, unless all rows are incomplete. If `shows_notes`, notes
    about the text are logged.
    """
    text = settings.held_out()
    if text is None:
        return ()
    needed = settings.text_tokens + 1  # vLLM generates a token after each row
    limit = longest or limited_length(tokenizer, needed)
    tokens = min(needed, limit) - 1
    if tokens < _MIN_TOKENS:
        raise InputError.of(rules.SHORT_CONTEXT, f"text {settings.text}", limit=limit)
    samples = read_samples(
        replace(text, seq_len=tokens),
        tokenizer,
        vocab_size=vocabulary,
        trust_remote_code=trust_tokenizer,
    )
    whole = tuple(row for row in samples.token_ids if len(row) == tokens)
    rows = whole or tuple(row for row in samples.token_ids if len(row) > 1)
    if shows_notes:
        for note in (*samples.notes, *_shortages(settings, rows, limit)):
            LOG.warning("note: %s", note)
    return rows


def _shortages(settings: Evaluate, rows: Rows, limit: int) -> Iterator[str]:
    if limit <= settings.text_tokens:
        yield (
            f"rows of the text have {limit - 1:,} tokens, not {settings.text_tokens:,}: the "
            f"maximum sequence length is {limit:,}, and vLLM generates a token after each row"
        )
    if len(rows) < settings.text_rows:
        yield (
            f"the text {settings.text} has {plural(len(rows), 'row')}, not {settings.text_rows}: "
            "more text, or shorter rows (text_tokens), give tighter bounds"
        )


def truncated_rows(rows: Rows) -> Rows:
    """Return the first tokens of each row.

    They are the prompts for log-probabilities of the whole vocabulary, and for drafts.
    """
    return tuple(row[:KL_TOKENS] for row in rows)
