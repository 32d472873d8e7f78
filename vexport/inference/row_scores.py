"""Log-probabilities of the tokens of one row of a text. Engines and servers both return them."""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vexport.records import Json

TokenLogprobs = Mapping[int, float]
"""Log-probabilities at one place of a text, by token id. The text's token comes first, and the
likeliest tokens follow.
"""
NO_TOKEN = -1
"""Id of an unused entry. Its log-probability is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Log-probabilities at all places of a row except the first.

    `tokens` are token ids (int32), and `logprobs` are their log-probabilities (float32). Both have
    the shape (places, width). The first column is the row's own token, and the other columns are
    the likeliest tokens. No token occurs twice at a place. Unused entries are `NO_TOKEN` and NaN.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @property
    def nll(self) -> NDArray[np.float32]:
        """Return the negative log-likelihoods of the row's tokens, in nats."""
        return -self.logprobs[:, 0]

    @property
    def likeliest(self) -> NDArray[np.int64]:
        """Return the likeliest token at each place. In a tie, prefer the row's own token."""
        known = np.where(np.isnan(self.logprobs), -np.inf, self.logprobs)
        best = known.argmax(axis=1)[:, None]
        return np.take_along_axis(self.tokens, best, axis=1)[:, 0].astype(np.int64)

    def matrix(self, places: int) -> NDArray[np.float32]:
        """Return the first `places` as a matrix (places, token ids), with NaN for other tokens."""
        tokens = self.tokens[:places]
        logprobs = self.logprobs[:places]
        matrix = np.full((len(tokens), int(tokens.max()) + 1), math.nan, dtype=np.float32)
        position, column = np.nonzero(tokens != NO_TOKEN)
        matrix[position, tokens[position, column]] = logprobs[position, column]
        return matrix


def scores_of_flat(
    tokens: NDArray[np.int32], logprobs: NDArray[np.float32], places: int
) -> RowScores:
    """Return scores from flat lists. Each of the `places` has the same number of tokens.

    Each place begins with the row's own token. If this token is among the likeliest, vLLM lists it
    again, and the second entry becomes an unused entry.
    """
    tokens = tokens.reshape(places, -1)
    logprobs = logprobs.reshape(places, -1)
    is_repeated = tokens == tokens[:, :1]
    is_repeated[:, 0] = False
    return RowScores(
        tokens=np.where(is_repeated, np.int32(NO_TOKEN), tokens),
        logprobs=np.where(is_repeated, np.float32(math.nan), logprobs),
    )


def scores_of_places(places: Sequence[TokenLogprobs]) -> RowScores:
    """Return scores from a mapping for each place, with the row's own token first."""
    width = max(map(len, places))
    tokens = np.full((len(places), width), NO_TOKEN, dtype=np.int32)
    logprobs = np.full((len(places), width), math.nan, dtype=np.float32)
    for number, place in enumerate(places):
        tokens[number, : len(place)] = list(place)
        logprobs[number, : len(place)] = list(place.values())
    return RowScores(tokens=tokens, logprobs=logprobs)


def scores_to_json(scores: RowScores) -> Json:
    """Return scores as JSON with base64 text, a fifth of the size of lists of numbers."""
    return {
        "places": len(scores.tokens),
        "tokens": base64.b64encode(scores.tokens.tobytes()).decode(),
        "logprobs": base64.b64encode(scores.logprobs.tobytes()).decode(),
    }


def scores_from_json(content: Json) -> RowScores:
    """Read scores that `scores_to_json` wrote."""
    assert isinstance(content, dict)
    places = content["places"]
    assert isinstance(places, int)
    tokens = np.frombuffer(base64.b64decode(str(content["tokens"])), dtype=np.int32)
    logprobs = np.frombuffer(base64.b64decode(str(content["logprobs"])), dtype=np.float32)
    # Arrays from np.frombuffer are read-only. torch requires writable arrays.
    return RowScores(
        tokens=tokens.reshape(places, -1).copy(), logprobs=logprobs.reshape(places, -1).copy()
    )
