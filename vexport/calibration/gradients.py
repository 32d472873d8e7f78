"""A walk up through a model's layers and back, with the gradients of its own answers.

Gradients are those of the log-probability of tokens drawn from the model's own answer: their second
moments are the Fisher information, by which a small error of an input moves the KL divergence. By
them each token is weighed (GuidedQuant, arXiv 2505.07004): most attention rests on the first, whose
errors change every answer. The root of the mean square, averaged over places in the text, left less
KL than the mean (docs/rounding.md).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Protocol

import torch

from vexport.calibration.data import Samples
from vexport.calibration.inputs import arithmetic_of
from vexport.calibration.model import HiddenStates, joined
from vexport.calibration.walk import Layer, LayerWalk
from vexport.records import OnProgress, silent
from vexport.records.calibration import LOOK_BACK

# Layer inputs are kept for the backward pass: this many bytes in memory, the rest on disk.
ENTERED_BYTES = 2**28
# The most probabilities in memory at once.
RUN_ELEMENTS = 1 << 22

# Runs the first sample through a layer again.
Again = Callable[[], torch.Tensor]


class GradientWatcher(Protocol):
    """Watches the layers during the backward pass."""

    def watching(self, layer: Layer) -> AbstractContextManager[None]:
        """Watch a layer while the text runs through it forward and backward."""

    def leave(self, layer: Layer, again: Again) -> None:
        """Finish a layer that all text has gone through; it still has its weights."""


class Gradients:
    """The states of a walk on its way up, and the gradients on the way back; None where there is
    none.
    """

    def __init__(self, walk: LayerWalk, watchers: Sequence[GradientWatcher]) -> None:
        self._walk, self._watchers, self._entered = walk, watchers, HiddenStates(ENTERED_BYTES)
        self._generator = torch.Generator().manual_seed(
            0
        )  # of the CPU: the same draws on any device
        self._behind: list[torch.Tensor | None] = []

    def run(self, samples: Samples, on_progress: OnProgress = silent) -> None:
        """Run samples up through all layers, and their gradients back.

        Raises CheckpointFailed where a state is not finite, and as `LayerWalk.text`.
        """
        walk = self._walk
        with walk.text(samples, stage=LOOK_BACK, on_progress=on_progress) as hidden:
            for layer in walk.forward(0, 2):
                for position in range(len(walk.ids)):
                    self._entered.append(hidden[position])
                    hidden[position] = walk.through(layer, position, self._before(layer, position))
            walk.model.requires_grad_(False)
            self._behind = [
                self._of_logits(position, hidden[position]) for position in range(len(walk.ids))
            ]
            for layer in walk.backward(1, 2):
                self._back(layer)

    def _back(self, layer: Layer) -> None:
        layer.module.requires_grad_(False)
        with ExitStack() as block:
            for watcher in self._watchers:
                block.enter_context(watcher.watching(layer))
            for position, behind in enumerate(self._behind):
                self._behind[position] = self._through(layer, position, behind)
        for watcher in self._watchers:
            watcher.leave(layer, lambda: layer.run(0, self._before(layer, 0)))

    def _before(self, layer: Layer, position: int) -> torch.Tensor:
        """A copy of a layer's inputs on the device."""
        states = self._entered[layer.number * len(self._walk.ids) + position]
        return states.to(self._walk.device, copy=True)

    def _through(
        self, layer: Layer, position: int, behind: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The gradient by the inputs of a layer; without one the sample still runs through it."""
        gradient = None
        if behind is not None:
            states = self._before(layer, position)
            gradient = _gradient(
                states, lambda states: layer.run(position, states), lambda _: behind
            )
        if gradient is None:
            layer.run(position, self._before(layer, position))
        return gradient

    def _of_logits(self, position: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """The gradient by the outputs of the last layer."""
        states = hidden.to(self._walk.device).clone()
        return _gradient(states, lambda states: self._walk.logits(position, states), self._errors)

    def _errors(self, logits: torch.Tensor) -> torch.Tensor:
        """The gradient by logits (1, tokens, vocabulary): probabilities, less 1 at a token that is
        drawn.
        """
        errors = torch.empty_like(logits)
        rows = max(1, RUN_ELEMENTS // logits.shape[-1])
        for part, error in zip(
            torch.split(logits[0], rows), torch.split(errors[0], rows), strict=True
        ):
            probabilities = torch.softmax(part.to(torch.float32), -1)
            ends = probabilities.cumsum(-1)
            share = torch.rand(len(probabilities), 1, generator=self._generator).to(logits.device)
            drawn = torch.searchsorted(ends, share * ends[:, -1:]).clamp_max(
                probabilities.shape[-1] - 1
            )
            error.copy_(probabilities.scatter_add_(1, drawn, torch.full_like(share, -1.0)))
        return errors


def _gradient(
    states: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
    behind: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """The gradient by `states` where `behind` gives that by what `forward` makes of them.

    None where the model cannot be differentiated: an operation of it has no gradient, or one that
    overflows.
    """
    states.requires_grad_()
    try:
        with torch.enable_grad():
            output = forward(states * 1)  # the model may change its input
        (gradient,) = torch.autograd.grad(output, states, behind(output.detach()))
    except RuntimeError as reason:
        logging.getLogger(__name__).debug("no gradient: %s", reason)
        return None
    return gradient if bool(torch.isfinite(gradient).all()) else None


# A token's weight is within this many octaves of the mean.
MOST_OCTAVES = 10

# The mean square of the gradient behind each module, by octaves of the token's place in its row:
# the tokens 0, 1, 2 and 3, 4 to 7 and so on. Without a module its tokens all count the same.
TokenWeights = Mapping[str, tuple[float, ...]]


def weights_of(
    mean_squares: TokenWeights, modules: Sequence[str], tokens: int
) -> torch.Tensor | None:
    """The weights of a row's tokens for these modules together, (tokens,) float32.

    They go by the root mean square of the gradient, and their mean is about 1; powers of two, so
    that a 16-bit input times its weight loses no digit. None where nothing is known of any.
    """
    known = [torch.tensor(mean_squares[name]) for name in modules if name in mean_squares]
    if not known:
        return None
    length = min(map(len, known))
    gradients = torch.stack([squares[:length] for squares in known]).sum(0).sqrt()
    weights = gradients[octaves(tokens).clamp_max(length - 1)]
    mean = weights.mean()
    return (
        torch.exp2((weights / mean).log2().round().clamp(-MOST_OCTAVES, MOST_OCTAVES))
        if mean > 0
        else None
    )


def octaves(tokens: int) -> torch.Tensor:
    """The octave of each place in a row of so many tokens, (tokens,)."""
    places = torch.arange(tokens, dtype=torch.float64)
    return torch.frexp(places).exponent.to(torch.int64)


class TokenWeigher:
    """Adds up the gradients behind the linear modules and experts of layers; rows have these
    `lengths`.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        # Sums of squares and how many, (2, octaves), by module.
        self._sums: dict[str, torch.Tensor] = {}
        # Squares of each token of a row behind a module, on the device until a layer is done.
        self._seen = list[tuple[str, torch.Tensor]]()
        self._lengths = set(lengths)

    @contextmanager
    def watching(self, layer: Layer) -> Iterator[None]:
        """Add up the gradients of a layer inside the block."""
        with ExitStack() as block:
            for name, module in layer.module.named_modules():
                if isinstance(module, torch.nn.Linear) or arithmetic_of(module) is not None:
                    handle = module.register_forward_hook(
                        partial(self._see, joined(layer.name, name))
                    )
                    block.callback(handle.remove)
            yield
        for name, squares in self._seen:
            self._add(name, squares.cpu())
        self._seen.clear()

    def leave(self, layer: Layer, again: Again) -> None:
        """Finish a layer."""

    def found(self) -> TokenWeights:
        """The mean squares of all gradients."""
        return {
            name: tuple((squares / counts.clamp_min(1)).tolist())
            for name, (squares, counts) in self._sums.items()
            if bool(torch.isfinite(squares).all())
        }

    def _see(self, name: str, module: torch.nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(partial(self._see_back, name))  # type: ignore[no-untyped-call]

    def _see_back(self, name: str, gradient: torch.Tensor) -> None:
        squares = gradient.reshape(-1, gradient.shape[-1]).to(torch.float32).square().sum(-1)
        self._seen.append((name, squares))

    def _add(self, name: str, squares: torch.Tensor) -> None:
        if len(squares) not in self._lengths:  # not one of each token
            return
        if name not in self._sums:
            self._sums[name] = torch.zeros(2, int(octaves(max(self._lengths))[-1]) + 1)
        both = torch.stack([squares, torch.ones(len(squares))])
        self._sums[name].index_add_(1, octaves(len(squares)), both)
