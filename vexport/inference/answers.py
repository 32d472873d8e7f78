"""Types of a model's responses, the same for every kind of source."""

from dataclasses import dataclass
from pathlib import Path

from vexport.engine.messages import SERVER, SessionResult
from vexport.inference.prompts import Prompts

Rows = tuple[tuple[int, ...], ...]
"""Token ids of the rows of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSession:
    """Result of a finished session with a model, with its prompts and its rows of text."""

    result: SessionResult
    prompts: Prompts
    rows: Rows = ()

    @property
    def checkpoint(self) -> Path:
        """The folder of the model, or of the tokenizer for a server's prompts."""
        return self.result.checkpoint

    @property
    def is_scored(self) -> bool:
        """Return True if the session has log-probabilities of its prompts."""
        return self.result.logprobs_file is not None

    @property
    def has_partial_logprobs(self) -> bool:
        """Return True for a server, which returns log-probabilities only for the likeliest tokens.

        All other tokens have NaN.
        """
        return self.result.platform == SERVER

    @property
    def logprobs_file(self) -> Path:
        """The file with the prompts' log-probabilities: `prompt.N` (positions, vocabulary)."""
        assert self.result.logprobs_file is not None
        return self.result.logprobs_file

    @property
    def text_file(self) -> Path:
        """The file with the scores of the rows, as `write_text_scores` writes it."""
        assert self.result.text_file is not None
        return self.result.text_file
