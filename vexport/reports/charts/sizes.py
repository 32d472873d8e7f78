"""What each kind of layer weighs before and after, as bars on one scale."""

from collections.abc import Sequence
from dataclasses import dataclass

from vexport.reports.formatting import ratio, size
from vexport.types import KindSize


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeBar:
    """One kind: its bars in per cent of the largest kind, its sizes in words."""

    kind: str
    before: float
    after: float
    sizes: str
    share: str


def size_bars(sizes: Sequence[KindSize]) -> tuple[SizeBar, ...]:
    """A row for each kind, in order."""
    largest = max((max(one.source_bytes, one.output_bytes) for one in sizes), default=0) or 1
    return tuple(
        SizeBar(
            kind=one.kind,
            before=round(100 * one.source_bytes / largest, 2),
            after=round(100 * one.output_bytes / largest, 2),
            sizes=f"{size(one.source_bytes)} to {size(one.output_bytes)}",
            share=ratio(one.output_bytes, one.source_bytes),
        )
        for one in sizes
    )
