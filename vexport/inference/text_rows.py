"""Read the rows of a held-out text as a model's token ids."""

import logging
from pathlib import Path

from vexport.calibration.data import read_samples
from vexport.checkpoint.source import parse_data
from vexport.engine.messages import KL_TOKENS
from vexport.inference.answers import Rows
from vexport.inference.prompts import shortest_length
from vexport.records import CalibrationData
from vexport.scenario import Evaluate

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
    if settings.text is None:
        return ()
    needed = settings.text_tokens + 1  # vLLM generates a token after each row
    tokens = min(needed, longest or shortest_length(tokenizer, needed)) - 1
    data = CalibrationData(
        name=settings.text,
        samples=settings.text_rows,
        seq_len=tokens,
        column=parse_data(settings.text).column,
        pack=True,
    )
    samples = read_samples(
        data, tokenizer, vocab_size=vocabulary, trust_remote_code=trust_tokenizer
    )
    if shows_notes:
        for note in samples.notes:
            LOG.warning("note: %s", note)
    whole = tuple(row for row in samples.token_ids if len(row) == tokens)
    return whole or tuple(row for row in samples.token_ids if len(row) > 1)


def beginnings(rows: Rows) -> Rows:
    """Return the first tokens of each row, for comparing whole vocabularies and for drafts."""
    return tuple(row[:KL_TOKENS] for row in rows)
