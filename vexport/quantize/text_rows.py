"""Rows of calibration text, dealt to torchrun's ranks one by one."""

from collections.abc import Sequence
from dataclasses import dataclass

from vexport.numerics.ranks import rank_and_size


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

    @property
    def own_fitted(self) -> range:
        """The positions, among those that this rank runs, of rows that weights are rounded for."""
        return range(sum(row < self.fitted for row in self.own))
