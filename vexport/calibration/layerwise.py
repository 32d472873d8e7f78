"""One pass of all batches through a model that is filled layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from vexport.calibration.capture import LayerCall, Rest, base_of, capture_layer_calls, replayed_layers
from vexport.calibration.finite import NotFinite, first_not_finite, is_finite
from vexport.calibration.hidden import HiddenStates
from vexport.calibration.model import build_on_meta, decoder_layers, unload
from vexport.calibration.products import fast_products
from vexport.calibration.watch import Watched
from vexport.calibration.weights import Weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader

OnLayer = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A value that is not finite, and from which row."""

    row: int
    found: NotFinite


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one length that run together, token ids (samples, tokens), and the lines they come from."""

    ids: torch.Tensor
    rows: tuple[int, ...]


class LayerByLayer:
    """The model of a checkpoint, built on meta; one decoder layer has weights at a time."""

    def __init__(
        self,
        index: SourceIndex,
        reader: Reader,
        batches: Sequence[Batch],
        hidden: HiddenStates,
        watched: Watched,
        *,
        trust_remote_code: bool,
        device: str,
    ) -> None:
        self.model = build_on_meta(index.root, trust_remote_code=trust_remote_code, device=device)
        self.name, self.layers = decoder_layers(self.model)
        self.batches = batches
        self.hidden = hidden
        self.watched = watched
        self.device = device
        self.weights = Weights(index, reader, self.model, device)

    def run(self, on_layer: OnLayer) -> Failure | None:
        """Run everything; the first value that is not finite ends the run and is the answer."""
        self.weights.load_around(self.name)
        self._load(0)
        ids = [batch.ids.to(self.device) for batch in self.batches]
        captured = capture_layer_calls(self.model, self.name, self.layers, ids, self.hidden)
        failure = self._before_layers(captured.rest)
        with fast_products(self.layers, self.device):
            for number, layer in enumerate(self.layers):
                if failure:
                    return failure
                if number:
                    self._load(number)
                failure = self._layer(number, captured.calls[number])
                unload(layer)
                on_layer(number + 1, len(self.layers))
        return failure or self._after_layers(captured.rest)

    def _load(self, number: int) -> None:
        self.weights.load(self.layers[number], f"{self.name}.{number}")

    def _layer(self, number: int, calls: Sequence[LayerCall]) -> Failure | None:
        """Run all batches through one layer, each in place."""
        layer, name = self.layers[number], f"{self.name}.{number}"
        with self.watched.watching(layer, name, self.weights) as inputs:
            for position, call in enumerate(calls):
                output = call.run(layer, self._states(position))
                if inputs.not_finite or not is_finite(output):
                    break
                self.hidden[position] = output
            else:
                return None
        again = partial(call.run, layer, self._states(position))
        return self._locate(layer, name, position, again, inputs.not_finite)

    def _states(self, position: int) -> torch.Tensor:
        """The hidden states of a batch, on the device."""
        return self.hidden[position].to(self.device)

    def _forward(self, part: torch.nn.Module, position: int) -> Callable[[], object]:
        """The forward of the model or a part of it over a batch."""
        return partial(part, input_ids=self.batches[position].ids.to(self.device), use_cache=False)

    def _before_layers(self, rest: Rest) -> Failure | None:
        """What enters the first layer must be finite already."""
        for position in range(len(self.batches)):
            states = self._states(position)
            if not is_finite(states):
                with replayed_layers(self.layers, states, rest):
                    forward = self._forward(base_of(self.model), position)
                    return self._locate(self.model, "", position, forward)
        return None

    def _after_layers(self, rest: Rest) -> Failure | None:
        """Run what is outside the layers where something there is watched, an output head say."""
        outside = [
            module
            for name, module in self.model.named_modules()
            if self.watched.layers_of(self.weights.stored_as(f"{name}.weight"))
            and not name.startswith(f"{self.name}.")
        ]
        if not outside:
            return None
        in_base = set(base_of(self.model).modules())
        part = base_of(self.model) if in_base.issuperset(outside) else self.model
        for position in range(len(self.batches)):
            forward = self._forward(part, position)
            with replayed_layers(self.layers, self._states(position), rest):
                with self.watched.watching(self.model, "", self.weights) as inputs:
                    forward()
                if inputs.not_finite:
                    return self._locate(self.model, "", position, forward, inputs.not_finite)
        return None

    def _locate(
        self,
        module: torch.nn.Module,
        name: str,
        position: int,
        run: Callable[[], object],
        layer: str | None = None,
    ) -> Failure:
        """Where a value of this batch first is not finite: it runs once more, every module watched.

        Where no module shows it, or only a module of experts as a whole, it is the input of the watched
        `layer`.
        """
        rows = self.batches[position].rows
        found = first_not_finite(module, name, len(rows), run)
        found = found or NotFinite(module=name, side="output", sample=0)
        found = replace(found, module=self.weights.stored_name(found.module))
        if layer and layer.startswith(f"{found.module}."):
            found = replace(found, module=layer, side="input")
        return Failure(row=rows[found.sample], found=found)
