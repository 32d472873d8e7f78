"""The hidden states between two decoder layers: in memory, and on disk from a size on."""

import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import torch

# Hidden states beyond this many bytes go to a memory-mapped temporary file.
MEMORY_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class _Slot:
    """The states of one batch and, where they lie on disk, their mapped pages."""

    states: torch.Tensor
    pages: mmap.mmap | None


class HiddenStates:
    """The hidden states of every batch, overwritten layer after layer; they lie in main memory.

    The first `memory_bytes` stay in memory. What exceeds them lies in `file`, and its pages leave the
    process's memory as soon as they are written: the kernel keeps or flushes them as it sees fit.
    """

    def __init__(self, file: IO[bytes], memory_bytes: int = MEMORY_BYTES) -> None:
        self._file = file
        self._room = memory_bytes
        self._end = 0
        self._slots: list[_Slot] = []

    def __len__(self) -> int:
        return len(self._slots)

    def append(self, states: torch.Tensor) -> None:
        """Copy the states of the next batch."""
        size = states.numel() * states.element_size()
        if size <= self._room:
            self._room -= size
            self._slots.append(_Slot(states.to("cpu", copy=True), None))
        else:
            self._slots.append(self._map(states, size))
            self[len(self) - 1] = states

    def __getitem__(self, batch: int) -> torch.Tensor:
        """The states of a batch; valid until they are overwritten."""
        return self._slots[batch].states

    def __setitem__(self, batch: int, states: torch.Tensor) -> None:
        """Overwrite the states of a batch with others of the same shape."""
        slot = self._slots[batch]
        assert states.shape == slot.states.shape, (states.shape, slot.states.shape)
        slot.states.copy_(states)
        if slot.pages is not None:
            slot.pages.madvise(mmap.MADV_DONTNEED)  # a shared mapping: its data stay in the file

    def _map(self, states: torch.Tensor, size: int) -> _Slot:
        grain = mmap.ALLOCATIONGRANULARITY
        start, self._end = self._end, self._end + -(-size // grain) * grain
        self._file.truncate(self._end)
        pages = mmap.mmap(self._file.fileno(), size, offset=start)
        return _Slot(torch.frombuffer(pages, dtype=states.dtype).view(states.shape), pages)


@contextmanager
def hidden_states(memory_bytes: int = MEMORY_BYTES) -> Iterator[HiddenStates]:
    """Hidden states whose file lies in the system's temporary folder (TMPDIR) and is gone after the block."""
    with tempfile.TemporaryFile(prefix="vexport-hidden-") as file:
        yield HiddenStates(file, memory_bytes)
