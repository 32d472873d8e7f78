"""The drift of the candidate's log-probabilities from the baseline's, both in vLLM, on the same tokens.

An early signal: it needs some hundred tokens where a task needs a thousand documents, and it warns. It never
decides, since a model may drift far and still answer right.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch.nn import functional
from transformers import AutoTokenizer

from vexport.engine.load import Prompts
from vexport.files import digest_bytes
from vexport.numerics.metrics import kl_divergence
from vexport.records import Drift, PromptDrift, TokenDrift
from vexport.scenario import DEFAULT_ALPHA, DEFAULT_KL_LIMIT, DEFAULT_NLL_LIMIT

WORST = 3
"""Prompts shown: each takes a screen in the report."""
_DIGITS = 16
_ROUNDING = 1e-6
"""Of a sum of probabilities that are told as logarithms in float32."""


class Limits(NamedTuple):
    """Nats a token: of the mean KL, and of the rise of the mean NLL. A drift beyond them is a warning; where
    text decides, `alpha` is the risk of a wrong PASS and of a wrong FAIL.
    """

    kl: float = DEFAULT_KL_LIMIT
    nll: float = DEFAULT_NLL_LIMIT
    alpha: float = DEFAULT_ALPHA


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A model, the prompts it was given and the worker's file with its log-probabilities.

    Of a served model they are those of the likeliest tokens (`is_partial`), NaN for others.
    """

    checkpoint: Path
    prompts: Prompts
    logprobs_file: Path
    is_partial: bool = False


def measure_drift(baseline: Scored, candidate: Scored, *, limits: Limits) -> Drift | None:
    """KL and NLL over all positions, and the prompts that drift most.

    None where the models were not given the same tokens, or answered with numbers that are not finite.
    """
    if baseline.prompts.tokens != candidate.prompts.tokens:
        return None
    prompts, same, finite = [], [], True
    for (prompt, old, new), text in zip(_rows(baseline, candidate), _texts(baseline), strict=True):
        same.append((old.argmax(dim=-1) == new.argmax(dim=-1)).to(torch.float64))
        prompts.append(_prompt(prompt, old, new, text))
        finite = finite and not bool(torch.isnan(old).any() | torch.isnan(new).any())
    if not finite or not all(math.isfinite(prompt.kl) for prompt in prompts):
        return None
    tokens = [token for prompt in prompts for token in prompt.tokens]
    return Drift(
        prompts=len(prompts),
        positions=len(tokens),
        mean_kl=_mean([token.kl for token in tokens]),
        max_kl=max(token.kl for token in tokens),
        top1_agreement=float(torch.cat(same).mean()),
        baseline_nll=_mean([token.baseline_nll for token in tokens]),
        candidate_nll=_mean([token.candidate_nll for token in tokens]),
        kl_limit=limits.kl,
        nll_limit=limits.nll,
        digest=digest_bytes(repr(baseline.prompts.tokens).encode())[:_DIGITS],
        worst=tuple(sorted(prompts, key=lambda prompt: prompt.kl, reverse=True)[:WORST]),
    )


def mean_kls(baseline: Scored, candidate: Scored) -> list[float] | None:
    """The mean KL of each prompt; None where one is not finite. Both were given the same tokens."""
    measure = least_kl if baseline.is_partial or candidate.is_partial else kl_divergence
    kls = [float(measure(old, new).mean()) for _, old, new in _rows(baseline, candidate)]
    return kls if all(map(math.isfinite, kls)) else None


def least_kl(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A lower bound of the KL at each position, in nats, where NaN are tokens that a side does not tell.

    They count as one token: the KL of sums is no larger (log-sum inequality).
    """
    width = max(old.shape[-1], new.shape[-1])
    old, new = (
        functional.pad(each.double(), (0, width - each.shape[-1]), value=math.nan) for each in (old, new)
    )
    known = ~(old.isnan() | new.isnan())
    terms = torch.where(known & (old > -math.inf), old.exp() * (old - new), 0.0).sum(-1)
    rest, other = (1 - torch.where(known, each.exp(), 0.0).sum(-1) for each in (old, new))
    others = torch.where(rest > _ROUNDING, rest * (rest / other.clamp(min=_ROUNDING)).log(), 0.0)
    return (terms + others).clamp(min=0)


def drift_warnings(drift: Drift) -> tuple[str, ...]:
    """A sentence for each limit that is exceeded."""
    rise = drift.candidate_nll - drift.baseline_nll
    measures = (
        ("KL to the baseline", drift.mean_kl, drift.kl_limit),
        ("rise of the NLL over the baseline's", rise, drift.nll_limit),
    )
    return tuple(
        f"log-probabilities: mean {what} is {value:.3g} nats a token over {drift.positions} tokens, more "
        f"than {limit:g}: answers that no task asked for may be worse"
        for what, value, limit in measures
        if value > limit
    )


def _rows(baseline: Scored, candidate: Scored) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The predicted tokens (positions,) and both models' matrices (positions, vocabulary), by prompt."""
    with (
        safe_open(baseline.logprobs_file, framework="pt") as old,
        safe_open(candidate.logprobs_file, framework="pt") as new,
    ):
        for number, prompt in enumerate(baseline.prompts.tokens):
            name = f"prompt.{number}"
            yield torch.tensor(prompt[1:]), old.get_tensor(name), new.get_tensor(name)


def _texts(side: Scored) -> Iterator[tuple[str, list[str]]]:
    """Each prompt as text, with the text of each token but the first."""
    tokenizer = AutoTokenizer.from_pretrained(side.checkpoint)
    for prompt in side.prompts.tokens:
        yield (
            tokenizer.decode(prompt, skip_special_tokens=True),
            [tokenizer.decode([token]) for token in prompt[1:]],
        )


def _prompt(
    tokens: torch.Tensor, old: torch.Tensor, new: torch.Tensor, text: tuple[str, list[str]]
) -> PromptDrift:
    kl = kl_divergence(old, new).tolist()
    costs = [(-side.gather(1, tokens[:, None])[:, 0]).tolist() for side in (old, new)]
    shown = tuple(
        TokenDrift(token=token, kl=divergence, baseline_nll=before, candidate_nll=after)
        for token, divergence, before, after in zip(text[1], kl, *costs, strict=True)
    )
    return PromptDrift(
        prompt=text[0],
        kl=_mean(kl),
        baseline_nll=_mean(costs[0]),
        candidate_nll=_mean(costs[1]),
        tokens=shown,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
