"""The answers of a model: what every kind of source returns, and what evaluations read."""

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
    """A finished session with a model, its prompts, and the rows of text that the model read."""

    result: SessionResult
    prompts: Prompts
    rows: Rows = ()

    @property
    def checkpoint(self) -> Path:
        """The folder of the model, or of the tokenizer for a server's prompts."""
        return self.result.checkpoint

    @property
    def is_scored(self) -> bool:
        """Return whether the session has log-probabilities of its prompts."""
        return self.result.logprobs_file is not None

    @property
    def is_partial(self) -> bool:
        """Return whether only the likeliest tokens have log-probabilities, NaN for all others.

        This is so for a server.
        """
        return self.result.platform == SERVER

    @property
    def logprobs_file(self) -> Path:
        """The log-probabilities of the prompts, `prompt.N` of shape (positions, vocabulary)."""
        assert self.result.logprobs_file is not None
        return self.result.logprobs_file

    def each_row(self, name: str) -> list[NDArray[np.float64]]:
        """Return the `nll` or the `likeliest` token at each place of each row but the first."""
        assert self.result.text_file is not None
        install_bus_error_handler()
        tensors = load_file(self.result.text_file)
        return [tensors[f"{name}.{number}"].double().numpy() for number in range(len(self.rows))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """All answers of a model: lm-eval's result files, and the session if the model was asked.

    `results` is a folder or file with the answers to tasks. `served` is None for given results.
    """

    results: Path
    served: Served | None = None
