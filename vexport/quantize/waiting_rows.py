"""Rows of text that run through a decoder layer once, and wait in it until what they reach is rounded.

The forward of each row runs in a greenlet, which gives control back in front of a module whose weights are
not rounded yet. All rows run in one thread, one at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from greenlet import getcurrent, greenlet

from vexport.quantize.group_inputs import GroupInputs, Noted, Value

# The name of the module that a row waits in front of, and what enters it.
Stop = tuple[str, Value]


class WaitingRows:
    """The rows of one stream in a decoder layer; each of `runs` is the forward of one."""

    def __init__(self, runs: Sequence[Callable[[], None]]) -> None:
        self._rows = [greenlet(run) for run in runs]
        self._stops: list[Stop | None] = [None] * len(runs)
        self._passed: set[str] = set()

    @contextmanager
    def stopping(self, inputs: GroupInputs) -> Iterator[None]:
        """Within the block rows stop in front of the modules of these inputs; they run to the first one."""
        with inputs.shown(self._stop):
            for position in range(len(self._rows)):
                self._go_on(position)
            yield

    def _stop(self, name: str, value: Value) -> None:
        row = getcurrent()
        if name not in self._passed:
            assert row.parent is not None
            row.parent.switch((name, value))

    def _go_on(self, position: int) -> None:
        self._stops[position] = None
        self._stops[position] = self._rows[position].switch()

    @property
    def names(self) -> set[str]:
        """The modules that rows wait in front of; none when all are through the layer."""
        return {stop[0] for stop in self._stops if stop is not None}

    def noted(self, position: int, name: str) -> Noted:
        """What enters this module of a row that waits there."""
        stop = self._stops[position]
        return {name: stop[1]} if stop is not None and stop[0] == name else {}

    def let_through(self, name: str) -> None:
        """Let the rows that wait in front of a module go on, and all that come to it later."""
        self._passed.add(name)
        for position, stop in enumerate(self._stops):
            if stop is not None and stop[0] == name:
                self._go_on(position)
