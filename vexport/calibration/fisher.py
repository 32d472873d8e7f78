"""A pass through the decoder layers of a model and back: how much its answers depend on each layer's inputs.

One layer has weights at a time. What enters each layer is kept on the way up; on the way back the layer runs
once more, and the gradient behind it becomes the one in front of it.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from vexport.calibration.capture import LayerCall, Rest, replayed_layers
from vexport.calibration.hidden import hidden_states
from vexport.calibration.layerwise import Failure, LayerByLayer, OnLayer
from vexport.calibration.model import tie_head, unload
from vexport.calibration.products import fast_products

# What enters all layers is kept until the way back: so many bytes in memory, the rest on disk.
ENTERED_BYTES = 2**28
# Probabilities that are held at once.
RUN_ELEMENTS = 1 << 22


class UpAndBack(LayerByLayer):
    """Runs the model, then goes back through its layers; each is visited while gradients run through it.

    Gradients are those of the log-probability of tokens that are drawn from the model's own answer: their
    second moments are the Fisher information, by which a small error of an input moves the KL divergence.
    """

    def run_and_back(self, on_layer: OnLayer, *, entered_bytes: int = ENTERED_BYTES) -> None:
        """Run everything, and go back. Raises what `vexport.calibration.forward.watch` raises."""
        self._calls = list[Sequence[LayerCall]]()
        self._on_layer = on_layer
        self._generator = torch.Generator(self.device).manual_seed(0)
        with hidden_states(entered_bytes) as self._entered:
            failure = self.run(lambda done, total: on_layer(done, 2 * total))
        if failure:
            raise failure.found.error(failure.row)

    def visit(self, number: int, calls: Sequence[LayerCall], flow: Callable[[], None]) -> None:
        """See a layer that has its weights; `flow` runs all batches through it and their gradients back."""
        raise NotImplementedError

    def before(self, number: int, position: int) -> torch.Tensor:
        """A copy of what enters a layer of a batch, on the device."""
        return self._entered[number * len(self.batches) + position].to(self.device, copy=True)

    def _layer(self, number: int, calls: Sequence[LayerCall]) -> Failure | None:
        self._calls.append(calls)
        for position in range(len(calls)):
            self._entered.append(self._states(position))
        return super()._layer(number, calls)

    def _after_layers(self, rest: Rest) -> Failure | None:
        tie_head(self.model)
        self.model.requires_grad_(False)
        behind = [self._behind_last(position, rest) for position in range(len(self.batches))]
        depth = len(self.layers)
        with fast_products(self.layers, self.device):
            for number in reversed(range(depth)):
                self._load(number)
                self.layers[number].requires_grad_(False)
                calls = self._calls[number]

                def flow(number: int = number, calls: Sequence[LayerCall] = calls) -> None:
                    for position, call in enumerate(calls):
                        behind[position] = self._back(number, position, call, behind[position])

                self.visit(number, calls, flow)
                unload(self.layers[number])
                self._on_layer(2 * depth - number, 2 * depth)
        return None

    def _behind_last(self, position: int, rest: Rest) -> torch.Tensor | None:
        """The gradient by what leaves the last layer."""
        ids = self.batches[position].ids.to(self.device)

        def logits(states: torch.Tensor) -> torch.Tensor:
            with replayed_layers(self.layers, states, rest):
                found: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
            return found

        return _gradient(self._states(position).clone(), logits, self._errors)

    def _errors(self, logits: torch.Tensor) -> torch.Tensor:
        """The gradient by logits (1, tokens, vocabulary): probabilities, less 1 at a token that is drawn."""
        errors = torch.empty_like(logits)
        rows = max(1, RUN_ELEMENTS // logits.shape[-1])
        for part, own in zip(torch.split(logits[0], rows), torch.split(errors[0], rows), strict=True):
            found = torch.softmax(part.to(torch.float32), -1)
            ends = found.cumsum(-1)
            share = torch.rand(len(found), 1, generator=self._generator, device=self.device)
            drawn = torch.searchsorted(ends, share * ends[:, -1:]).clamp_max(found.shape[-1] - 1)
            own.copy_(found.scatter_add_(1, drawn, torch.full_like(share, -1.0)))
        return errors

    def _back(
        self, number: int, position: int, call: LayerCall, behind: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The gradient in front of a layer; without one the batch runs through it all the same."""
        layer = self.layers[number]
        found = None
        if behind is not None:
            states = self.before(number, position)
            found = _gradient(states, lambda states: call.run(layer, states), lambda _: behind)
        if found is None:
            call.run(layer, self.before(number, position))
        return found


def _gradient(
    states: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
    behind: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """The gradient by `states` where `behind` gives that by what `forward` makes of them.

    None where the model cannot be differentiated: an operation of it has no gradient, or one that overflows.
    """
    states.requires_grad_()
    try:
        with torch.enable_grad():
            made = forward(states * 1)  # the model may change its input
        (found,) = torch.autograd.grad(made, states, behind(made.detach()))
    except RuntimeError as reason:
        logging.getLogger(__name__).debug("no gradient: %s", reason)
        return None
    return found if bool(torch.isfinite(found).all()) else None
