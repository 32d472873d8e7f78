"""Run text forward through a model's layers, and the gradients of its predictions backward.

The gradients are of the log-probability of tokens that are drawn from the model's predictions.
Their second moments are the Fisher information: they show how a small error of an input changes the
KL divergence. Tokens are weighted by these moments (GuidedQuant, arXiv 2505.07004). For example,
the first token receives most of the attention, so its errors change every prediction. The root of
the mean square, averaged over places in the text, left less KL than the mean (docs/rounding.md).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from vexport.calibration.capture import float32_head_gradient
from vexport.calibration.data import Samples
from vexport.calibration.inputs import expert_runner_of
from vexport.calibration.model import HiddenStates, joined
from vexport.calibration.walk import Layer, LayerWalk, Watcher
from vexport.records import OnProgress, silent
from vexport.records.calibration import GRADIENTS

# Layer inputs are kept for the backward pass: this many bytes in memory, the rest on disk.
KEPT_BYTES = 2**28
# Note on an interrupt. A layer's gradients depend on the states in front of all layers, which would
# have to be stored: 73 MB for SmolLM2-135M with default settings, but 2.7 GB for a model of 70 B
# parameters. Measuring them again takes 3 % of the expected time of SmolLM2's calibration.
NOT_KEPT = "the gradients are measured again from the first layer"
# The most probabilities in memory at once.
CHUNK_ELEMENTS = 1 << 22


class Gradients:
    """Runs text forward through a model, and the gradients of the predictions backward.

    The states in front of every layer are kept during the forward pass. `watchers` watch the
    backward pass, in which torch computes gradients. If the gradient of a row cannot be computed,
    the row continues without a gradient.
    """

    def __init__(self, walk: LayerWalk, watchers: Sequence[Watcher]) -> None:
        self._walk = walk
        self._watchers = watchers
        # The states of all rows in front of the first layer, of the second layer and so on, and
        # last of the head.
        self._layer_inputs = HiddenStates(KEPT_BYTES)
        # A generator on the CPU draws the same numbers for every device.
        self._generator = torch.Generator().manual_seed(0)
        # The gradient of each row behind the present layer.
        self._behind: list[torch.Tensor | None] = []

    def run(self, samples: Samples, on_progress: OnProgress = silent) -> None:
        """Run samples up through all layers, and their gradients back.

        Raises CheckpointFailed if a state is not finite, and the errors of `LayerWalk.start`. If
        this is interrupted, KeyboardInterrupt has the note NOT_KEPT.
        """
        try:
            self._run(samples, on_progress)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(NOT_KEPT)
            raise

    def _run(self, samples: Samples, on_progress: OnProgress) -> None:
        walk = self._walk
        with walk.start(samples, stage=GRADIENTS, on_progress=on_progress) as hidden:
            for index in range(len(hidden)):
                self._layer_inputs.append(hidden[index])
            # Up and back through each layer, and the head between them.
            walk.expect_steps(2 * len(walk.layers) + 1)
            walk.forward(hidden, self)
            walk.model.requires_grad_(False)
            with float32_head_gradient(walk.model.get_output_embeddings(), walk.device):
                self._behind = [self._head_gradient(index) for index in range(len(hidden))]
            walk.finish_step()
            walk.backward(self._layer_gradient, self._layer_input, *self._watchers)

    def enter(self, layer: Layer) -> None:
        """Do nothing: a layer on the way up needs no preparation."""

    def row(self, index: int, hidden: torch.Tensor) -> None:
        """Keep the states behind a layer, which are the states in front of the next layer."""
        self._layer_inputs.append(hidden)

    def leave(self, layer: Layer) -> None:
        """Do nothing: a layer on the way up needs no further work."""

    def _layer_input(self, number: int, index: int) -> torch.Tensor:
        """Return a copy, on the device, of a row's states in front of a layer or the head."""
        states = self._layer_inputs[number * len(self._walk.ids) + index]
        return states.to(self._walk.device, copy=True)

    def _layer_gradient(self, layer: Layer, index: int) -> torch.Tensor:
        """Compute the gradient in front of a layer from the gradient behind it.

        The row runs through the layer in any case. Returns the states in front of the layer.
        """
        states = layer.input_of(index)
        behind = self._behind[index]
        gradient = None
        if behind is not None:
            gradient = _gradient(states, partial(layer.run, index), lambda output: behind)
        if gradient is None:
            layer.run_again(index)
        self._behind[index] = gradient
        return states

    def _head_gradient(self, index: int) -> torch.Tensor | None:
        """Compute the gradient behind the last layer."""
        states = self._layer_input(len(self._walk.layers), index)
        return _gradient(states, partial(self._walk.logits, index), self._errors)

    def _errors(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the gradient of logits (1, tokens, vocabulary).

        The gradient is the probabilities, minus 1 for the token that is drawn from them.
        """
        errors = torch.empty_like(logits)
        rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
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
    """Return the gradient of `states`, computed from the gradient of the output.

    `behind` receives the output and returns the output's gradient. Returns None if an operation has
    no gradient, or if the gradient overflows.
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

# The mean square of the gradient behind each module, by octaves of the token's place in its row.
# The octaves are the tokens 0, 1, 2 and 3, 4 to 7 and so on. All tokens of other modules count the
# same.
TokenWeights = Mapping[str, tuple[float, ...]]


def token_weights_of(
    mean_squares: TokenWeights, modules: Sequence[str], tokens: int
) -> torch.Tensor | None:
    """Return the weights of a row's tokens for these modules together, (tokens,) float32.

    The weights follow the root mean square of the gradient, and their mean is about 1. They are
    powers of two, so that a 16-bit input times its weight loses no digit. Returns None if no module
    is in `mean_squares`.
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
    """Return the octave of each place in a row of `tokens` tokens, (tokens,)."""
    places = torch.arange(tokens, dtype=torch.float64)
    return torch.frexp(places).exponent.to(torch.int64)


class TokenWeigher:
    """Adds up the gradients behind the linear modules and experts of all layers.

    `lengths` are the numbers of tokens of the rows.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        # Sums of squares and their numbers, (2, octaves), by module.
        self._sums: dict[str, torch.Tensor] = {}
        # Squares of each token of a row behind a module, on the device until a layer is done.
        self._seen = list[tuple[str, torch.Tensor]]()
        self._lengths = set(lengths)

    def enter(self, layer: Layer) -> None:
        """Watch the gradients behind a layer's modules."""
        for name, module in layer.module.named_modules():
            if isinstance(module, torch.nn.Linear) or expert_runner_of(module) is not None:
                see = partial(self._hook_output, joined(layer.name, name))
                layer.watching.callback(module.register_forward_hook(see).remove)

    def row(self, index: int, hidden: torch.Tensor) -> None:
        """Do nothing: the hooks have already seen the row."""

    def leave(self, layer: Layer) -> None:
        """Add up the squares of the layer's rows."""
        for name, squares in self._seen:
            self._add(name, squares.cpu())
        self._seen.clear()

    def mean_squares(self) -> TokenWeights:
        """Return the mean squares of all gradients."""
        return {
            name: tuple((squares / counts.clamp_min(1)).tolist())
            for name, (squares, counts) in self._sums.items()
            if bool(torch.isfinite(squares).all())
        }

    def _hook_output(
        self, name: str, module: torch.nn.Module, inputs: object, output: object
    ) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(partial(self._add_gradient, name))  # type: ignore[no-untyped-call]

    def _add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        squares = gradient.reshape(-1, gradient.shape[-1]).to(torch.float32).square().sum(-1)
        self._seen.append((name, squares))

    def _add(self, name: str, squares: torch.Tensor) -> None:
        if len(squares) not in self._lengths:  # the module did not see every token
            return
        if name not in self._sums:
            self._sums[name] = torch.zeros(2, int(octaves(max(self._lengths))[-1]) + 1)
        both = torch.stack([squares, torch.ones(len(squares))])
        self._sums[name].index_add_(1, octaves(len(squares)), both)
