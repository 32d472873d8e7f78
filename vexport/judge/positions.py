"""Compare two models token by token on rows of a text, and group the tokens by their position.

Some errors grow with the length of the context, for example a wrong `rope_theta` or wrong scales of
the KV cache. A mean over all positions, or over the first tokens, hides such errors. Therefore the
tokens of a row are grouped into buckets: tokens 0-64, 64-256, 256-1,024 and so on. Each bucket ends
at four times the end of the previous bucket.

Buckets that grow have two advantages. A row needs only a few buckets, so the correction for
multiple tests stays small. Later buckets can be wider, because one more token of context matters
less if the context is long.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from safetensors import safe_open

from vexport.engine.messages import KL_TOKENS
from vexport.inference.answers import ServedSession
from vexport.inference.row_scores import NO_TOKEN
from vexport.inference.text_scores import REPEATED_PREFIX, rows_to_repeat
from vexport.judge.drift import least_kl
from vexport.numerics.metrics import kl_divergence
from vexport.scores.aggregates import Scores

FIRST_BUCKET_END = KL_TOKENS
"""End of the first bucket: the tokens with log-probabilities of the whole vocabulary."""
BUCKET_GROWTH = 4
"""Ratio of a bucket's end to the end of the bucket before it."""
# Number of positions whose log-probabilities are matched in a single step.
_POSITIONS_AT_ONCE = 1024


class TensorFile(Protocol):
    """An open safetensors file that reads tensors one at a time."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class Span(NamedTuple):
    """Tokens of a row from `start` to `end` - 1. The first token has the number 0."""

    start: int
    end: int

    @property
    def places(self) -> slice:
        """Return the slice of these tokens in arrays that have no entry for a row's first token."""
        return slice(max(self.start, 1) - 1, max(self.end, 1) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """Scores of both models on one row.

    All arrays have the shape (places,). There is a place for each token except the row's first
    token.

    `kl` is KL(baseline || candidate) in nats. It is exact at the first `exact` places, and a lower
    bound at all later places. `changed` is 1 if the likeliest tokens of the two models differ at a
    place, else 0.
    """

    kl: Scores
    exact: int
    baseline_nll: Scores
    candidate_nll: Scores
    changed: Scores

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the row, including the first token."""
        return len(self.baseline_nll) + 1


def buckets_of(tokens: int) -> tuple[Span, ...]:
    """Return the buckets of rows of at most `tokens` tokens.

    The last bucket ends with the row. If it would have fewer tokens than the first bucket, it is
    joined to the bucket before it.
    """
    ends = _ends(FIRST_BUCKET_END, BUCKET_GROWTH, tokens)
    if len(ends) > 1 and tokens - ends[-2] < FIRST_BUCKET_END:
        del ends[-2]
    return tuple(map(Span, [0, *ends[:-1]], ends))


def doublings_of(tokens: int) -> tuple[Span, ...]:
    """Return spans that end at powers of two, for a curve over the position of a token.

    The last span ends at `tokens`, the maximum number of tokens of a row.
    """
    ends = _ends(2, 2, tokens)
    return tuple(map(Span, [1, *ends[:-1]], ends))


def _ends(first: int, growth: int, last: int) -> list[int]:
    """Return a geometric sequence of numbers below `last`, and `last` itself."""
    ends = []
    end = first
    while end < last:
        ends.append(end)
        end *= growth
    return [*ends, last]


def joined(values: Iterable[Scores], span: Span) -> Scores:
    """Return the values of all rows at the tokens of `span`, shape (tokens,)."""
    return np.concatenate([np.zeros(0), *(row[span.places] for row in values)])


def row_means(values: Iterable[Scores], span: Span) -> Scores:
    """Return the mean over the tokens of `span`, for each row that has such tokens."""
    parts = [row[span.places] for row in values]
    return np.array([part.mean() for part in parts if len(part)])


def compare_rows(baseline: ServedSession, candidate: ServedSession) -> Iterator[ComparedRow]:
    """Yield the comparison of both models on each row.

    Only one row's log-probabilities are in memory at a time. The KL is exact at the first tokens of
    a row if both models returned log-probabilities of the whole vocabulary for them. If the
    vocabulary is small, the KL is exact at all tokens.
    """
    is_partial = baseline.has_partial_logprobs or candidate.has_partial_logprobs
    with ExitStack() as files:
        old_beginnings = files.enter_context(_open_tensors(baseline.logprobs_file))
        new_beginnings = files.enter_context(_open_tensors(candidate.logprobs_file))
        old_scores = files.enter_context(_open_tensors(baseline.text_file))
        new_scores = files.enter_context(_open_tensors(candidate.text_file))
        for number in range(len(baseline.rows)):
            name = f"prompt.{number}"
            first = old_beginnings.get_tensor(name)
            second = new_beginnings.get_tensor(name)
            is_exact = not is_partial and first.shape == second.shape
            beginning = kl_divergence(first, second) if is_exact else least_kl(first, second)
            old = _scored_row(old_scores, "", number)
            new = _scored_row(new_scores, "", number)
            kl, is_whole = _kl_of_likeliest(old, new)
            kl = torch.cat([beginning, kl[len(beginning) :]])
            exact = len(beginning) if is_exact else 0
            yield _compare_row(old, new, kl, len(kl) if is_exact and is_whole else exact)


def compare_repeated(session: ServedSession) -> Iterator[ComparedRow]:
    """Yield the comparison of a model's two readings, for each row that the model read twice.

    The first reading takes the place of the baseline. Yield nothing if the model read no row twice.
    All KLs are lower bounds.
    """
    with _open_tensors(session.text_file) as scores:
        names = set(scores.keys())
        for number in range(rows_to_repeat(len(session.rows))):
            if f"{REPEATED_PREFIX}nll.{number}" not in names:
                return
            first = _scored_row(scores, "", number)
            second = _scored_row(scores, REPEATED_PREFIX, number)
            kl, _ = _kl_of_likeliest(first, second)
            yield _compare_row(first, second, kl, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoredRow:
    """One model's scores of a row, as in `RowScores`."""

    nll: torch.Tensor
    likeliest: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor


@contextmanager
def _open_tensors(file: Path) -> Iterator[TensorFile]:
    with safe_open(file, framework="pt") as opened:
        yield opened


def _scored_row(scores: TensorFile, prefix: str, number: int) -> _ScoredRow:
    return _ScoredRow(
        nll=scores.get_tensor(f"{prefix}nll.{number}"),
        likeliest=scores.get_tensor(f"{prefix}likeliest.{number}"),
        tokens=scores.get_tensor(f"{prefix}tokens.{number}"),
        logprobs=scores.get_tensor(f"{prefix}logprobs.{number}"),
    )


def _compare_row(old: _ScoredRow, new: _ScoredRow, kl: torch.Tensor, exact: int) -> ComparedRow:
    return ComparedRow(
        kl=kl.double().numpy(),
        exact=exact,
        baseline_nll=old.nll.double().numpy(),
        candidate_nll=new.nll.double().numpy(),
        changed=(old.likeliest != new.likeliest).double().numpy(),
    )


def _kl_of_likeliest(old: _ScoredRow, new: _ScoredRow) -> tuple[torch.Tensor, bool]:
    """Return the KL at each place of a row, and whether it is over the whole vocabulary.

    If a model did not list the whole vocabulary, the KL is a lower bound. All tokens that one of
    the models did not list are then merged into a single token.
    """
    has_same_width = old.tokens.shape == new.tokens.shape
    is_whole = has_same_width and _is_whole(old.tokens) and _is_whole(new.tokens)
    measure = kl_divergence if is_whole else least_kl
    parts = []
    for start in range(0, len(old.tokens), _POSITIONS_AT_ONCE):
        part = slice(start, start + _POSITIONS_AT_ONCE)
        other = _aligned(old.tokens[part], new.tokens[part], new.logprobs[part])
        first = old.logprobs[part]
        if is_whole:
            # The text's token comes first at each place. If vLLM also lists it among the likeliest
            # tokens, NO_TOKEN replaces this second entry.
            is_unused = old.tokens[part] == NO_TOKEN
            first = first.masked_fill(is_unused, -math.inf)
            other = other.masked_fill(is_unused, -math.inf)
        parts.append(measure(first, other))
    return torch.cat(parts), is_whole


def _is_whole(tokens: torch.Tensor) -> bool:
    """Return True if each place lists all tokens of a vocabulary."""
    listed = (tokens != NO_TOKEN).sum(-1)
    return bool((listed == int(tokens.max()) + 1).all())


def _aligned(tokens: torch.Tensor, others: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of `tokens`, from the `logprobs` of the tokens `others`.

    All arguments have the shape (places, width). Tokens that are missing in `others` have NaN.
    """
    ordered, order = others.sort(dim=-1)
    at = torch.searchsorted(ordered, tokens).clamp(max=ordered.shape[-1] - 1)
    is_known = (ordered.gather(-1, at) == tokens) & (tokens != NO_TOKEN)
    values = logprobs.gather(-1, order.gather(-1, at))
    return values.masked_fill(~is_known, math.nan)
