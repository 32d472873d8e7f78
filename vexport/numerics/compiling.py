"""Tells when kernels are compiled, which happens once on a machine: their code is kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event


class Compilation(event.Listener):  # type: ignore[misc]
    """Reports (0, 1) when a first kernel is about to be compiled; one whose code was kept does not count."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._begun = self._ended = False

    def on_start(self, event: event.Event) -> None:
        """Called by numba, in the thread that compiles."""
        if not self._begun:
            self._begun = True
            self._report(0, 1)

    def on_end(self, event: event.Event) -> None:
        """Others may follow."""

    def end(self) -> None:
        """Report (1, 1) if there was anything to compile: results are there."""
        if self._begun and not self._ended:
            self._ended = True
            self._report(1, 1)


@contextmanager
def watch_compilation(report: Callable[[int, int], None]) -> Iterator[Compilation]:
    """Within the block `report` is called if a kernel has to be compiled."""
    with event.install_listener("numba:compile", Compilation(report)) as compilation:
        yield compilation
