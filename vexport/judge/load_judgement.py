"""Judge the responses of a loaded model by a reference model: the gate after `vexport load`.

The reference is transformers with dequantized weights (`vexport/engine/reference.py`). It is built
in this process, which takes the memory of the dequantized model.
"""

import torch

from vexport.engine.agreement import canary_findings, kl_limit, read_logprobs, symptom
from vexport.engine.reference import (
    REFERENCE_FILE,
    agreement_limit,
    cached_reference,
    reference_canaries,
)
from vexport.errors import InputError
from vexport.inference.answers import ServedSession
from vexport.numerics.metrics import kl_divergence
from vexport.records import Finding, LoadReport, LogprobAgreement, OnProgress, silent
from vexport.rules import load, logprobs

REFERENCE = "transformers with dequantized weights"


def judge_by_reference(
    served: ServedSession, baseline: ServedSession | None = None, on_progress: OnProgress = silent
) -> LoadReport:
    """Report whether vLLM refused a model, and whether its outputs are plausible.

    Continuations must not be degenerate. Log-probabilities must be finite, and must agree with the
    reference model's log-probabilities.

    Builds the reference model if vLLM loaded the checkpoint, unless its log-probabilities are
    stored next to vLLM's. `baseline` is the session of the unquantized model with the same prompts.
    """
    result = served.result
    agreement = None
    if result.failure is not None:
        findings = [_refusal(served)]
    else:
        agreement, disagreements = _compare_with_reference(served, on_progress)
        agrees = agreement is not None and not disagreements
        findings = [*_judge_canaries(served, baseline, agrees=agrees), *disagreements]
    return LoadReport(
        checkpoint=str(result.checkpoint),
        ok=all(finding.severity != "error" for finding in findings),
        findings=tuple(findings),
        vllm=result.vllm,
        engine=result.engine,
        canaries=result.canaries,
        logprobs=agreement,
    )


def _refusal(served: ServedSession) -> Finding:
    assert served.result.failure is not None
    reason = served.result.failure.message
    return Finding.at(load.REFUSED, str(served.checkpoint), reason=reason)


def _judge_canaries(
    served: ServedSession, baseline: ServedSession | None, *, agrees: bool
) -> list[Finding]:
    """Return findings on the continuations, compared with the baseline's.

    Without a baseline, bad continuations are compared with those of the reference model.
    """
    canaries = served.result.canaries
    if baseline is not None:
        return canary_findings(canaries, baseline.result.canaries, agrees=agrees)
    findings = canary_findings(canaries)
    if not served.prompts.natural:
        # If the prompts are random tokens, only numbers that are not finite are a fault.
        return [finding for finding in findings if finding.severity == "error"]
    if not findings:
        return []
    bad = [canary for canary in canaries if symptom(canary) is not None]
    try:
        expected = reference_canaries(served.checkpoint, bad)
    except InputError:  # `_compare_with_reference` reports it
        return findings
    worse = canary_findings(canaries, expected)
    return worse if any(finding.severity == "error" for finding in worse) else findings


def _compare_with_reference(
    served: ServedSession, on_progress: OnProgress
) -> tuple[LogprobAgreement | None, list[Finding]]:
    result = served.result
    if result.logprobs_file is None:
        return None, []
    checkpoint = served.checkpoint
    tokens = served.prompts.tokens
    where = str(checkpoint)
    measured = read_logprobs(result.logprobs_file)
    not_numbers = int(torch.isnan(measured).any(dim=-1).sum())
    if not_numbers:
        count = len(measured)
        return None, [Finding.at(logprobs.NOT_A_NUMBER, where, wrong=not_numbers, count=count)]
    kept = result.logprobs_file.with_name(REFERENCE_FILE)
    try:
        reference = cached_reference(checkpoint, tokens, kept, on_progress)
    except InputError as problem:
        return None, [Finding.of(problem, check="logprobs", claim=None, severity="info")]
    kv_cache = result.engine.settings.get("kv_cache_dtype", "auto") if result.engine else "auto"
    limit = kl_limit(checkpoint, kv_cache, result.engine.input_bits if result.engine else None)
    kl = kl_divergence(reference, measured)
    same = reference.argmax(dim=-1) == measured.argmax(dim=-1)
    mean_kl = float(kl.mean())
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
    found = Finding.at(
        logprobs.DISTANCE,
        where,
        mean_kl=mean_kl,
        count=len(kl),
        limit=limit,
        reference=REFERENCE,
    )
    return agreement, [found]
