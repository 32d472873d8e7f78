"""Where a forward first makes a value that is not finite."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from vexport.calibration.model import joined
from vexport.errors import CheckpointFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """The first value that is not finite: the module, which side of it, and the sample within the batch."""

    module: str
    side: Literal["input", "output"]
    sample: int

    def error(self, row: int) -> CheckpointFailed:
        """The error to raise, with the line of the calibration file that made the value."""
        return CheckpointFailed(
            self.module,
            got=f"an {self.side} that is not finite, from calibration row {row}",
            need="finite activations",
            fix="remove the row, or keep this layer unquantized and look at its weights",
        )


def is_finite(value: torch.Tensor) -> bool:
    """Whether no element is infinite or NaN; an empty tensor is finite."""
    if not value.numel():
        return True
    low, high = torch.aminmax(value)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def first_not_finite(
    module: torch.nn.Module, name: str, samples: int, run: Callable[[], object]
) -> NotFinite | None:
    """Run a forward of `module` over a batch of `samples` and say where a value first is not finite.

    First means in the order of execution: an input is seen before the output that comes of it, a child's
    output before its parent's. Within that module it is the first sample of the batch.
    """
    found: list[NotFinite] = []
    with _watching(module, name, samples, found):
        run()
    return found[0] if found else None


@contextmanager
def _watching(module: torch.nn.Module, name: str, samples: int, found: list[NotFinite]) -> Iterator[None]:
    handles = []
    for child_name, child in module.named_modules():
        full = joined(name, child_name)
        look = _Look(full, samples, found)
        handles.append(child.register_forward_pre_hook(look.at_input))
        handles.append(child.register_forward_hook(look.at_output))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class _Look:
    """The hooks of one module."""

    name: str
    samples: int
    found: list[NotFinite]

    def at_input(self, module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
        self._look("input", inputs)

    def at_output(self, module: torch.nn.Module, inputs: tuple[object, ...], output: object) -> None:
        self._look("output", output if isinstance(output, tuple | list) else (output,))

    def _look(self, side: Literal["input", "output"], values: Sequence[object]) -> None:
        value = next(iter(values), None)
        if self.found or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return
        if not is_finite(value):
            self.found.append(NotFinite(module=self.name, side=side, sample=self._sample(value)))

    def _sample(self, value: torch.Tensor) -> int:
        """Which sample of the batch; the first dimension counts samples, or the tokens of all of them."""
        if value.numel() % self.samples:
            return 0
        bad = ~torch.isfinite(value).reshape(self.samples, -1).all(1)
        return int(bad.nonzero()[0])
