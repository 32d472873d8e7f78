"""Run text forward through a model's layers, and the gradients of its predictions backward.

Tokens are drawn from the model's predictions, and the gradients of their log-probabilities are
computed. The mean squares of these gradients are the Fisher information: they show how a small
error of a module's output changes the KL divergence. GuidedQuant (arXiv 2505.07004) weights tokens
by them.
For example, the first token receives most of the attention, so its errors change every prediction.
vexport weights tokens by the root of the mean square, which left a smaller KL.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from vexport.calibration.attention import causal_attention
from vexport.calibration.capture import float32_head_gradient
from vexport.calibration.data import Samples
from vexport.calibration.inputs import Counted, expert_runner_of
from vexport.calibration.model import HiddenStates, finite, joined, read_flags
from vexport.calibration.walk import Layer, LayerWalk, Watcher
from vexport.records import OnProgress, silent
from vexport.records.calibration import GRADIENTS

# Layer inputs are kept for the backward pass: this many bytes in memory, the rest on disk.
KEPT_BYTES = 2**28
# Note on an interrupt. To resume the gradients, an interrupted call would have to store the inputs
# of all layers: 73 MB for SmolLM2-135M with default settings, but 2.7 GB for a model of 70 B
# parameters. Measuring the gradients again takes 3 % of the expected time of SmolLM2's calibration.
NOT_KEPT = "the gradients are measured again from the first layer"
# Maximum number of probabilities in memory at a time.
CHUNK_ELEMENTS = 1 << 22
# Number of tokens at the beginning of a row whose predictions always have gradients, because their
# octaves have few tokens.
FIRST_PREDICTIONS = 64


class Gradients:
    """Runs text forward through a model, and the gradients of the predictions backward.

    The forward pass keeps the input of every layer. `watchers` watch the backward pass, in which
    torch computes gradients. If the gradient of a row cannot be computed, the backward pass
    continues for this row without gradients.

    The gradients come from the predictions of each row's first tokens, and of one in
    `prediction_step` later tokens.
    """

    def __init__(
        self, walk: LayerWalk, watchers: Sequence[Watcher], *, prediction_step: int = 1
    ) -> None:
        self._walk = walk
        self._step = prediction_step
        self._watchers = watchers
        # The inputs of the first layer for all rows, the inputs of the second layer and so on. The
        # inputs of the head come last.
        self._layer_inputs = HiddenStates(KEPT_BYTES)
        # A generator on the CPU draws the same numbers for every device.
        self._generator = torch.Generator().manual_seed(0)
        # The gradient of the current layer's output, for each row.
        self._output_gradients: list[torch.Tensor | None] = []
        # The layer whose output gradients are known to be finite.
        self._checked_layer = -1

    def run(self, samples: Samples, on_progress: OnProgress = silent) -> None:
        """Run samples forward through all layers, and their gradients backward.

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
        text = walk.start(samples, stage=GRADIENTS, on_progress=on_progress)
        with causal_attention(walk.device), text as hidden:
            for index in range(len(hidden)):
                self._layer_inputs.append(hidden[index])
            # Each layer runs forward and backward. The head runs once, between the two passes.
            walk.expect_steps(2 * len(walk.layers) + 1)
            walk.forward(hidden, self)
            walk.model.requires_grad_(False)
            with float32_head_gradient(walk.model.get_output_embeddings(), walk.device):
                self._output_gradients = [
                    self._head_gradient(index) for index in range(len(hidden))
                ]
            walk.finish_step()
            walk.backward(self._layer_gradient, self._layer_input, *self._watchers)

    def enter(self, layer: Layer) -> None:
        """Do nothing: the forward pass needs no preparation."""

    def row(self, index: int, hidden: torch.Tensor) -> None:
        """Keep the output of a layer, which is the input of the next layer."""
        self._layer_inputs.append(hidden)

    def leave(self, layer: Layer) -> None:
        """Do nothing: the forward pass needs no further work."""

    def _layer_input(self, number: int, index: int) -> torch.Tensor:
        """Return a row's input of a layer or of the head, as a copy on the device."""
        states = self._layer_inputs[number * len(self._walk.ids) + index]
        return states.to(self._walk.device, copy=True, non_blocking=True)

    def _layer_gradient(self, layer: Layer, index: int) -> torch.Tensor:
        """Compute the gradient of a layer's input from the gradient of its output.

        Returns the layer's input. The row runs through the layer even if it has no gradient, so
        that watchers see it.
        """
        if self._checked_layer != layer.number:
            self._checked_layer = layer.number
            self._drop_overflows()
        states = layer.input_of(index)
        output_gradient = self._output_gradients[index]
        gradient = None
        if output_gradient is not None:
            gradient = _gradient(states, partial(layer.run, index), lambda output: output_gradient)
        if gradient is None:
            layer.run_again(index)
        self._output_gradients[index] = gradient
        return states

    def _drop_overflows(self) -> None:
        """Drop the gradients that are not finite. The host waits for a GPU only once."""
        rows = [row for row, value in enumerate(self._output_gradients) if value is not None]
        values = [value for value in self._output_gradients if value is not None]
        for row, is_finite in zip(rows, read_flags([*map(finite, values)]), strict=True):
            if not is_finite:
                self._output_gradients[row] = None

    def _head_gradient(self, index: int) -> torch.Tensor | None:
        """Compute the gradient of the last layer's output."""
        states = self._layer_input(len(self._walk.layers), index)
        places, factors = self._predictions(index)
        run = partial(self._walk.logits, index, places=places)
        return _gradient(states, run, partial(self._logits_gradient, factors=factors))

    def _predictions(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of a row whose predictions have gradients, and the gradients' factors.

        Only counted tokens are chosen. Target tokens are drawn independently, so the mean square of
        a module's gradient is the sum of the mean squares from each prediction. With the root of
        the step as its factor, a prediction stands for those that are left out. The next row leaves
        out other places.
        """
        counted, device = self._walk.counted_of(index), self._walk.device
        tokens = self._walk.ids[index].shape[1]
        places = torch.arange(tokens, device=device) if counted is None else counted.places
        first, later = places[:FIRST_PREDICTIONS], places[FIRST_PREDICTIONS:]
        later = later[index % self._step :: self._step]
        factors = torch.ones(len(first) + len(later), device=device)
        factors[len(first) :] = self._step**0.5
        return torch.cat([first, later]), factors

    def _logits_gradient(self, logits: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the cross-entropy for logits (1, tokens, vocabulary).

        A target token is drawn from the probabilities at each position. The gradient equals the
        probabilities, except that 1 is subtracted from the target token's probability. Each
        token's gradient is multiplied by its factor.
        """
        errors = torch.empty_like(logits)
        rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
        for part, error in zip(
            torch.split(logits[0], rows), torch.split(errors[0], rows), strict=True
        ):
            probabilities = torch.softmax(part, -1, dtype=torch.float32)
            ends = probabilities.cumsum(-1)
            share = torch.rand(len(probabilities), 1, generator=self._generator)
            share = share.to(logits.device, non_blocking=True)
            drawn = torch.searchsorted(ends, share * ends[:, -1:]).clamp_max(
                probabilities.shape[-1] - 1
            )
            error.copy_(probabilities.scatter_add_(1, drawn, torch.full_like(share, -1.0)))
        return errors.mul_(factors[:, None].to(errors.dtype))


def _gradient(
    states: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
    output_gradient: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """Return the gradient of `states`, computed from the gradient of the output.

    `output_gradient` receives the output and returns the output's gradient. Returns None if an
    operation has no gradient. The gradient may overflow.
    """
    states.requires_grad_()
    try:
        with torch.enable_grad():
            output = forward(states * 1)  # the model may change its input
        (gradient,) = torch.autograd.grad(output, states, output_gradient(output.detach()))
    except RuntimeError as reason:
        logging.getLogger(__name__).debug("no gradient: %s", reason)
        return None
    return gradient


# A token's weight differs from the mean weight by at most this many factors of two.
MOST_OCTAVES = 10

# The mean square of the gradient of each module's output. Each module has a value per octave of
# token positions: position 0, position 1, positions 2 and 3, positions 4 to 7 and so on. For
# modules that are not listed, all tokens have equal weights.
GradientSquares = Mapping[str, tuple[float, ...]]


def token_weights_of(
    mean_squares: GradientSquares, modules: Sequence[str], tokens: int
) -> torch.Tensor | None:
    """Return the weights of a row's tokens for modules that share an input, (tokens,) float32.

    The weights are proportional to the root mean square of the gradients, and their mean is about
    1. They are rounded to powers of two, so that a 16-bit input times its weight loses no digit.
    Returns None if no module is in `mean_squares`, or if all mean squares are zero.
    """
    known = [mean_squares[name] for name in modules if name in mean_squares]
    length = min(map(len, known), default=0)
    present = min(length, max(0, tokens - 1).bit_length() + 1)
    # Numbers, not a tensor, decide here, because the host would wait for a GPU.
    if not any(square > 0 for squares in known for square in squares[:present]):
        return None
    gradients = torch.stack([torch.tensor(squares[:length]) for squares in known]).sum(0).sqrt()
    weights = gradients[octaves(tokens).clamp_max(length - 1)]
    ratios = (weights / weights.mean()).log2().round()
    return torch.exp2(ratios.clamp(-MOST_OCTAVES, MOST_OCTAVES))


def octaves(tokens: int) -> torch.Tensor:
    """Return the octave of each position in a row: int64 (tokens,), 0, 1, 2, 2, 3, 3, 3, 3, ..."""
    places = torch.arange(tokens, dtype=torch.float64)
    return torch.frexp(places).exponent.to(torch.int64)


class TokenWeigher:
    """Averages the squared gradients of the outputs of linear modules and modules of experts.

    `lengths` contains the number of tokens of each row. `counted_now` returns the counted tokens of
    the row that runs.
    """

    def __init__(self, lengths: Sequence[int], counted_now: Callable[[], Counted]) -> None:
        self._counted_now = counted_now
        # For each module (2, octaves): the sums of squared gradients, and the numbers of tokens.
        self._sums: dict[str, torch.Tensor] = {}
        # For each row and module, the squared gradient of each token. They stay on the device until
        # the layer is finished.
        self._seen = list[tuple[str, torch.Tensor, Counted]]()
        self._lengths = set(lengths)

    def enter(self, layer: Layer) -> None:
        """Watch the gradients of the outputs of a layer's modules."""
        for name, module in layer.module.named_modules():
            if isinstance(module, torch.nn.Linear) or expert_runner_of(module) is not None:
                see = partial(self._hook_output, joined(layer.name, name))
                layer.watching.callback(module.register_forward_hook(see).remove)

    def row(self, index: int, hidden: torch.Tensor) -> None:
        """Do nothing: the hooks have already seen the row."""

    def leave(self, layer: Layer) -> None:
        """Add the squared gradients of the layer's modules to the sums."""
        if not self._seen:
            return
        names, squares, counted = zip(*self._seen, strict=True)
        # The host waits for a GPU only once.
        on_host = torch.split(torch.cat(squares).cpu(), [len(each) for each in squares])
        for seen in zip(names, on_host, counted, strict=True):
            self._add(*seen)
        self._seen.clear()

    def mean_squares(self) -> GradientSquares:
        """Return the mean squares of the gradients by module. Leave out modules with overflows.

        Octaves without a counted token have the mean of all counted tokens.
        """
        return {
            name: _means(squares, counts)
            for name, (squares, counts) in self._sums.items()
            if bool(torch.isfinite(squares).all())
        }

    def _hook_output(
        self, name: str, module: torch.nn.Module, inputs: object, output: object
    ) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            add_gradient = partial(self._add_gradient, name, self._counted_now())
            output.register_hook(add_gradient)  # type: ignore[no-untyped-call]

    def _add_gradient(self, name: str, counted: Counted, gradient: torch.Tensor) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])
        norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
        self._seen.append((name, norms.square(), counted))

    def _add(self, name: str, squares: torch.Tensor, counted: Counted) -> None:
        if len(squares) not in self._lengths:  # the module did not see every token
            return
        if name not in self._sums:
            self._sums[name] = torch.zeros(2, int(octaves(max(self._lengths))[-1]) + 1)
        both = torch.stack([squares, torch.ones(len(squares))])
        if counted is not None:
            both *= counted.on_host
        self._sums[name].index_add_(1, octaves(len(squares)), both)


def _means(squares: torch.Tensor, counts: torch.Tensor) -> tuple[float, ...]:
    means = squares / counts.clamp_min(1)
    means[counts == 0] = squares.sum() / counts.sum().clamp_min(1)
    return tuple(means.tolist())
