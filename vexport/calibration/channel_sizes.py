"""How large the channels of a layer's inputs are, and how much the model's answers depend on each."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch


class ChannelSizes:
    """The root mean square of each channel of modules' inputs and of their gradients, by module.

    A gradient goes by the first module that reads the input.
    """

    def __init__(self) -> None:
        self._squares: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    @contextmanager
    def watching(self, modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
        """Within the block modules' inputs and gradients are added up; one that several read, once."""
        with ExitStack() as block:
            for name, module in modules.items():
                block.callback(module.register_forward_pre_hook(partial(self._see, name)).remove)
            yield
        self._last = None

    def knows(self, weights: Iterable[str]) -> bool:
        """Whether one of these weights has been multiplied with an input."""
        return any(name.removesuffix(".weight") in self._squares for name in weights)

    def of(self, weights: Iterable[str]) -> torch.Tensor:
        """The largest among their inputs, (channels,) float32, but for a factor that all share."""
        return _largest(self._squares, weights)

    def of_gradients(self, weights: Iterable[str]) -> torch.Tensor | None:
        """The same of their inputs' gradients; None where the model could not be differentiated."""
        weights = [name for name in weights if name.removesuffix(".weight") in self._gradients]
        return _largest(self._gradients, weights) if weights else None

    def _see(self, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        value = inputs[0]
        if self._last is None or self._last[0] is not value:
            self._last = value, _squared(value.detach())
            if value.requires_grad:
                see = partial(self._see_gradient, name)
                value.register_hook(see)  # type: ignore[no-untyped-call]
        _add(self._squares, name, self._last[1])

    def _see_gradient(self, name: str, gradient: torch.Tensor) -> None:
        _add(self._gradients, name, _squared(gradient))


def _largest(squares: Mapping[str, torch.Tensor], weights: Iterable[str]) -> torch.Tensor:
    names = (name.removesuffix(".weight") for name in weights)
    return torch.stack([squares[name] for name in names if name in squares]).amax(0).sqrt()


def _squared(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, values.shape[-1]).to(torch.float32).square().sum(0)


def _add(sums: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value
