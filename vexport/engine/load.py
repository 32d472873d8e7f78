"""Fixed prompts for any model: English where its tokenizer knows English, seeded tokens where it
does not.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vexport.architectures.config import text_config
from vexport.checks.vllm.findings import error
from vexport.engine.agreement import canary_findings, kl_limit, read_logprobs, symptom
from vexport.engine.messages import SessionResult
from vexport.engine.reference import (
    REFERENCE_FILE,
    agreement_limit,
    reference_canaries,
    remembered_reference,
)
from vexport.errors import InputError, first_line
from vexport.numerics.metrics import kl_divergence
from vexport.records import Finding, LoadReport, LogprobAgreement, OnProgress, silent

TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is",
    "Water boils at one hundred degrees Celsius at sea level, and it freezes at",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village at the edge of the forest, there lived an old "
    "clockmaker who",
    "Question: If a train travels 60 miles in one hour, how far does it travel in three "
    "hours?\nAnswer:",
    "The three primary colours are red, yellow and",
    "SELECT name, price FROM products WHERE price > 100 ORDER BY price DESC LIMIT 10; returns "
    "at most ten",
    "Le chat dort sur le canap\u00e9 pendant que les enfants jouent dans le jardin. Il fait "
    "beau et",
    "Der Zug nach Berlin f\u00e4hrt um acht Uhr von Gleis sieben ab. Die Fahrt dauert etwa vier",
    "To make bread you need flour, water, salt and yeast. Mix them, knead the dough for ten "
    "minutes, let it",
    'The response of the server was {"status": "ok", "count": 3, "items": ["apple", "banana", '
    '"cherry"]}, so',
    "The theory of evolution by natural selection was first set out by Charles Darwin in his "
    "book On the",
    "User: My laptop does not turn on any more. What should I try first?\nAssistant: Check "
    "that the",
    "Let x be a real number with 2x + 3 = 11. Subtracting 3 from both sides gives 2x = 8, and "
    "therefore x =",
    "The committee met on Tuesday to discuss the budget. After a long debate the members "
    "agreed that the",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
)
# More unknown tokens than this and the tokenizer was not made for English text.
_MOST_UNKNOWN = 0.2
# Prompts that are continued: each generates 200 tokens, which costs more than log-probabilities.
CONTINUED = 6
_SEED = 20240229
_TOKENS = 64
_SEEDED_TOKENS = 48
REFERENCE = "transformers with dequantized weights"
_MAX_LENGTH = 512
# How configs name the longest sequence (vllm/transformers_utils/model_arch_config_convertor.py).
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Texts for greedy continuation, and the token ids whose log-probabilities are compared.

    Continuations of texts that are not `natural` language to the model say nothing by themselves.
    """

    natural: bool
    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]


def fixed_prompts(
    checkpoint: Path, *, texts: Sequence[str] = (), count: int = CONTINUED
) -> Prompts:
    """At most `count` prompts of at most 64 tokens, the same for every export of a model.

    The first `CONTINUED` texts are continued. `texts` come first where given (rows of the
    calibration data, say); the built-in ones otherwise. A tokenizer that does not know the texts
    gets its own sequences tokens, from a fixed seed. InputError where there is none.
    """
    tokenizer = _tokenizer(checkpoint)
    known = [text for text in (texts or TEXTS) if _knows(tokenizer, text)]
    if not known:
        return _seeded(tokenizer, count)
    tokens = [tuple(tokenizer(text)["input_ids"][:_TOKENS]) for text in known[:count]]
    return Prompts(
        natural=True,
        texts=tuple(known[:CONTINUED]),
        tokens=tuple(ids for ids in tokens if len(ids) > 1),
    )


def _tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint)
        if len(tokenizer) <= len(
            tokenizer.all_special_ids
        ):  # what transformers makes where no file is found
            raise ValueError("no vocabulary")
    except (
        Exception
    ) as error:  # transformers raises any class for a file that it does not understand
        raise InputError(
            str(checkpoint),
            got=f"no tokenizer that transformers reads ({first_line(error)})",
            need="tokenizer.json, or the files of the model's own tokenizer",
            fix="copy the tokenizer's files from the source next to the weights",
        ) from error
    return tokenizer


def _knows(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return len(ids) > 0 and ids.count(tokenizer.unk_token_id) <= _MOST_UNKNOWN * len(ids)


def _seeded(tokenizer: PreTrainedTokenizerBase, count: int) -> Prompts:
    """Seeded sequences over the vocabulary without its special tokens."""
    special = set(tokenizer.all_special_ids)
    ordinary = sorted(id_ for id_ in tokenizer.get_vocab().values() if id_ not in special)
    source = random.Random(_SEED)
    start = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    most = max(count, CONTINUED)
    tokens = [
        start + tuple(source.choices(ordinary, k=_SEEDED_TOKENS - len(start))) for _ in range(most)
    ]
    texts = tuple(tokenizer.decode(ids[1:9]) for ids in tokens[:CONTINUED])
    return Prompts(natural=False, texts=texts, tokens=tuple(tokens[:count]))


def shortest_length(checkpoint: Path, length: int = _MAX_LENGTH) -> int:
    """The smaller of `length` and the model's own limit: vLLM reserves its KV cache for it."""
    text = text_config(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")))
    return min([length, *(limit for key in _LENGTHS if isinstance(limit := text.get(key), int))])


def load_report(
    result: SessionResult,
    prompts: Prompts,
    *,
    baseline: SessionResult | None = None,
    on_progress: OnProgress = silent,
) -> LoadReport:
    """Judge a session: refused, degenerate, non-finite, or unlike the reference.

    Builds the reference model in this process when the session has log-probabilities. `baseline` is
    the session of the unquantized model with the same prompts.
    """
    agreement = None
    if result.failure is not None:
        fix = (
            "find the fault with `vexport check`, repair it with `vexport repair`, or export "
            "it again"
        )
        expected, got = "a checkpoint that vLLM loads", result.failure.message
        findings = [error("load", str(result.checkpoint), expected=expected, got=got, fix=fix)]
    else:
        agreement, disagreements = _agreement(result, prompts, on_progress)
        agrees = agreement is not None and not disagreements
        findings = [*_canaries(result, prompts, baseline, agrees=agrees), *disagreements]
    return LoadReport(
        checkpoint=str(result.checkpoint),
        ok=all(finding.severity != "error" for finding in findings),
        findings=tuple(findings),
        vllm=result.vllm,
        engine=result.engine,
        canaries=result.canaries,
        logprobs=agreement,
    )


def _canaries(
    result: SessionResult, prompts: Prompts, baseline: SessionResult | None, *, agrees: bool
) -> list[Finding]:
    """Findings on the continuations, against the baseline's or, for bad ones, the reference's."""
    if baseline is not None:
        return canary_findings(result.canaries, baseline.canaries, agrees=agrees)
    findings = canary_findings(result.canaries)
    if not prompts.natural:  # only numbers that are not finite are a fault in any text
        return [finding for finding in findings if finding.severity == "error"]
    if not findings:
        return []
    try:
        bad = [canary for canary in result.canaries if symptom(canary) is not None]
        worse = canary_findings(result.canaries, reference_canaries(result.checkpoint, bad))
    except InputError:  # `_agreement` says so
        return findings
    return worse if any(finding.severity == "error" for finding in worse) else findings


def _agreement(
    result: SessionResult, prompts: Prompts, on_progress: OnProgress
) -> tuple[LogprobAgreement | None, list[Finding]]:
    if result.logprobs_file is None:
        return None, []
    checkpoint, tokens, where = result.checkpoint, prompts.tokens, str(result.checkpoint)
    measured = read_logprobs(result.logprobs_file)
    if bad := int(torch.isnan(measured).any(dim=-1).sum()):
        expected, got = "finite log-probabilities", f"NaN at {bad} of {len(measured)} positions"
        fix = "look for scales that are zero, infinite or missing with `vexport check`"
        return None, [error("logprobs", where, expected=expected, got=got, fix=fix)]
    kept = result.logprobs_file.with_name(REFERENCE_FILE)
    try:
        reference = remembered_reference(checkpoint, tokens, kept, on_progress)
    except InputError as problem:
        return None, [Finding.of(problem, check="logprobs", severity="info")]
    cache = result.engine.settings.get("kv_cache_dtype", "auto") if result.engine else "auto"
    limit = kl_limit(checkpoint, cache, result.engine.input_bits if result.engine else None)
    kl = kl_divergence(reference, measured)
    mean_kl, same = float(kl.mean()), reference.argmax(dim=-1) == measured.argmax(dim=-1)
    limit = agreement_limit(
        checkpoint, tokens, kept, mean_kl=mean_kl, limit=limit, on_progress=on_progress
    )
    agreement = LogprobAgreement(
        reference=REFERENCE,
        prompts=len(tokens),
        positions=len(kl),
        mean_kl=mean_kl,
        max_kl=float(kl.max()),
        top1_agreement=float(same.double().mean()),
        limit=limit,
    )
    if mean_kl <= limit:
        return agreement, []
    expected = f"mean KL to {REFERENCE} at most {limit:g}"
    got = f"{mean_kl:.4g} over {len(kl)} positions"
    fix = "vLLM does not read this checkpoint as it was written: see `vexport check`"
    return agreement, [error("logprobs", where, expected=expected, got=got, fix=fix)]
