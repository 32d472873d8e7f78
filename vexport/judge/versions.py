"""Compare loads of one checkpoint in several versions of vLLM, and find the first that differs.

Another kernel is a warning if the layer runs in the same precision. A refusal, an error of the
loaders, another precision, and a KL divergence above its limit are errors.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from vexport.checks.vllm.precision import layer_kinds
from vexport.engine.dry.load import errors_or_uncertainty
from vexport.records import (
    CellStatus,
    ComparedVariant,
    ComparedVersion,
    DryLoadReport,
    Finding,
    MatrixCell,
    Outcome,
    VersionOutcome,
    without_details,
)
from vexport.rules import changes as rules
from vexport.rules import dry_load
from vexport.rules.book import Rule
from vexport.words import listed

# Rules of a dry load about whole cells. The cells are compared instead.
_OF_CELLS = (dry_load.REFUSED.id, dry_load.NOT_SHOWN.id)
_Place = tuple[int, int]


class Answer(NamedTuple):
    """Outcome of a version, the reason, and the findings."""

    outcome: VersionOutcome
    reason: str
    findings: tuple[Finding, ...] = ()


def judge_alone(report: DryLoadReport) -> Answer:
    """Judge a load that is compared with no other: BASELINE, REFUSED or NOT JUDGED.

    The baseline's findings are its warnings, such as known faults on some GPUs.
    """
    if report.ok:
        warnings = tuple(each for each in report.findings if _is_notable(each))
        return Answer("BASELINE", "the later versions are compared with it", warnings)
    errors = errors_or_uncertainty(report)
    if isinstance(errors, str):
        return Answer("NOT JUDGED", without_details(errors))
    return Answer("REFUSED", _brief(errors[0]), tuple(errors))


def judge_change(
    baseline: DryLoadReport, report: DryLoadReport, text: Sequence[Finding] = ()
) -> Answer:
    """Judge a load by its difference from the baseline's load: SAME, DIFFERS, REFUSED, NOT JUDGED.

    `text` are findings on the log-probabilities.
    """
    alone = judge_alone(report)
    if alone.outcome == "NOT JUDGED":
        return alone
    findings = (*changes(baseline, report), *text)
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        warnings = [finding for finding in findings if finding.severity == "warning"]
        return Answer("SAME", _brief(warnings[0]) if warnings else "", findings)
    is_refused = not report.ok and any(finding.claim == "refused" for finding in errors)
    return Answer("REFUSED" if is_refused else "DIFFERS", _brief(errors[0]), findings)


def _brief(finding: Finding) -> str:
    shown = finding.brief
    need = f", need {shown.expected}" if shown.expected else ""
    return f"{shown.where}: {shown.got}{need}"


def changes(baseline: DryLoadReport, report: DryLoadReport) -> list[Finding]:
    """Return the differences of a dry load from the baseline's dry load."""
    return [
        *_changed_cells(baseline, report),
        *_new_findings(baseline, report),
        *_changed_layers(baseline, report),
        *_other_layers(baseline, report),
    ]


def _changed_cells(baseline: DryLoadReport, report: DryLoadReport) -> Iterator[Finding]:
    """Yield the cells that only one of both versions loads, grouped by vLLM's reason."""
    before = {(cell.tp, cell.sm): cell for cell in baseline.cells}
    alike = defaultdict[tuple[str, str], list[_Place]](list)
    for cell in report.cells:
        old = before[cell.tp, cell.sm]
        if old.loads and cell.status in ("refused", "not shown"):
            alike[cell.status, cell.reason].append((cell.tp, cell.sm))
        elif cell.loads and old.status == "refused":
            alike["loads", ""].append((cell.tp, cell.sm))
    by_status: dict[str, Rule] = {"refused": rules.REFUSED, "not shown": rules.NOT_SHOWN}
    old_name, name = baseline.vllm, report.vllm
    for (status, reason), places in alike.items():
        where = _in_places("checkpoint", places, report)
        if status == "loads":
            yield Finding.at(rules.LOADS, where, version=name, baseline=old_name)
        else:
            rule = by_status[status]
            yield Finding.at(rule, where, version=name, baseline=old_name, reason=reason)


def _new_findings(baseline: DryLoadReport, report: DryLoadReport) -> Iterator[Finding]:
    """Yield errors and warnings that the baseline's load does not have.

    Cells and precisions are compared by other functions.
    """
    known = {(each.rule, each.where) for each in baseline.findings}
    for finding in report.findings:
        is_old = (finding.rule, finding.where) in known or finding.rule in _OF_CELLS
        if not is_old and _is_notable(finding):
            yield finding


def _is_notable(finding: Finding) -> bool:
    """Return True for errors and warnings, except on precision."""
    return finding.severity != "info" and not finding.rule.startswith("devices/")


def _changed_layers(baseline: DryLoadReport, report: DryLoadReport) -> Iterator[Finding]:
    """Yield the kinds of layers that run in another precision or kernel, grouped by the change."""
    before = {(row.name, row.stored): _by_place(row.cells) for row in baseline.rows}
    alike = defaultdict[tuple[Rule, str, str], list[tuple[str, _Place]]](list)
    for row in report.rows:
        old = before.get((row.name, row.stored), {})
        for place, cell in _by_place(row.cells).items():
            change = _change(old[place], cell) if place in old else None
            if change is not None:
                alike[change].append((row.name, place))
    for (rule, first, then), found in alike.items():
        where = layer_kinds(name for name, _ in found)
        places = list(dict.fromkeys(place for _, place in found))
        yield Finding.at(
            rule,
            _in_places(where, places, report),
            before=first,
            after=then,
            version=report.vllm,
            baseline=baseline.vllm,
        )


def _change(old: MatrixCell, new: MatrixCell) -> tuple[Rule, str, str] | None:
    running: tuple[CellStatus, ...] = ("loads", "other precision")
    if old.status not in running or new.status not in running:
        return None
    if old.precision != new.precision:
        return rules.PRECISION, _runs(old), _runs(new)
    return (rules.KERNEL, old.kernel, new.kernel) if old.kernel != new.kernel else None


def _runs(cell: MatrixCell) -> str:
    return f"{cell.precision} ({cell.kernel})" if cell.kernel else cell.precision


def _other_layers(baseline: DryLoadReport, report: DryLoadReport) -> Iterator[Finding]:
    """Yield the kinds of layers that only one of both versions has, if both have loaded."""
    if not baseline.rows or not report.rows:
        return
    kinds = [{row.name for row in each.rows} for each in (baseline, report)]
    if others := kinds[0] ^ kinds[1]:
        where = layer_kinds(others)
        yield Finding.at(rules.LAYERS, where, version=report.vllm, baseline=baseline.vllm)


def _by_place(cells: Sequence[MatrixCell]) -> dict[_Place, MatrixCell]:
    return {(cell.tp, cell.sm): cell for cell in cells}


def _in_places(where: str, places: Sequence[_Place], report: DryLoadReport) -> str:
    """Return the place of a finding, with the capabilities unless it is about all cells."""
    if len(places) == len(report.cells):
        return where
    capabilities = dict.fromkeys(str(sm) for _, sm in places)
    return f"{where} (sm {'/'.join(capabilities)})"


def text_findings(row: ComparedVariant, baseline: str, limit: float) -> list[Finding]:
    """Return findings on the log-probabilities of a version, compared with the baseline's."""
    where = "log-probabilities"
    if row.mean_kl is not None and row.mean_kl > limit:
        return [Finding.at(rules.KL, where, kl=row.mean_kl, limit=limit, baseline=baseline)]
    if row.outcome == "FAIL":
        return [Finding.at(rules.TEXT, where, baseline=baseline, reason=row.reason)]
    return []


def search(count: int, is_like_first: Callable[[int], bool | None]) -> None:
    """Try as few of `count` versions as possible to find the first that is not like the first.

    `is_like_first` tries a version by its number, and returns None if it cannot be judged. One
    change is assumed: all versions before it are like the first version.
    """
    low, high, found = 0, count - 1, None
    while low < count and is_like_first(low) is None:
        low += 1
    while high > low and (found := is_like_first(high)) is None:
        high -= 1
    if high <= low or found:
        return
    between = list(range(low + 1, high))
    while between:
        middle = between[len(between) // 2]
        found = is_like_first(middle)
        if found is None:
            between.remove(middle)
        elif found:
            between = [number for number in between if number > middle]
        else:
            between = [number for number in between if number < middle]


class Conclusion(NamedTuple):
    """Outcome of all versions, the reason, and the version that it names."""

    outcome: Outcome
    reason: str
    first: str = ""


def conclude(rows: Sequence[ComparedVersion]) -> Conclusion:
    """Decide by the first version that refuses the checkpoint, or that differs.

    INCONCLUSIVE if a version could not be judged and no other version fails.
    """
    baseline = next((row for row in rows if row.outcome == "BASELINE"), None)
    failing = [row for row in rows if row.outcome in ("REFUSED", "DIFFERS")]
    unjudged = [row for row in rows if row.outcome == "NOT JUDGED"]
    if failing:
        return _failure(rows, failing, baseline)
    if unjudged:
        first = unjudged[0]
        return Conclusion("INCONCLUSIVE", f"vLLM {first.vllm} could not be judged: {first.reason}")
    same = [row.vllm for row in rows if row.outcome in ("BASELINE", "SAME")]
    untried = [row.vllm for row in rows if row.outcome == "NOT TRIED"]
    reason = f"vLLM {_range(same)} load it alike"
    if untried:
        reason = f"vLLM {' and '.join(same)} load it alike; {_range(untried)} not tried"
    changed = [row.vllm for row in rows if row.outcome == "SAME" and row.reason]
    if changed:
        reason = f"{reason}, with warnings in {listed(changed, 'and')}"
    return Conclusion("PASS", reason)


def _failure(
    rows: Sequence[ComparedVersion],
    failing: Sequence[ComparedVersion],
    baseline: ComparedVersion | None,
) -> Conclusion:
    if baseline is None:
        first = failing[0]
        return Conclusion("FAIL", f"no version loads it; vLLM {first.vllm}: {first.reason}")
    start = rows.index(baseline)
    earlier = [row for row in rows[:start] if row in failing]
    later = [row for row in rows[start:] if row in failing]
    sentences: list[str] = []
    if earlier:
        last = earlier[-1]
        sentences.append(
            f"vLLM {baseline.vllm} is the first version that loads it"
            f"{_unjudged_before(rows, start)}; vLLM {last.vllm} does not: {last.reason}"
        )
    if later:
        first = later[0]
        verb = "refuses it" if first.outcome == "REFUSED" else "differs"
        number = rows.index(first)
        sentences.append(
            f"vLLM {first.vllm} is the first version that {verb}"
            f"{_unjudged_before(rows, number)}: {first.reason}"
        )
    named = later[0] if later else baseline
    return Conclusion("FAIL", "; ".join(sentences), named.vllm)


def _unjudged_before(rows: Sequence[ComparedVersion], number: int) -> str:
    is_certain = number == 0 or rows[number - 1].outcome != "NOT JUDGED"
    return "" if is_certain else f" (or vLLM {rows[number - 1].vllm}, which could not be judged)"


def _range(versions: Sequence[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
