"""Rows of calibration text, dealt to torchrun's ranks one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vexport.calibration.ranks import rank_and_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRows:
    """All rows by their numbers of tokens, and what is done with them.

    Weights are rounded for the first `fitted`; the first `compared` run through the source's layers, too.
    """

    lengths: Sequence[int]
    fitted: int
    compared: int

    @property
    def own(self) -> range:
        """The rows that this rank runs."""
        rank, size = rank_and_size()
        return range(rank, len(self.lengths), size)

    @property
    def tokens(self) -> int:
        """Those of the rows that weights are rounded for."""
        return sum(self.lengths[: self.fitted])

    def turns(self) -> Iterator[tuple[int, int, bool]]:
        """This rank's rows, in turns that all ranks take part in, while any has one that weights are rounded
        for: the position among its own, the number, and whether the rank has such a row in this turn."""
        rank, size = rank_and_size()
        for first in range(0, self.fitted, size):
            yield first // size, first + rank, first + rank < self.fitted
