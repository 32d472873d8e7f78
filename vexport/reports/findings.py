"""A list of findings as a table, for the forms that draw one: a row a kind, the gravest first."""

from collections.abc import Sequence

from vexport.reports.document import (
    Cell,
    Details,
    FindingList,
    Part,
    Table,
    badge,
    columns,
    muted,
    parts,
    row,
)
from vexport.reports.folding import MAX_FOLLOWING, SEVERITIES, Folded, fold
from vexport.reports.formatting import plural

_Kinds = Sequence[tuple[str, Folded]]


def finding_parts(part: FindingList, limit: int) -> tuple[Part, ...]:
    """At most `limit` kinds, below them what may follow from each, and where all findings are."""
    gates = dict.fromkeys(gate for gate, _ in part.findings)
    kinds = [
        (gate, kind)
        for gate in gates
        for kind in fold([finding for name, finding in part.findings if name == gate])
    ]
    kinds.sort(key=lambda pair: SEVERITIES.index(pair[1].first.severity))
    more = sum(kind.count + kind.following for _, kind in kinds[limit:])
    return parts(
        _table(kinds[:limit]),
        [_following(gate, kind) for gate, kind in kinds[:limit] if kind.follow],
        muted(f"{plural(more, 'more finding')} in {part.everything}") if more else None,
    )


def _table(kinds: _Kinds) -> Table:
    rows = (
        row(
            Cell(kind.finding.where, note=f"{gate}: {kind.first.check}", mono=True),
            badge(kind.first.severity),
            kind.first.got,
            kind.first.expected,
            kind.finding.fix,
        )
        for gate, kind in kinds
    )
    return Table(columns("Where", "Severity", "Got", "Need", "Do"), tuple(rows))


def _following(gate: str, kind: Folded) -> Details:
    summary = f"{plural(kind.following, 'finding')} that may follow from {kind.places}"
    more = f", {kind.not_shown:,} of them not shown" if kind.not_shown else ""
    shown = [(gate, other) for other in kind.follow[:MAX_FOLLOWING]]
    return Details(Cell(summary + more), (_table(shown),))
