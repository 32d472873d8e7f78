"""What layers that run as one parameter share: the range that holds everything that any of them saw."""

from functools import reduce

import torch

Range = tuple[torch.Tensor, torch.Tensor]


class SharedRange:
    """The extremes of each member; it holds no observer, so that a member's weight can be freed."""

    def __init__(self, members: int) -> None:
        self._extremes: dict[int, Range | None] = dict.fromkeys(range(members))

    def deposit(self, member: int, low: torch.Tensor, high: torch.Tensor) -> None:
        """Record the range of a member (any shape); it replaces what the member saw before."""
        self._extremes[member] = low.amin(), high.amax()

    def leave(self, member: int) -> None:
        """The others no longer share with this member."""
        self._extremes.pop(member, None)

    def union(self) -> Range:
        """(low, high) over all members, each of no dimension; ValueError where one saw nothing yet."""
        seen = [extremes for extremes in self._extremes.values() if extremes is not None]
        if len(seen) < len(self._extremes):
            raise ValueError(
                f"fused observers: got observations of {len(seen)} of {len(self._extremes)}, "
                "need all before a shared scale is asked"
            )
        return reduce(torch.minimum, (low for low, _ in seen)), reduce(
            torch.maximum, (high for _, high in seen)
        )
