"""Write a model's scores for the rows of a held-out text, in the form that `Answers` reads."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from vexport.engine.messages import KL_TOKENS
from vexport.files import atomic_path
from vexport.inference.model import Model, Place, TokenIds


def write_text_scores(
    model: Model, rows: Sequence[TokenIds], file: Path, logprobs_file: Path | None = None
) -> None:
    """Write the cost of each token, and the likeliest token at the token's place.

    The first token of each row has no cost. `file` becomes a safetensors file with `nll.0`
    (float32, nats) and `likeliest.0` (int64), both of shape (len(row) - 1,), and so on for each
    row. `logprobs_file` is for a model that returns log-probabilities only for the likeliest
    tokens. It receives the log-probabilities at each row's beginning, as a matrix `prompt.0`
    (positions, tokens) with NaN for all other tokens.
    """
    scores: dict[str, torch.Tensor] = {}
    logprobs: dict[str, torch.Tensor] = {}
    for number, places in enumerate(model.score_rows(rows)):
        predicted = rows[number][1:]
        costs = [-place[token] for token, place in zip(predicted, places, strict=True)]
        likeliest = [max(place, key=place.__getitem__) for place in places]
        scores[f"nll.{number}"] = torch.tensor(costs, dtype=torch.float32)
        scores[f"likeliest.{number}"] = torch.tensor(likeliest, dtype=torch.int64)
        if logprobs_file is not None:
            logprobs[f"prompt.{number}"] = _matrix(places[: KL_TOKENS - 1])
    _save(scores, file)
    if logprobs_file is not None:
        _save(logprobs, logprobs_file)


def _matrix(places: Sequence[Place]) -> torch.Tensor:
    """Return the known log-probabilities as a matrix (positions, tokens), NaN if unknown."""
    width = 1 + max(map(max, places))
    matrix = torch.full((len(places), width), math.nan)
    for position, place in enumerate(places):
        matrix[position, list(place)] = torch.tensor(list(place.values()))
    return matrix


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    with atomic_path(file) as temporary:
        save_file(tensors, temporary)
