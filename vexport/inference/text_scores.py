"""Write a model's scores for the rows of a held-out text, in the form that evaluations read."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from vexport.engine.messages import KL_TOKENS
from vexport.files import atomic_path
from vexport.inference.model import Model, TokenIds
from vexport.inference.row_scores import RowScores

REPEATED_PREFIX = "again."
"""Prefix of the tensors of rows that the model read a second time."""
# A quarter of the rows is read twice, but at least `_MIN_REPEATED` rows.
_REPEATED_PART = 4
_MIN_REPEATED = 2


def rows_to_repeat(rows: int) -> int:
    """Return how many of the first rows a model reads twice, to measure the noise of its engine."""
    return min(rows, max(_MIN_REPEATED, rows // _REPEATED_PART))


def write_text_scores(
    model: Model,
    rows: Sequence[TokenIds],
    file: Path,
    logprobs_file: Path | None = None,
    *,
    repeats: bool = False,
) -> None:
    """Write a model's scores at all places of each row except the first.

    The scores of a place are the token's negative log-likelihood, the likeliest token, and the
    log-probabilities of the likeliest tokens.

    `file` becomes a safetensors file. For the first row, it has `nll.0` (float32, nats) and
    `likeliest.0` (int64), both of shape (places,). It also has `tokens.0` (int32) and `logprobs.0`
    (float32), both of shape (places, width), as in `RowScores`. With `repeats`, the model reads
    some rows again in the opposite order. The tensors of the second reading have the prefix
    `again.`.

    `logprobs_file` is for a model that returns log-probabilities only for the likeliest tokens. It
    receives the log-probabilities at each row's beginning, as a matrix `prompt.0` (positions,
    tokens) with NaN for all other tokens.
    """
    scores: dict[str, torch.Tensor] = {}
    logprobs: dict[str, torch.Tensor] = {}
    for number, row in enumerate(model.score_rows(rows)):
        scores |= _tensors(row, "", number)
        if logprobs_file is not None:
            logprobs[f"prompt.{number}"] = torch.from_numpy(row.matrix(KL_TOKENS - 1))
    if repeats:
        model.start_round()
        numbers = list(reversed(range(rows_to_repeat(len(rows)))))
        repeated = model.score_rows([rows[number] for number in numbers])
        for number, row in zip(numbers, repeated, strict=True):
            scores |= _tensors(row, REPEATED_PREFIX, number)
    _save(scores, file)
    if logprobs_file is not None:
        _save(logprobs, logprobs_file)


def _tensors(row: RowScores, prefix: str, number: int) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}nll.{number}": torch.from_numpy(row.nll),
        f"{prefix}likeliest.{number}": torch.from_numpy(row.likeliest),
        f"{prefix}tokens.{number}": torch.from_numpy(row.tokens),
        f"{prefix}logprobs.{number}": torch.from_numpy(row.logprobs),
    }


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    with atomic_path(file) as temporary:
        save_file(tensors, temporary)
