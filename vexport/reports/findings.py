"""A list of findings as a table, for the forms that draw one: a row a kind, the gravest first."""

from collections.abc import Sequence

from vexport.reports.document import (
    Cell,
    Column,
    Details,
    FindingList,
    Paragraph,
    Part,
    Table,
    badge,
    columns,
)
from vexport.reports.folding import SEVERITIES, Folded, fold
from vexport.reports.formatting import plural

_COLUMNS = (Column("Where"), *columns("Severity", "Got", "Need", "Do"))


def finding_parts(part: FindingList, limit: int) -> tuple[Part, ...]:
    """At most `limit` kinds, below them what may follow from each, and where all findings are."""
    gates = dict.fromkeys(gate for gate, _ in part.findings)
    kinds = [
        (gate, kind)
        for gate in gates
        for kind in fold([finding for name, finding in part.findings if name == gate])
    ]
    kinds.sort(key=lambda pair: SEVERITIES.index(pair[1].first.severity))
    shown = kinds[:limit]
    more = sum(kind.count + kind.following for _, kind in kinds[limit:])
    return (
        _table(shown),
        *(_following(gate, kind) for gate, kind in shown if kind.follow),
        *((Paragraph(f"{plural(more, 'more finding')} in {part.everything}", "muted"),) if more else ()),
    )


def _table(kinds: Sequence[tuple[str, Folded]]) -> Table:
    return Table(columns=_COLUMNS, rows=tuple(_row(gate, kind) for gate, kind in kinds))


def _row(gate: str, kind: Folded) -> tuple[Cell, ...]:
    finding = kind.finding
    return (
        Cell(finding.where, note=f"{gate}: {finding.check}", mono=True),
        badge(finding.severity),
        Cell(finding.got),
        Cell(finding.expected),
        Cell(finding.fix),
    )


def _following(gate: str, kind: Folded) -> Details:
    return Details(
        summary=Cell(f"{plural(kind.following, 'finding')} that may follow from {kind.places}"),
        parts=(_table([(gate, other) for other in kind.follow]),),
    )
