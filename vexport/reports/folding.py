"""Findings for people: those of one kind as one, and what follows from a wrong config under its cause.

JSON has each finding; every other format says how many it stands for.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vexport.records import Finding, Severity
from vexport.reports.formatting import plural

_NUMBER = re.compile(r"\d+")
# Dotted names of three parts and more: modules and tensors. A long word is read once, from its beginning.
_NAME = re.compile(r"(?<![\w#])[\w#]+(?:\.[\w#]+){2,}")
_INDEX = re.compile(r"(?<=\.)(?:0|[1-9]\d*)(?=[.\s]|$)")
SEVERITIES: Sequence[Severity] = ("error", "warning", "info")
_MAX_RUNS = 4
_MAX_NAMES = 4
# Kinds of what may follow from a cause that are shown; the others are counted.
MAX_FOLLOWING = 20
# A finding of CAUSE at the quantization config decides what these expect of every layer.
CAUSE = "config"
_AT_CONFIG = "quantization_config"
_JUDGED_BY_CONFIG = frozenset({"completeness", "shapes", "values", "fusion", "devices"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A finding, the places of all that are of its kind, their number, and what follows from it."""

    first: Finding
    places: str
    count: int
    follow: tuple["Folded", ...] = ()

    @property
    def following(self) -> int:
        """The number of findings that follow from it."""
        return sum(kind.count for kind in self.follow)

    @property
    def not_shown(self) -> int:
        """The number of those that are of the kinds beyond MAX_FOLLOWING."""
        return sum(kind.count for kind in self.follow[MAX_FOLLOWING:])

    @property
    def finding(self) -> Finding:
        """One finding for all of the kind, whose remedy says how many it stands for."""
        notes = [f"{self.count - 1:,} more like it"] if self.count > 1 else []
        notes += [f"{plural(self.following, 'more finding')} may follow from it"] if self.follow else []
        fix = f"{self.first.fix} ({', '.join(notes)})" if notes else self.first.fix
        return replace(self.first, where=self.places, fix=fix)


def fold(findings: Sequence[Finding]) -> tuple[Folded, ...]:
    """The kinds of findings in the order in which they came; the last cause has what may follow from it."""
    causes = [finding for finding in findings if _is_cause(finding)]
    if not causes:
        return kinds(findings)
    follow = kinds([finding for finding in findings if _follows(finding)])
    kept = kinds([finding for finding in findings if not _follows(finding)])
    last = max(number for number, kind in enumerate(kept) if _is_cause(kind.first))
    return (*kept[:last], replace(kept[last], follow=follow), *kept[last + 1 :])


def kinds(findings: Iterable[Finding]) -> tuple[Folded, ...]:
    """Findings of one check and severity whose texts differ in numbers and names alone, as one."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        texts = (finding.got, finding.expected, finding.fix)
        alike.setdefault((finding.check, finding.severity, *map(_shape, texts)), []).append(finding)
    return tuple(
        Folded(first=same[0], places=folded_places([finding.where for finding in same]), count=len(same))
        for same in alike.values()
    )


def folded_places(places: Sequence[str]) -> str:
    """`model.layers.0-29.{mlp.down_proj, mlp.up_proj}.weight`: numbers as ranges, other parts in braces.

    A number whose range would name other places too is `*`.
    """
    patterns: dict[str, list[tuple[int, ...]]] = {}
    for place in dict.fromkeys(places):
        numbers = tuple(int(number) for number in _INDEX.findall(place))
        patterns.setdefault(_INDEX.sub("#", place), []).append(numbers)
    return _braced([_filled(pattern, numbers) for pattern, numbers in patterns.items()])


def _is_cause(finding: Finding) -> bool:
    return finding.check == CAUSE and finding.severity == "error" and _AT_CONFIG in finding.where


def _follows(finding: Finding) -> bool:
    return finding.check in _JUDGED_BY_CONFIG and _AT_CONFIG not in finding.where


def _shape(text: str) -> str:
    return _NAME.sub("NAME", _NUMBER.sub("#", text))


def _filled(pattern: str, numbers: Sequence[tuple[int, ...]]) -> str:
    """The pattern with the ranges of its numbers."""
    slots = [sorted({*values}) for values in zip(*numbers, strict=True)]
    combinations = 1
    for values in slots:
        combinations *= len(values)
    exact = combinations == len(numbers)
    texts = iter([_ranges(values) if exact or len(values) == 1 else "*" for values in slots])
    return re.sub("#", lambda _: next(texts, "#"), pattern)


def _ranges(values: Sequence[int]) -> str:
    """`0-3,5`; `*` where there are many gaps."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    if len(runs) > _MAX_RUNS:
        return "*"
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _braced(names: Sequence[str]) -> str:
    """Names that share their first and last parts, as one; at most _MAX_NAMES of them."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts)) - 1
    start = next((n for n in range(shortest) if len({p[n] for p in parts}) > 1), shortest)
    end = next((n for n in range(shortest - start) if len({p[-1 - n] for p in parts}) > 1), shortest - start)
    middles = [".".join(part[start : len(part) - end]) for part in parts]
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    inside = "{" + ", ".join(middles[:_MAX_NAMES]) + more + "}"
    return ".".join([*parts[0][:start], inside, *parts[0][len(parts[0]) - end :]])
