"""Measure the drift of the candidate's log-probabilities from the baseline's, both in vLLM.

Both models score the same tokens. Drift is an early signal: it needs a few hundred tokens, but a
task needs a thousand documents. Drift leads to warnings and never to FAIL, because a model may
drift far and still solve the task.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean as mean

import torch
from safetensors import safe_open
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vexport.files import digest_bytes
from vexport.inference.answers import ServedSession
from vexport.numerics.metrics import kl_divergence
from vexport.records import Drift, PromptDrift, TokenDrift
from vexport.scenario import Evaluate

WORST = 3
"""Number of prompts in the report. Each prompt fills a screen."""
_DIGITS = 16
_ROUNDING = 1e-6
"""Rounding error of a sum of probabilities that were stored as logarithms in float32."""


def measure_drift(
    baseline: ServedSession, candidate: ServedSession, settings: Evaluate
) -> Drift | None:
    """Return KL and NLL over all positions, and the prompts with the most drift.

    Return None if vLLM refused one of the models, if the two models got different tokens, or if
    log-probabilities are not finite.
    """
    if not baseline.is_scored or not candidate.is_scored:
        return None
    if baseline.prompts.tokens != candidate.prompts.tokens:
        return None
    tokenizer = AutoTokenizer.from_pretrained(baseline.checkpoint)
    prompts, same = [], []
    for prompt, old, new in _rows(baseline, candidate):
        prompts.append(_prompt(tokenizer, prompt, old, new))
        same.append((old.argmax(dim=-1) == new.argmax(dim=-1)).to(torch.float64))
        if torch.isnan(old).any() or torch.isnan(new).any() or not math.isfinite(prompts[-1].kl):
            return None
    tokens = [token for drifted in prompts for token in drifted.tokens]
    return Drift(
        prompts=len(prompts),
        positions=len(tokens),
        mean_kl=mean([token.kl for token in tokens]),
        max_kl=max(token.kl for token in tokens),
        top1_agreement=float(torch.cat(same).mean()),
        baseline_nll=mean([token.baseline_nll for token in tokens]),
        candidate_nll=mean([token.candidate_nll for token in tokens]),
        kl_limit=settings.kl_limit,
        nll_limit=settings.nll_limit,
        digest=digest_bytes(repr(baseline.prompts.tokens).encode())[:_DIGITS],
        worst=tuple(sorted(prompts, key=lambda prompt: prompt.kl, reverse=True)[:WORST]),
    )


def _prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], old: torch.Tensor, new: torch.Tensor
) -> PromptDrift:
    kl = kl_divergence(old, new).tolist()
    predicted = torch.tensor(prompt[1:])[:, None]
    before, after = ((-side.gather(1, predicted)[:, 0]).tolist() for side in (old, new))
    return PromptDrift(
        prompt=tokenizer.decode(prompt, skip_special_tokens=True),
        kl=mean(kl),
        baseline_nll=mean(before),
        candidate_nll=mean(after),
        tokens=tuple(
            TokenDrift(
                token=tokenizer.decode([token]),
                kl=each,
                baseline_nll=old_nll,
                candidate_nll=new_nll,
            )
            for token, each, old_nll, new_nll in zip(prompt[1:], kl, before, after, strict=True)
        ),
    )


def least_kl(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return a lower bound of the KL at each position, in nats.

    NaN marks a token without a log-probability from one of the models. All these tokens are merged
    into a single token. Merging tokens never increases the KL (log-sum inequality).
    """
    width = max(old.shape[-1], new.shape[-1])
    old, new = (
        functional.pad(each.double(), (0, width - each.shape[-1]), value=math.nan)
        for each in (old, new)
    )
    known = ~(old.isnan() | new.isnan())
    terms = torch.where(known & (old > -math.inf), old.exp() * (old - new), 0.0).sum(-1)
    rest, other = (1 - torch.where(known, each.exp(), 0.0).sum(-1) for each in (old, new))
    others = torch.where(rest > _ROUNDING, rest * (rest / other.clamp(min=_ROUNDING)).log(), 0.0)
    return (terms + others).clamp(min=0)


def drift_warnings(drift: Drift) -> tuple[str, ...]:
    """Return a sentence for each limit that is exceeded."""
    measures = (
        ("KL to the baseline", drift.mean_kl, drift.kl_limit, drift.is_kl_high),
        (
            "rise of the NLL over the baseline's",
            drift.nll_rise,
            drift.nll_limit,
            drift.is_nll_high,
        ),
    )
    return tuple(
        f"log-probabilities: mean {what} is {value:.3g} nats per token over {drift.positions} "
        f"tokens, more "
        f"than {limit:g}: quality outside the tested tasks may be worse"
        for what, value, limit, is_high in measures
        if is_high
    )


def _rows(
    baseline: ServedSession, candidate: ServedSession
) -> Iterator[tuple[Sequence[int], torch.Tensor, torch.Tensor]]:
    """Yield each prompt's tokens and both models' matrices (positions, vocabulary)."""
    with (
        safe_open(baseline.logprobs_file, framework="pt") as old,
        safe_open(candidate.logprobs_file, framework="pt") as new,
    ):
        for number, prompt in enumerate(baseline.prompts.tokens):
            name = f"prompt.{number}"
            yield prompt, old.get_tensor(name), new.get_tensor(name)
