"""The answers of one model under test, which verdict, drift and attribution read alike."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

from vexport.bus_errors import install_bus_error_handler
from vexport.engine.load import Prompts, load_report
from vexport.engine.messages import SERVER, SessionResult
from vexport.records import LoadReport, OnProgress, silent

Rows = tuple[tuple[int, ...], ...]
"""Token ids of the rows of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A finished session with the prompts that it answered, and the rows of text that it read."""

    result: SessionResult
    prompts: Prompts
    rows: Rows = ()

    @property
    def checkpoint(self) -> Path:
        """The folder of the model, or of a server's tokenizer."""
        return self.result.checkpoint

    @property
    def is_scored(self) -> bool:
        """Return whether the session has log-probabilities of its prompts."""
        return self.result.logprobs_file is not None

    @property
    def is_partial(self) -> bool:
        """Return whether they are those of the likeliest tokens alone, NaN for others: of a
        server.
        """
        return self.result.platform == SERVER

    @property
    def logprobs_file(self) -> Path:
        """The log-probabilities of the prompts, `prompt.N` of shape (positions, vocabulary)."""
        assert self.result.logprobs_file is not None
        return self.result.logprobs_file

    def each_row(self, name: str) -> list[NDArray[np.float64]]:
        """The `nll`, or the `likeliest` tokens, in the places of each row's tokens but the
        first.
        """
        assert self.result.text_file is not None
        install_bus_error_handler()
        tensors = load_file(self.result.text_file)
        return [tensors[f"{name}.{number}"].double().numpy() for number in range(len(self.rows))]

    def report(
        self, baseline: "Served | None" = None, on_progress: OnProgress = silent
    ) -> LoadReport:
        """Judge the session; builds the reference model in this process."""
        against = baseline.result if baseline else None
        return load_report(self.result, self.prompts, baseline=against, on_progress=on_progress)
