"""Format numbers and sentences in the same way for all formats of a report."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from vexport.formats.plan import Plan
from vexport.records import EngineInfo, ExpertCoverage, Outcome, Verdict
from vexport.records.scale import NOT_AVAILABLE, interval, percent
from vexport.records.values import about, join_limited
from vexport.rules import sight
from vexport.rules import verdict as rules
from vexport.words import plural

if TYPE_CHECKING:
    from vexport.records import Attribution, Comparison, Prompting, TaskVerdict, Verdict
    from vexport.reports.run_record import Report

# Obstacles of tasks, in the order of their remedies.
_OBSTACLES = (
    *(sight.BLIND, sight.BLIND_BASELINE, sight.NOT_SEEN),
    *(rules.LOST_SCORE, rules.LOST_RESPONSES, rules.NO_ROOM, rules.FEW_DOCUMENTS),
)
_DO_FINDINGS = (
    "correct the findings in the report; `vexport repair CHECKPOINT OUT` corrects some kinds"
)
_DO_CALIBRATE = "quantize with calibration text (`--calibration`, or `calibration` in a scenario)"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
# Default values of arguments. Reports leave them out.
_DEFAULT_ARGUMENTS = {
    ("pipeline_parallel_size", "1"),
    ("distributed_executor_backend", "uni"),
    ("distributed_executor_backend", "mp"),
    ("kv_cache_dtype", "auto"),
    ("engine_args", "none"),
}
_MAX_TASKS = 8
MAX_SHOWN_TASKS = 100
"""Maximum number of tasks in tables and charts. JSON and JUnit have all tasks."""
MAX_NAMED = 4


def percent_interval(low: float | None, high: float | None) -> str:
    """Return a two-sided interval of shares: `98.1% to 99.6%`, or `n/a` without ends."""
    return interval(percent(low), percent(high))


def size(num_bytes: int) -> str:
    """Return bytes in decimal units with three significant digits: 3938304 gives `3.94 MB`."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"


def ratio(part: int, whole: int) -> str:
    """Return `part` of `whole` in per cent, or `n/a` if `whole` is 0."""
    return percent(part / whole, 0) if whole else NOT_AVAILABLE


def bits_per_weight(num_bytes: int, parameters: int) -> str:
    """Return the stored bits per parameter, scales and kept layers included."""
    return f"{8 * num_bytes / parameters:.2f}" if parameters else NOT_AVAILABLE


def count(value: int | None) -> str:
    """Return an integer with thousands separated: `14,042`."""
    return NOT_AVAILABLE if value is None else f"{value:,}"


def small(value: float) -> str:
    """Return a small number, such as a KL, with three significant digits: `0.00123`, `1.2e-07`."""
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return seconds as `0.4 s`, `12 s`, `3 min 05 s` or `2 h 14 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def outcome_line(outcome: str, device: str, scope: str = "", ignored: str = "") -> str:
    """Return `PASS on CPU, emulated`, `PASS of the static rules`, or the outcome alone.

    `device` is empty if nothing ran the model, and `scope` if the outcome covers everything.
    `ignored` counts the findings of ignored rules, and follows a comma.
    """
    place = f"on {device}" if device else ""
    line = " ".join(filter(None, (outcome, scope, place)))
    return f"{line}, {ignored}" if ignored else line


def subject_of(report: "Report") -> str:
    """Return the report's subject: schemes and source, or a given checkpoint and its baseline."""
    name = report.checkpoint.name
    if report.made is not None:
        return f"{report.made.scheme_names} of {name}"
    return f"{name} against {report.baseline_name}" if report.baseline else name


def report_sentence(report: "Report") -> str:
    """Return the reason for the outcome of a run.

    If the checkpoint loads, the sentence also gives its size as a share of the source's size.
    """
    checkpoint = report.checkpoint
    is_loaded = report.load is not None and report.load.ok
    if not is_loaded or not checkpoint.source_bytes or checkpoint.num_bytes is None:
        return report.reason
    share = ratio(checkpoint.num_bytes, checkpoint.source_bytes)
    return f"{report.reason}. {share} of the size."


def next_step(report: "Report") -> tuple[str, str]:
    """Return the next command, or "", and its purpose or other advice.

    Both are "" if the outcome is PASS and there is no checkpoint to serve.
    """
    verdict = report.verdict
    if report.outcome == "PASS":
        if report.load is None:  # on a server, or only responses were given
            return "", ""
        command = f"vllm serve {shlex.quote(report.load.checkpoint)}"
        if report.load.engine is not None and report.load.engine.emulated:
            return command, "serve it on a GPU: vLLM's CPU build has no kernels for this scheme"
        return command, "serve it"
    if report.is_of_variants:
        more = "" if report.outcome == "FAIL" else ", or evaluate more"
        return "", f"serve it with the settings and versions that pass{more}"
    is_loss = report.loads and verdict is not None and verdict.outcome == "FAIL"
    if verdict is None or (report.outcome == "FAIL" and not is_loss):
        return "", _DO_FINDINGS
    verdict = replace(verdict, attribution=report.attribution or verdict.attribution)
    calibrated = None if report.made is None else report.made.calibration is not None
    return _next_after_verdict(report.outcome, verdict, calibrated)


def next_step_of_verdict(verdict: Verdict) -> tuple[str, str]:
    """Return the next step after a verdict that is not part of a run."""
    if verdict.outcome == "PASS":
        return "", ""
    return _next_after_verdict(verdict.outcome, verdict)


def advice(step: tuple[str, str]) -> str:
    """Return a next step as one clause, for the last line of a command."""
    command, purpose = step
    return f"{purpose}: `{command}`" if command else purpose


def sentence(clause: str) -> str:
    """Return a clause as a sentence, or "" without a clause."""
    return f"{clause[0].upper()}{clause[1:]}." if clause else ""


def _next_after_verdict(
    outcome: Outcome, verdict: Verdict, calibrated: bool | None = None
) -> tuple[str, str]:
    found = {task.obstacle.rule for task in verdict.tasks if task.obstacle is not None}
    for rule in _OBSTACLES:
        if rule.id in found:
            return "", rule.do
    if outcome == "INCONCLUSIVE":
        return "", _remedy_of_open_tasks(verdict.tasks)
    if verdict.text and verdict.text.fails_late:
        return "", rules.LATE_LOSS.do
    if command := cause_command(verdict):
        return command, f"find the cause, which is unknown because {_obstacle_to_cause(verdict)}"
    if calibrated:
        return "", rules.LOSS.do
    condition = "if no text was used, " if calibrated is None else ""
    return "", f"{condition}{_DO_CALIBRATE}; else {rules.LOSS.do}"


def _remedy_of_open_tasks(tasks: Sequence["TaskVerdict"]) -> str:
    """Return advice on an INCONCLUSIVE outcome.

    Each task must pass by itself, so further tasks do not help. Without tasks, the outcome is of
    held-out text. If no task is open, a side lacks tasks.
    """
    if not tasks:
        return rules.TEXT_NOT_SETTLED.do
    unsettled = [task for task in tasks if task.outcome == "INCONCLUSIVE"]
    if not unsettled:
        return rules.MISSING_TASKS.do
    needed = [
        f"{about(task.needed.documents)} documents of {task.task}"
        for task in unsettled
        if task.needed is not None and task.needed.is_available
    ]
    if needed:
        return f"evaluate {join_limited(needed, ' and ', _MAX_TASKS)}, or accept a larger loss"
    return "use larger tasks or held-out text in their place, or accept a larger loss"


def capitalized(sentence: str) -> str:
    """Return the sentence with a capital letter if it begins with a known word.

    These are `all`, `both`, `check`, `load`, `the results` and `the baseline`.

    Any other first word may be the name of a task or file, which keeps its spelling.
    """
    starts_with_word = sentence.startswith(
        ("all ", "both ", "check ", "load ", "the results ", "the baseline ")
    )
    return sentence[0].upper() + sentence[1:] if starts_with_word else sentence


def size_change(plan: Plan) -> str:
    """Return `3.94 MB to 2.19 MB (56%), 8.91 bits per weight`: the sizes before and after."""
    share = ratio(plan.output_bytes, plan.source_bytes)
    bits = bits_per_weight(plan.output_bytes, plan.parameters)
    return (
        f"{size(plan.source_bytes)} to {size(plan.output_bytes)} ({share}), {bits} bits per weight"
    )


def engine_line(engine: EngineInfo) -> str:
    """Return the version of vLLM and its platform."""
    emulated = ", kernels emulated" if engine.emulated else ""
    return f"{engine.vllm} on {engine.platform} ({engine.processor}{emulated})"


def served_with(engine: EngineInfo) -> str:
    """Return the engine's arguments without defaults, as in `tensor_parallel_size 2`."""
    return ", ".join(
        f"{name} {value}"
        for name, value in engine.settings.items()
        if (name, value) not in _DEFAULT_ARGUMENTS
    )


def direction_note(comparison: "Comparison") -> str:
    """Return whether higher or lower is better, and for log-likelihoods also the kind and unit.

    Return "" for shares where higher is better.
    """
    better = "higher is better" if comparison.higher_is_better else "lower is better"
    if comparison.unit.startswith("nats"):
        kind = "log-likelihood" if comparison.higher_is_better else "negative log-likelihood"
        return f"{kind} in {comparison.unit}, {better}"
    return "" if comparison.higher_is_better and comparison.unit == "share" else better


def attribution_line(attribution: "Attribution") -> str:
    """Return the cause of a loss with its reason."""
    cause = "none found" if attribution.cause == "none" else f"the {attribution.cause}"
    return f"{cause}: {attribution.reason}"


def unsearched_cause(verdict: "Verdict | None") -> str:
    """Return why the cause of a loss was not searched for, with the command that searches for it.

    Return "" if the verdict is PASS, if the cause was searched for, or if nothing prevents vexport
    from searching for it.
    """
    command = cause_command(verdict)
    if not command:
        return ""
    return f"not searched, because {_obstacle_to_cause(verdict)}; to find it, run `{command}`"


def cause_command(verdict: "Verdict | None") -> str:
    """Return the command that searches for the cause of a loss, if vexport could not search for it.

    Otherwise return "".
    """
    if verdict is None or not _obstacle_to_cause(verdict):
        return ""
    has_weights = verdict.candidate in ("quantized", "unquantized")
    checkpoint = shlex.quote(verdict.checkpoint) if has_weights and verdict.checkpoint else ""
    return f"vexport eval {checkpoint or 'CHECKPOINT'} --baseline SOURCE --task TASK"


def _obstacle_to_cause(verdict: "Verdict | None") -> str:
    """Return why vexport cannot search for the cause of a loss, or "" if it can."""
    if verdict is None or verdict.outcome == "PASS" or verdict.attribution is not None:
        return ""
    if verdict.accepted is not None:
        return "an accepted baseline has no weights to compare with"
    if verdict.candidate == "server":
        return "vexport cannot read the weights of a model on a server"
    return ""


def task_title(task: "TaskVerdict | Comparison") -> str:
    """Return the task with its metric, and with the filter if it is not lm-eval's default.

    The title also contains "direction assumed" if nothing states the direction of the metric.
    """
    suffix = "" if task.filter in ("", "none") else f", {task.filter}"
    assumed = ", direction assumed" if task.direction_assumed else ""
    return f"{task.task} ({task.metric}{suffix}{assumed})"


def shown_tasks(tasks: "Sequence[TaskVerdict]") -> "Sequence[TaskVerdict]":
    """Return the tasks that people read: all, or the worst if there are very many."""
    if len(tasks) <= MAX_SHOWN_TASKS:
        return tasks
    severities = ("FAIL", "INCONCLUSIVE", "PASS")

    def rank(index: int) -> tuple[int, float]:
        return severities.index(tasks[index].outcome), tasks[index].low

    worst = sorted(range(len(tasks)), key=rank)[:MAX_SHOWN_TASKS]
    return [tasks[index] for index in sorted(worst)]


def margin_text(verdict: "Verdict") -> str:
    """Return the margin with its unit, or all different margins of the tasks."""
    return " or ".join(dict.fromkeys(task.scale.limit for task in verdict.tasks))


def method_line(verdict: "Verdict") -> str:
    """Return the margin and the risk, the test, and the settings of the prompts."""
    asked = f"; {_prompting_line(verdict.prompting)}" if verdict.prompting else ""
    return f"margin {margin_text(verdict)}, alpha {verdict.alpha:g}; {verdict.method}{asked}"


def _prompting_line(prompting: "Prompting") -> str:
    """Return `chat template: applied (sha 4d4a31c9), 2-shot as multiturn`."""
    template, system = prompting.chat_template, prompting.system_instruction
    plain = ", ".join(prompting.untemplated[:_MAX_TASKS])
    kept = f", but not to {plain}: plain text" if plain else ""
    parts = [
        f"chat template: applied (sha {template[:8]}){kept}"
        if template
        else "chat template: not applied"
    ]
    by_count: dict[int, list[str]] = {}
    for task, shots in prompting.num_fewshot.items():
        by_count.setdefault(shots, []).append(task)
    for shots, tasks in sorted(by_count.items()):
        turns = " as multiturn" if shots and prompting.fewshot_as_multiturn else ""
        named = f" ({', '.join(tasks)})" if len(by_count) > 1 and len(tasks) <= _MAX_TASKS else ""
        parts.append(f"{shots}-shot{turns}{named}")
    parts += [f"system instruction (sha {system[:8]})"] if system else []
    return ", ".join([*parts, *(f"{name} {value}" for name, value in prompting.generation.items())])


def coverage_lines(experts: Sequence[ExpertCoverage]) -> Iterator[str]:
    """Yield the numbers of calibration tokens that the routers sent to experts.

    A second line lists experts that received no token.
    """
    if not experts:
        return
    fewest, most = min(layer.fewest for layer in experts), max(layer.most for layer in experts)
    yield (
        f"{plural(sum(layer.experts for layer in experts), 'expert')} in "
        f"{plural(len(experts), 'layer')}: "
        f"{count(fewest)} to {count(most)} calibration tokens routed to each, "
        f"median {median(layer.median for layer in experts):.0f}"
    )
    unreached = [layer for layer in experts if layer.none]
    if unreached:
        total, shown = sum(len(layer.none) for layer in unreached), unreached[:MAX_NAMED]
        named = "; ".join(
            f"{layer.name} {', '.join(map(str, layer.none[:MAX_NAMED]))}" for layer in shown
        )
        rest = total - sum(len(layer.none[:MAX_NAMED]) for layer in shown)
        more = f" and {count(rest)} more" if rest else ""
        yield f"no token was routed to {plural(total, 'expert')}: {named}{more}"
