"""Sentences that several formats share."""

import shlex
from collections.abc import Sequence
from statistics import median

from vexport.records import (
    Attribution,
    Comparison,
    Drift,
    EngineInfo,
    ExpertCoverage,
    LogprobAgreement,
    Plan,
    Prompting,
    Report,
    TaskVerdict,
    TextLimit,
    Verdict,
)
from vexport.reports.formatting import Scale, bits_per_weight, count, percent, plural, ratio, size, small

# What says nothing of how a model was served.
_OFF = {
    ("pipeline_parallel_size", "1"),
    ("distributed_executor_backend", "uni"),
    ("distributed_executor_backend", "mp"),
    ("kv_cache_dtype", "auto"),
    ("engine_args", "none"),
}
MAX_BESIDE = 8
"""Comparisons shown for each task next to its gate; JSON has all."""


def outcome_line(outcome: str, device: str) -> str:
    """`PASS on CPU, emulated`; the outcome alone where nothing ran the model."""
    return f"{outcome} on {device}" if device else outcome


def report_device(report: Report) -> str:
    """Return the device that ran the quantized model, or the server that answered; empty where none did."""
    if report.verdict is not None and "://" in report.verdict.device:
        return report.verdict.device
    return report.load.engine.device if report.load.engine else ""


def report_sentence(report: Report) -> str:
    """Return why the run ended as it did; of a checkpoint that loads its size too."""
    if not report.load.ok or not report.plan.source_bytes:
        return report.reason
    return f"{report.reason}. {ratio(report.plan.output_bytes, report.plan.source_bytes)} of the size."


def next_step(report: Report) -> tuple[str, str]:
    """Return the next command, or an empty one, and a sentence."""
    if report.outcome == "PASS":
        return f"vllm serve {shlex.quote(report.load.checkpoint)}", "Serve it."
    if report.verdict and any(task.uninformative for task in report.verdict.tasks):
        return "", "Ask the models as they were trained (apply_chat_template), or choose tasks they can do."
    if report.outcome == "INCONCLUSIVE":
        return (
            "",
            "Evaluate more documents, tasks or text (evaluate.limit, tasks, text_rows), or accept a larger "
            "loss.",
        )
    if report.load.ok:
        return "", (
            "Keep the layers that lose most, choose a scheme with more bits, or leave the choice to `scheme: "
            "auto`."
        )
    return "", "Fix the findings below; vexport repair CHECKPOINT OUT fixes those that can be fixed."


def opening(sentence: str) -> str:
    """A sentence that stands on its own line: a capital, unless it starts with a name."""
    return (
        sentence[0].upper() + sentence[1:]
        if sentence.startswith(("all ", "both ", "check ", "load "))
        else sentence
    )


def size_change(plan: Plan) -> str:
    """Bytes before and after, and bits per weight."""
    share = ratio(plan.output_bytes, plan.source_bytes)
    bits = bits_per_weight(plan.output_bytes, plan.parameters)
    return f"{size(plan.source_bytes)} to {size(plan.output_bytes)} ({share}), {bits} bits per weight"


def schemes_in_use(plan: Plan) -> str:
    """The schemes by name, and how the KV cache is stored where that is calibrated."""
    cache = (f"{plan.kv_cache} KV cache",) if plan.kv_cache else ()
    return ", ".join((*plan.schemes, *cache)) or "nothing quantized"


def engine_line(engine: EngineInfo) -> str:
    """Return the version of vLLM and its platform."""
    emulated = ", kernels emulated" if engine.emulated else ""
    return f"{engine.vllm} on {engine.platform} ({engine.processor}{emulated})"


def served_with(engine: EngineInfo) -> str:
    """`tensor_parallel_size 2, max_num_seqs 256`: how the engine was started, without what is off."""
    settings = [(name, value) for name, value in engine.settings.items() if (name, value) not in _OFF]
    return ", ".join(f"{name} {value}" for name, value in settings)


def agreement_line(agreement: LogprobAgreement) -> str:
    """Return the distance of vLLM's log-probabilities from the reference, against the limit."""
    return (
        f"mean KL {small(agreement.mean_kl)} against {agreement.reference} (limit {small(agreement.limit)}), "
        f"max {small(agreement.max_kl)}, first choice agrees {percent(agreement.top1_agreement)} "
        f"over {agreement.positions} positions"
    )


def scale_of(task: TaskVerdict) -> Scale:
    """Per cent where both means are at most one, as in the verdict's reason; else the metric's own units."""
    return Scale(max(task.baseline.value, task.candidate.value) <= 1)


def drift_line(drift: Drift) -> str:
    """Return the distance of the quantized model's log-probabilities from the baseline's, against the
    limits.
    """
    rise = drift.candidate_nll - drift.baseline_nll
    return (
        f"mean KL {small(drift.mean_kl)} nats per token (limit {small(drift.kl_limit)}), NLL {rise:+.3g} "
        f"(limit {drift.nll_limit:+.3g}), first choice agrees {percent(drift.top1_agreement)} over "
        f"{drift.positions} positions"
    )


def attribution_line(attribution: Attribution) -> str:
    """Return the cause of a loss, and why."""
    cause = "no part stands out" if attribution.cause == "none" else f"the {attribution.cause}"
    return f"{cause}: {attribution.reason}"


def signal_lines(report: Report) -> Sequence[tuple[str, str]]:
    """Return the drift of both models' log-probabilities, each line with its label."""
    lines = []
    if report.drift:
        lines.append(("drift", drift_line(report.drift)))
    if report.attribution:
        lines.append(("cause", attribution_line(report.attribution)))
    return lines


def shown_comparisons(verdict: Verdict) -> tuple[Comparison, ...]:
    """All documents as one task, then what goes with each task: the worst of them, in their order."""
    return (
        *((verdict.pooled,) if verdict.pooled else ()),
        *(comparison for t in verdict.tasks for comparison in _worst(t)),
    )


def _worst(task: TaskVerdict) -> Sequence[Comparison]:
    """Return at most MAX_BESIDE; a group's other metrics stay, then its tasks with the greatest loss come."""
    order = sorted(task.also, key=lambda comparison: (comparison.task != task.task, comparison.difference))
    kept = {id(comparison) for comparison in order[:MAX_BESIDE]}
    return [comparison for comparison in task.also if id(comparison) in kept]


def task_title(task: TaskVerdict | Comparison) -> str:
    """The task with its metric, and the filter where it is not lm-eval's default."""
    suffix = "" if task.filter in ("", "none") else f", {task.filter}"
    return f"{task.task} ({task.metric}{suffix})"


def accepted_loss(verdict: Verdict) -> str:
    """The margin with its unit, or units where tasks differ."""
    scales = dict.fromkeys(map(scale_of, verdict.tasks)) or [Scale(True)]
    return " or ".join(f"{scale.limit(verdict.margin)} {scale.unit}" for scale in scales)


def method_line(verdict: Verdict) -> str:
    """Return the accepted loss and risk, the test, and how the models were asked."""
    asked = f"; {prompting_line(verdict.prompting)}" if verdict.prompting else ""
    return f"accepted loss {accepted_loss(verdict)}, alpha {verdict.alpha:g}; {verdict.method}{asked}"


def prompting_line(prompting: Prompting) -> str:
    """Return how the models were asked: `chat template: applied (sha 4d4a31c9), 2-shot as multiturn`."""
    template, system = prompting.chat_template, prompting.system_instruction
    plain = prompting.untemplated
    kept = f", but not to {', '.join(plain[:MAX_BESIDE])}: plain text" if plain else ""
    parts = [
        f"chat template: applied (sha {template[:8]}){kept}" if template else "chat template: not applied"
    ]
    turns = " as multiturn" if prompting.fewshot_as_multiturn else ""
    by_count: dict[int, list[str]] = {}
    for task, shots in prompting.num_fewshot.items():
        by_count.setdefault(shots, []).append(task)
    for shots, tasks in sorted(by_count.items()):
        named = f" ({', '.join(tasks)})" if len(by_count) > 1 and len(tasks) <= MAX_BESIDE else ""
        parts.append(f"{shots}-shot{turns if shots else ''}{named}")
    parts += [f"system instruction (sha {system[:8]})"] if system else []
    return ", ".join([*parts, *(f"{name} {value}" for name, value in prompting.generation.items())])


def nats(limit: TextLimit, value: float) -> str:
    """A KL as it is, a rise with its sign, a share of the acceptance length in percent."""
    if limit.is_share:
        return f"{value:+.1%}"
    return small(value) if limit.measure != "rise of the NLL" else f"{value:+.3g}"


def nats_interval(limit: TextLimit) -> str:
    """The bounds that decide."""
    if limit.low is None or limit.high is None:
        return "no interval: one row"
    return f"{nats(limit, limit.low)} to {nats(limit, limit.high)}"


MAX_NAMED = 4


def coverage_lines(experts: Sequence[ExpertCoverage]) -> tuple[str, ...]:
    """Return what the router sent to the experts of all layers, then the experts it sent nothing."""
    if not experts:
        return ()
    fewest, most = min(layer.fewest for layer in experts), max(layer.most for layer in experts)
    middle = median(layer.median for layer in experts)
    reached = (
        f"{plural(sum(layer.experts for layer in experts), 'expert')} in {plural(len(experts), 'layer')}: "
        f"{count(fewest)} to {count(most)} calibration tokens routed to each, median {middle:.0f}"
    )
    return (reached, *_unreached([layer for layer in experts if layer.none]))


def _unreached(layers: Sequence[ExpertCoverage]) -> tuple[str, ...]:
    if not layers:
        return ()
    named = [f"{layer.name} {', '.join(map(str, layer.none[:MAX_NAMED]))}" for layer in layers[:MAX_NAMED]]
    total = sum(len(layer.none) for layer in layers)
    shown = sum(len(layer.none[:MAX_NAMED]) for layer in layers[:MAX_NAMED])
    rest = f" and {count(total - shown)} more" if total > shown else ""
    return (f"no token was routed to {plural(total, 'expert')}: {'; '.join(named)}{rest}",)
