"""The session that shows whether a checkpoint works in the real vLLM, and the report on its answers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vexport.architectures.text_config import text_config
from vexport.checks.vllm.view import error
from vexport.engine.agreement import (
    canary_findings,
    compare_logprobs,
    kl_limit,
    not_finite,
    read_logprobs,
    symptom,
)
from vexport.engine.messages import CANARY_TOKENS, SessionRequest, SessionResult
from vexport.engine.prompts import Prompts
from vexport.engine.reference import REFERENCE_FILE, agreement_limit, reference_canaries, remembered_reference
from vexport.errors import InputError
from vexport.records import Finding, LoadReport, LogprobAgreement, OnProgress, silent

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


def load_request(checkpoint: Path, prompts: Prompts, *, logprobs_file: Path) -> SessionRequest:
    """The smallest session that shows whether a checkpoint works."""
    return SessionRequest(
        checkpoint=checkpoint,
        name=checkpoint.name,
        max_model_len=shortest_length(checkpoint),
        canaries=prompts.texts,
        logprob_prompts=prompts.tokens,
        logprobs_file=logprobs_file,
    )


def shortest_length(checkpoint: Path, length: int = _MAX_LENGTH) -> int:
    """`length`, or the model's own limit where that is less: what vLLM reserves its cache for."""
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

    Builds the reference model in this process when the session has log-probabilities. `baseline` is the
    session of the unquantized model with the same prompts.
    """
    if result.failure is not None:
        return _report(result, [refused(result)], None)
    agreement, disagreements = _agreement(result, prompts, on_progress)
    agrees = agreement is not None and not disagreements
    findings = [*_canaries(result, prompts, baseline, agrees=agrees), *_short(result), *disagreements]
    return _report(result, findings, agreement)


def _canaries(
    result: SessionResult, prompts: Prompts, baseline: SessionResult | None, *, agrees: bool
) -> list[Finding]:
    """Findings on the continuations, against the baseline's or, for bad ones, the reference's."""
    if baseline is not None:
        return canary_findings(result.canaries, baseline.canaries, agrees=agrees)
    if not prompts.natural:
        return not_finite(result.canaries)
    findings = canary_findings(result.canaries)
    bad = [canary for canary in result.canaries if symptom(canary) is not None]
    if not bad:
        return findings
    try:
        reference = reference_canaries(result.checkpoint, bad)
    except InputError:  # `_agreement` says so
        return findings
    worse = canary_findings(result.canaries, reference)
    return worse if any(finding.severity == "error" for finding in worse) else findings


def _short(result: SessionResult) -> list[Finding]:
    """A note where the longest sequence left no room for all tokens."""
    fewest = min((canary.tokens for canary in result.canaries), default=CANARY_TOKENS)
    if fewest >= CANARY_TOKENS:
        return []
    return [
        Finding(
            check="canary",
            severity="info",
            where=str(result.checkpoint),
            expected=f"{CANARY_TOKENS} tokens after each prompt",
            got=f"{fewest} tokens, as long as a sequence may be",
            fix="nothing; a longer one says more where the model allows it (--max-model-len)",
        )
    ]


def _report(
    result: SessionResult, findings: Sequence[Finding], agreement: LogprobAgreement | None
) -> LoadReport:
    return LoadReport(
        checkpoint=str(result.checkpoint),
        ok=all(finding.severity != "error" for finding in findings),
        findings=tuple(findings),
        vllm=result.vllm,
        engine=result.engine,
        canaries=result.canaries,
        logprobs=agreement,
    )


def _agreement(
    result: SessionResult, prompts: Prompts, on_progress: OnProgress
) -> tuple[LogprobAgreement | None, list[Finding]]:
    if result.logprobs_file is None:
        return None, []
    measured = read_logprobs(result.logprobs_file)
    if bool(torch.isnan(measured).any()):
        return None, [_not_finite(result, measured)]
    try:
        kept = result.logprobs_file.with_name(REFERENCE_FILE)
        reference = remembered_reference(result.checkpoint, prompts.tokens, kept, on_progress)
    except InputError as problem:
        return None, [Finding.of(problem, check="logprobs", severity="info")]
    cache = result.engine.settings.get("kv_cache_dtype", "auto") if result.engine else "auto"
    agreement = compare_logprobs(
        reference,
        measured,
        name=REFERENCE,
        prompts=len(prompts.tokens),
        limit=kl_limit(result.checkpoint, cache),
    )
    limit = agreement_limit(
        result.checkpoint,
        prompts.tokens,
        kept,
        mean_kl=agreement.mean_kl,
        limit=agreement.limit,
        on_progress=on_progress,
    )
    agreement = replace(agreement, limit=limit)
    return agreement, _disagreement(result, agreement)


def refused(result: SessionResult) -> Finding:
    """The finding on a checkpoint that vLLM does not load."""
    assert result.failure is not None
    fix = "find the fault with `vexport check`, repair it with `vexport repair`, or export it again"
    expected, got = "a checkpoint that vLLM loads", result.failure.message
    return error("load", str(result.checkpoint), expected=expected, got=got, fix=fix)


def _not_finite(result: SessionResult, measured: torch.Tensor) -> Finding:
    bad = int(torch.isnan(measured).any(dim=-1).sum())
    expected, got = "finite log-probabilities", f"NaN at {bad} of {len(measured)} positions"
    fix = "look for scales that are zero, infinite or missing with `vexport check`"
    return error("logprobs", str(result.checkpoint), expected=expected, got=got, fix=fix)


def _disagreement(result: SessionResult, agreement: LogprobAgreement) -> list[Finding]:
    if agreement.mean_kl <= agreement.limit:
        return []
    expected = f"mean KL to {agreement.reference} at most {agreement.limit:g}"
    got = f"{agreement.mean_kl:.4g} over {agreement.positions} positions"
    fix = "vLLM does not read this checkpoint as it was written: see `vexport check`"
    return [error("logprobs", str(result.checkpoint), expected=expected, got=got, fix=fix)]
