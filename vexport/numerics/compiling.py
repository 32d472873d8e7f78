"""Tells when kernels are compiled, which happens once on a machine: their code is kept."""

from collections.abc import Iterator
from contextlib import contextmanager

from numba.core import event

from vexport.types import OnProgress

STAGE = "compile kernels, once"


class Compilation(event.Listener):  # type: ignore[misc]
    """A stage that begins when a first kernel is to be compiled; one whose code was kept does not count."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._begun = self._ended = False

    def on_start(self, event: event.Event) -> None:
        """Called by numba, in the thread that compiles."""
        if not self._begun:
            self._begun = True
            self._on_progress(STAGE, 0, 1)

    def on_end(self, event: event.Event) -> None:
        """Others may follow."""

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Progress of another stage: what was to be compiled is there."""
        if self._begun and not self._ended:
            self._ended = True
            self._on_progress(STAGE, 1, 1)
        self._on_progress(stage, done, total)


@contextmanager
def telling_compilation(on_progress: OnProgress) -> Iterator[OnProgress]:
    """Within the block progress, to be told by what is yielded, also says if a kernel has to be compiled."""
    with event.install_listener("numba:compile", Compilation(on_progress)) as compilation:
        yield compilation.on_progress
