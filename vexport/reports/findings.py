"""Fold findings for reports that people read, and build the gates of runs and verdicts.

Findings of the same kind are shown as a single finding, with their number. Consequences of a wrong
config are counted at their cause. JSON has every finding.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vexport.records import (
    DOTTED_NAME,
    CheckReport,
    DryLoadReport,
    Finding,
    LoadReport,
    VariantOutcome,
)
from vexport.records.gates import (
    NOT_RUN,
    SEVERITIES,
    Gate,
    Status,
    checkpoint_gate,
    findings_gate,
    load_gate,
)
from vexport.reports.formatting import (
    count,
    outcome_line,
    report_sentence,
    task_title,
)
from vexport.words import plural

if TYPE_CHECKING:
    from vexport.records import ComparedVariant, TaskVerdict, TextLimit, Verdict
    from vexport.reports.run_record import Report

_NUMBER = re.compile(r"\d+")
_INDEX = re.compile(r"(?<=\.)(?:0|[1-9]\d*)(?=[.\s]|$)")
_MAX_RANGES = 4
_MAX_NAMES = 4
_CONFIG_KEY = "quantization_config"
# Checks whose results depend on the quantization config.
_JUDGED_BY_CONFIG = frozenset({"completeness", "shapes", "values", "fusion", "devices"})
# Statuses of the gates of variants.
_VARIANT: Mapping[VariantOutcome, Status] = {
    "BASELINE": "SKIPPED",
    "PASS": "PASS",
    "FAIL": "FAIL",
    "INCONCLUSIVE": "INCONCLUSIVE",
    "REFUSED": "FAIL",
    "NO ANSWER": "INCONCLUSIVE",
}
_NOT_ASKED = "not requested: the scenario has no `evaluate`"
_ONLY_LOADED = "not requested: the checkpoint was only loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingKind:
    """Findings of one kind: the first finding, all places as one text, and the number of findings.

    `following` is the number of other findings that may be consequences.
    """

    first: Finding
    places: str
    count: int
    following: int = 0

    @property
    def finding(self) -> Finding:
        """One finding for the whole kind. Its remedy includes the numbers of findings."""
        notes = [f"{self.count - 1:,} more like it"] if self.count > 1 else []
        notes += [self.consequences] if self.following else []
        fix = f"{self.first.fix} ({', '.join(notes)})" if notes else self.first.fix
        return replace(self.first, where=self.places, fix=fix)

    @property
    def consequences(self) -> str:
        """The number of findings that may be consequences, in words."""
        return f"{plural(self.following, 'more finding')} may follow from it"


def fold(findings: Sequence[Finding]) -> tuple[FindingKind, ...]:
    """Fold findings by kind, in their order.

    If findings report a wrong quantization config, findings of checks that depend on the config may
    be consequences. They are counted at the last of their possible causes.
    """
    if not any(map(_is_cause, findings)):
        return kinds(findings)
    kept = kinds(finding for finding in findings if not _follows(finding))
    last = max(number for number, kind in enumerate(kept) if _is_cause(kind.first))
    following = sum(kind.count for kind in kinds(filter(_follows, findings)))
    return (*kept[:last], replace(kept[last], following=following), *kept[last + 1 :])


def kinds(findings: Iterable[Finding]) -> tuple[FindingKind, ...]:
    """Fold findings of a check and severity if their texts differ only in numbers and names."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        shapes = (
            DOTTED_NAME.sub("NAME", _NUMBER.sub("#", text))
            for text in (finding.got, finding.expected, finding.fix)
        )
        alike.setdefault((finding.check, finding.severity, *shapes), []).append(finding)
    return tuple(
        FindingKind(
            first=same[0],
            places=_places(same),
            count=sum(len(finding.every_place) if _is_merged(finding) else 1 for finding in same),
        )
        for same in alike.values()
    )


def _is_merged(finding: Finding) -> bool:
    """Return True if `where` is only the first place, and not the cause of all places."""
    return bool(finding.places) and finding.where.startswith(finding.places[0])


def _places(findings: Sequence[Finding]) -> str:
    """Return the places of the findings as one text, or their causes."""
    causes = [finding.where for finding in findings if not _is_merged(finding)]
    merged = [place for each in findings if _is_merged(each) for place in each.places]
    return folded_places([*causes, *merged])


def _is_cause(finding: Finding) -> bool:
    return (
        finding.check == "config" and finding.severity == "error" and _CONFIG_KEY in finding.where
    )


def _follows(finding: Finding) -> bool:
    return finding.check in _JUDGED_BY_CONFIG and _CONFIG_KEY not in finding.where


def folded_places(places: Sequence[str]) -> str:
    """Join places into one text: `model.layers.0-29.{mlp.down_proj, mlp.up_proj}.weight`.

    Numbers become ranges, and other parts that differ are listed in braces. Numbers become `*` if
    ranges would include places that are not in `places`.
    """
    patterns: dict[str, list[tuple[int, ...]]] = {}
    for place in dict.fromkeys(places):
        numbers = tuple(int(number) for number in _INDEX.findall(place))
        patterns.setdefault(_INDEX.sub("#", place), []).append(numbers)
    return _join_with_braces(
        [_fill_numbers(pattern, numbers) for pattern, numbers in patterns.items()]
    )


def _fill_numbers(pattern: str, numbers: Sequence[tuple[int, ...]]) -> str:
    slots = [sorted({*values}) for values in zip(*numbers, strict=True)]
    exact = math.prod(map(len, slots)) == len(numbers)
    texts = iter([_ranges(values) if exact or len(values) == 1 else "*" for values in slots])
    return re.sub("#", lambda _: next(texts, "#"), pattern)


def _ranges(values: Sequence[int]) -> str:
    """Return `0-3,5`, or `*` if there are many gaps."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    if len(runs) > _MAX_RANGES:
        return "*"
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _join_with_braces(names: Sequence[str]) -> str:
    """Return names as a single name, with braces around the parts that differ.

    At most _MAX_NAMES names are listed.
    """
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts)) - 1
    start = next((n for n in range(shortest) if len({p[n] for p in parts}) > 1), shortest)
    end = next(
        (n for n in range(shortest - start) if len({p[-1 - n] for p in parts}) > 1),
        shortest - start,
    )
    middles = [".".join(part[start : len(part) - end]) for part in parts]
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    inside = "{" + ", ".join(middles[:_MAX_NAMES]) + more + "}"
    return ".".join([*parts[0][:start], inside, *parts[0][len(parts[0]) - end :]])


def report_gates(report: "Report") -> tuple[Gate, ...]:
    """Return the gates of a run: plan, check, loads, tasks or text, variants, and `overall`.

    A load that was never tried is SKIPPED. If there is no verdict, the gate `evaluate` is SKIPPED,
    but a report on variants alone has no such gate. Other stages without a result have no gate: a
    given checkpoint has neither plan nor check.
    """
    skipped = NOT_RUN
    if report.outcome == "PASS":
        skipped = _NOT_ASKED if report.given is None else _ONLY_LOADED
    line = outcome_line(report.outcome, report.device, ignored=report.ignored)
    rule = f" [{report.verdict.rule}]" if report.verdict is not None else ""
    overall = f"{line}: {report_sentence(report)}{rule}"
    evaluated = [Gate(name="evaluate", status="SKIPPED", message=skipped)]
    if report.verdict is not None:
        evaluated = [*_accuracy_gates(report.verdict)]
    elif report.is_of_variants:
        evaluated = []
    return (
        *_checkpoint_gates(report),
        *evaluated,
        *map(variant_gate, report.variants),
        Gate(name="overall", status=report.outcome, message=overall),
    )


def _checkpoint_gates(report: "Report") -> Iterator[Gate]:
    made = report.made
    if made is not None:
        yield findings_gate("plan", made.plan.refusals)
        yield checkpoint_gate("check", made.check)
        if made.dry_load is not None:
            yield checkpoint_gate("dry load", made.dry_load)
    of_baseline = report.baseline.load if report.baseline is not None else None
    for name, load in (("load baseline", of_baseline), ("load", report.load)):
        if made is not None or load is not None:
            yield load_gate(name, load)


def variant_gate(row: "ComparedVariant") -> Gate:
    """Return the gate of a variant.

    The baseline's gate is SKIPPED unless vLLM refuses the baseline.
    """
    prefix = "" if row.outcome in ("BASELINE", "PASS", "FAIL") else f"{row.outcome}: "
    return Gate(name=row.name, status=_VARIANT[row.outcome], message=f"{prefix}{row.reason}")


def verdict_gates(verdict: "Verdict") -> tuple[Gate, ...]:
    """Return a gate for each task, or for each measure of the text, and the gate `overall`."""
    line = outcome_line(verdict.outcome, verdict.device)
    message = f"{line}: {verdict.reason} [{verdict.rule}]"
    return (
        *_accuracy_gates(verdict),
        Gate(name="overall", status=verdict.outcome, message=message),
    )


def _accuracy_gates(verdict: "Verdict") -> Iterator[Gate]:
    for task in verdict.tasks:
        yield Gate(name=task_title(task), status=task.outcome, message=_task_message(task))
    for limit in verdict.text.limits if verdict.text else ():
        yield Gate(
            name=f"text ({limit.measure})", status=limit.outcome, message=_text_message(limit)
        )


def _task_message(task: "TaskVerdict") -> str:
    if task.obstacle is not None and task.outcome == "INCONCLUSIVE":
        return task.obstacle.text
    scale, more = task.scale, f"; {task.obstacle.text}" if task.obstacle else ""
    answers = f", {task.seeds} responses each" if task.seeds > 1 else ""
    if task.needed is not None:
        more = f"; {task.needed.remedy}"
    return (
        f"{task.shown} {scale.unit} ({task.bounds}), "
        f"margin {scale.bare_limit}, {count(task.documents)} documents{answers}{more}"
    )


def _text_message(limit: "TextLimit") -> str:
    unit = "" if limit.is_share else " nats per token"
    rows = limit.rows_needed
    more = f"; about {count(rows)} rows would settle it" if rows is not None else ""
    place = f" in {limit.label}" if limit.label else ""
    return f"{limit.shown}{unit} ({limit.bounds}){place}, limit {limit.bound}{more}"


def staged_findings(report: "Report") -> tuple[tuple[str, Finding], ...]:
    """Return every finding of a run with its gate, the most serious first."""
    pairs = ((gate.name, finding) for gate in report_gates(report) for finding in gate.findings)
    return tuple(sorted(pairs, key=lambda pair: SEVERITIES.index(pair[1].severity)))


def check_target(report: CheckReport | LoadReport | DryLoadReport) -> str:
    """Return the target of a check, for the end of a sentence: ` for vLLM 0.32, TP 1, any GPU`.

    Return "" for a load, because its report shows the engine.
    """
    if not isinstance(report, CheckReport) or not report.vllm:
        return ""
    gpus = f"SM {', '.join(map(str, report.sm))}" if report.sm else "any GPU"
    return f" for vLLM {report.vllm}, TP {', '.join(map(str, report.tp))}, {gpus}"
