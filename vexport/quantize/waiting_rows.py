"""Let rows of text wait in front of a module until its weights are rounded, and limit their memory.

The forward of each row runs in a greenlet. All greenlets share a thread, so only one forward runs
at a time.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from greenlet import getcurrent, greenlet

from vexport.calibration.inputs import GroupInputs, RecordedInputs, Value
from vexport.errors import InputError
from vexport.formats.plan import FusionGroup
from vexport.quantize.gptq import strength_of
from vexport.rules.rounding import MEMORY

CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
# Bytes per value of an input, which has 16 bits.
BYTES_PER_VALUE = 2
NUMBER = re.compile(r"\d+")
# The module that a row waits for, and its input.
Stop = tuple[str, Value]


class WaitingRows:
    """Rows of a stream in a decoder layer. Each of `runs` is the forward of a row."""

    def __init__(self, runs: Sequence[Callable[[], object]]) -> None:
        self._rows = [greenlet(run) for run in runs]
        self._stops: list[Stop | None] = [None] * len(runs)
        self._passed: set[str] = set()

    @contextmanager
    def stopped_at(self, inputs: GroupInputs) -> Iterator[None]:
        """Run each row until it reaches a module of `inputs`.

        Inside the block, rows stop in front of these modules.
        """
        with inputs.hooked(self._stop):
            for position in range(len(self._rows)):
                self._resume(position)
            yield

    def _stop(self, name: str, value: Value) -> None:
        row = getcurrent()
        if name not in self._passed:
            assert row.parent is not None
            row.parent.switch((name, value))

    def _resume(self, position: int) -> None:
        self._stops[position] = None
        self._stops[position] = self._rows[position].switch()

    @property
    def names(self) -> set[str]:
        """Return the modules that rows wait in front of. Empty when all rows are through."""
        return {stop[0] for stop in self._stops if stop is not None}

    def recorded_input(self, position: int, name: str) -> RecordedInputs:
        """Return the input of this module, if a row waits there."""
        stop = self._stops[position]
        return {name: stop[1]} if stop is not None and stop[0] == name else {}

    def release(self, name: str) -> None:
        """Release the rows that wait in front of a module. Rows that reach it later do not stop."""
        self._passed.add(name)
        for position, stop in enumerate(self._stops):
            if stop is not None and stop[0] == name:
                self._resume(position)


class RecordedRows:
    """Rows that run through the output head to record its inputs. They end at the last input.

    The inputs do not depend on the weights that are rounded in the head, so no row has to wait.
    """

    def __init__(self, runs: Sequence[Callable[[], object]]) -> None:
        self._runs = runs
        self._seen: list[dict[str, Value]] = []

    @contextmanager
    def stopped_at(self, inputs: GroupInputs) -> Iterator[None]:
        """Record the inputs of these modules."""
        for run in self._runs:
            with inputs.recorded(only_inputs=True) as inputs_of_row:
                run()
            self._seen.append(inputs_of_row)
        yield

    @property
    def names(self) -> set[str]:
        """Return the modules that rows reach."""
        return set[str]().union(*self._seen)

    def recorded_input(self, position: int, name: str) -> RecordedInputs:
        """Return a row's input of this module, if the row reaches it."""
        inputs_of_row = self._seen[position]
        return {name: inputs_of_row[name]} if name in inputs_of_row else {}

    def release(self, name: str) -> None:
        """Drop the recorded inputs of a module."""
        for inputs_of_row in self._seen:
            inputs_of_row.pop(name, None)


Rows = WaitingRows | RecordedRows


def max_waiting_bytes(device: str = "cpu") -> int:
    """Return the limit in bytes for rows that wait in a layer.

    The limit is half of the GPU's memory, or half of the memory that this process may use.
    """
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory // 2
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no control group, or no limit
        memory = min(memory, int(CGROUP_MEMORY.read_text(encoding="ascii")))
    return memory // 2


def waiting_bytes(groups: Iterable[FusionGroup], tokens: int) -> int:
    """Estimate the bytes of all rows while they wait in front of the module with the widest input.

    `tokens` is the total number of tokens of the rows. Values have 16 bits. A waiting row needs
    memory for the widest input, for its rounded copy, and for other values of about the size of all
    inputs together. A refit also keeps the widest input of the source's stream, or less if the
    layer has few outputs. Fragmentation of the heap can take as much memory again. This memory is
    not counted.
    """
    rounded = [group for group in groups if group.rounding != "nearest"]
    columns = {NUMBER.sub("*", group.name): group.members[0].in_features for group in rounded}
    refits = any(strength_of(group).strength > 0 for group in rounded)
    widest = max(columns.values(), default=0)
    return tokens * (sum(columns.values()) + (3 if refits else 2) * widest) * BYTES_PER_VALUE


def require_memory(groups: Iterable[FusionGroup], tokens: int, samples: int, device: str) -> None:
    """Raise InputError if the waiting rows of all samples need too much memory."""
    needed = waiting_bytes(groups, tokens)
    most = max_waiting_bytes(device)
    if needed > most:
        fitting = samples * most // needed
        fewer, shorter = f"use --samples {fitting}", "use shorter samples (seq_len in a scenario)"
        raise InputError.of(
            MEMORY,
            "calibration",
            samples=samples,
            tokens=tokens,
            needed=needed / 1e9,
            most=most / 1e9,
            remedy=fewer if fitting else shorter,
        )
