"""Sentences that several formats share."""

from vexport.reports.formatting import bits_per_weight, percent, points, ratio, size, small
from vexport.types import EngineInfo, LogprobAgreement, Plan, Verdict


def size_change(plan: Plan) -> str:
    """Bytes before and after, and bits per weight."""
    share = ratio(plan.output_bytes, plan.source_bytes)
    bits = bits_per_weight(plan.output_bytes, plan.parameters)
    return f"{size(plan.source_bytes)} to {size(plan.output_bytes)} ({share}), {bits} bits per weight"


def schemes_in_use(plan: Plan) -> str:
    """The schemes by name."""
    return ", ".join(plan.schemes) or "nothing quantized"


def engine_line(engine: EngineInfo) -> str:
    """Which vLLM ran where."""
    emulated = ", kernels emulated" if engine.emulated else ""
    return f"{engine.vllm} on {engine.platform} ({engine.processor}{emulated})"


def agreement_line(agreement: LogprobAgreement) -> str:
    """How far vLLM's log-probabilities are from the reference, against the limit."""
    return (
        f"mean KL {small(agreement.mean_kl)} against {agreement.reference} (limit {small(agreement.limit)}), "
        f"max {small(agreement.max_kl)}, first choice agrees {percent(agreement.top1_agreement)} "
        f"over {agreement.positions} positions"
    )


def method_line(verdict: Verdict) -> str:
    """What loss is accepted, at what risk, by which test."""
    margin = points(verdict.margin, sign=False)
    return f"accepted loss {margin} points, alpha {verdict.alpha:g}; {verdict.method}"
