"""Types of a model's answers. Every kind of source returns them, and evaluations read them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

from vexport.bus_errors import install_bus_error_handler
from vexport.engine.messages import SERVER, SessionResult
from vexport.inference.prompts import Prompts

Rows = tuple[tuple[int, ...], ...]
"""Token ids of the rows of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
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
    def is_partial(self) -> bool:
        """Return True for a server, which returns log-probabilities only for the likeliest tokens.

        All other tokens have NaN.
        """
        return self.result.platform == SERVER

    @property
    def logprobs_file(self) -> Path:
        """The file with the prompts' log-probabilities: `prompt.N` (positions, vocabulary)."""
        assert self.result.logprobs_file is not None
        return self.result.logprobs_file

    def each_row(self, name: str) -> list[NDArray[np.float64]]:
        """Return each row's `nll` or `likeliest` tokens at all places except the first."""
        assert self.result.text_file is not None
        install_bus_error_handler()
        tensors = load_file(self.result.text_file)
        return [tensors[f"{name}.{number}"].double().numpy() for number in range(len(self.rows))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """All answers of a model: lm-eval's result files, and the session if the model ran.

    `results` is a folder or file with the answers to tasks. `served` is None for existing results.
    """

    results: Path
    served: Served | None = None
