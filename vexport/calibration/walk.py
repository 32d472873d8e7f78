"""One walk of calibration text through a model: one decoder layer has weights at a time.

Where a forward makes a value that is not finite, it is said where first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from vexport.calibration.capture import (
    LayerCall,
    capture_layer_calls,
    fast_products,
    replayed_layers,
)
from vexport.calibration.data import Samples
from vexport.calibration.model import (
    HiddenStates,
    build_on_meta,
    decoder_layers,
    joined,
    require_device,
    tie_head,
    unload,
)
from vexport.calibration.weights import ReadAhead, Weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.smoothed import reader_of
from vexport.errors import CheckpointFailed
from vexport.records import OnProgress, Smoothing, silent


def is_finite(value: torch.Tensor) -> bool:
    """True where no element is infinite or NaN; an empty tensor is finite."""
    if not value.numel():
        return True
    low, high = torch.aminmax(value)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def first_not_finite(
    module: torch.nn.Module, name: str, run: Callable[[], object]
) -> tuple[str, str] | None:
    """Run a forward of `module`; return the module whose input or output first is not finite, and
    which.

    First means in the order of execution: an input is seen before the output that comes of it, a
    child's output before its parent's.
    """
    places: list[tuple[str, str]] = []

    def look(name: str, side: str, module: torch.nn.Module, *values: object) -> None:
        states = values[-1]
        value = next(iter(states), None) if isinstance(states, tuple | list) else states
        if places or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return
        if not is_finite(value):
            places.append((name, side))

    with ExitStack() as block:
        for child_name, child in module.named_modules():
            before, behind = (
                partial(look, joined(name, child_name), side) for side in ("input", "output")
            )
            block.callback(child.register_forward_pre_hook(before).remove)
            block.callback(child.register_forward_hook(behind).remove)
        run()
    return places[0] if places else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer with its weights, its name in the model, and its call for each sample."""

    number: int
    name: str
    module: torch.nn.Module
    calls: Sequence[LayerCall]

    def run(self, position: int, states: torch.Tensor) -> torch.Tensor:
        """Run the layer on the hidden states of the sample at `position`."""
        return self.calls[position].run(self.module, states)


class LayerWalk:
    """The model of a checkpoint, built once, for samples of text on their way through its layers.

    `text` runs what is in front of the decoder layers; `forward` and `backward` load one layer
    after the other, for any number of streams of hidden states; `logits` runs what is behind them.
    Samples run one by one: in bf16 a batched product rounds differently, and a moving average takes
    one step per forward. Layers run on `device`, hidden states wait in main memory, beyond a size
    on disk. Raises InputError for an unusable device and a model that transformers cannot build.
    """

    def __init__(
        self, index: SourceIndex, *, trust_remote_code: bool = False, device: str = "cpu"
    ) -> None:
        require_device(device)
        self.index, self.device = index, device
        self.model = build_on_meta(index.root, trust_remote_code=trust_remote_code, device=device)
        self.name, self.layers = decoder_layers(self.model)
        self.ids: list[torch.Tensor] = []
        with Reader() as reader:
            self.weights = Weights(index, reader, self.model, device)
            self.weights.load_around(self.name)
        tie_head(self.model)

    @contextmanager
    def text(
        self,
        samples: Samples,
        smoothing: Mapping[str, Smoothing] | None = None,
        *,
        stage: str = "layers",
        on_progress: OnProgress = silent,
    ) -> Iterator[HiddenStates]:
        """Run samples through the smoothed model up to its layers, whose calls are valid inside the
        block.

        Each layer that they go through is a step of the `stage` that `on_progress` is told. Raises
        InputError for a model that cannot run layer by layer.
        """
        self.ids = [torch.tensor([ids], device=self.device) for ids in samples.token_ids]
        self._rows = samples.rows
        self._report = partial(on_progress, stage)
        with (
            torch.no_grad(),
            # compressed-tensors compiles its FP4 rounding, which needs a C++ compiler.
            torch.compiler.set_stance("force_eager"),
            fast_products(self.layers, self.device),
            reader_of(smoothing or {}) as self.weights.reader,
            ReadAhead(self.weights, self.device) as self._ahead,
        ):
            self._load(0)
            hidden = HiddenStates()
            self._captured = capture_layer_calls(
                self.model, self.name, self.layers, self.ids, hidden
            )
            yield hidden

    def forward(self, part: int = 0, parts: int = 1) -> Iterator[Layer]:
        """Yield every layer with its weights, first to last, as one of several parts of the
        stage.
        """
        return self._each(range(len(self.layers)), part, parts)

    def backward(self, part: int = 0, parts: int = 1) -> Iterator[Layer]:
        """Yield every layer with its weights, last to first."""
        return self._each(range(len(self.layers))[::-1], part, parts)

    def on_device(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states on the device; nobody waits for pinned ones, which the device alone
        changes.
        """
        return states.to(self.device, non_blocking=True)

    def through(self, layer: Layer, position: int, states: torch.Tensor) -> torch.Tensor:
        """The outputs of a layer for a sample; CheckpointFailed where they are not finite."""
        run = partial(layer.run, position, self.on_device(states))
        output = run()
        if not is_finite(output):
            raise self.not_finite(layer.module, layer.name, position, run)
        return output

    def logits(self, position: int, states: torch.Tensor) -> torch.Tensor:
        """(1, tokens, vocabulary) of a sample, from the hidden states behind the last layer."""
        with replayed_layers(self.layers, self.on_device(states), self._captured.rest):
            logits: torch.Tensor = self.model(input_ids=self.ids[position], use_cache=False).logits
        return logits

    def not_finite(
        self,
        module: torch.nn.Module,
        name: str,
        position: int,
        run: Callable[[], object],
        layer: str | None = None,
    ) -> CheckpointFailed:
        """The error that says where a value of a sample first is not finite: `run` runs it once
        more.

        Where no module shows it, or only a module of experts as a whole, it is the input of the
        watched `layer`.
        """
        name, side = first_not_finite(module, name, run) or (name, "output")
        name = self.weights.stored_name(name)
        if layer and layer.startswith(f"{name}."):
            name, side = layer, "input"
        return CheckpointFailed(
            name,
            got=f"calibration row {self._rows[position]} makes an {side} that is not finite",
            need="",
            fix="remove the row, or keep this layer unquantized and look at its weights",
        )

    def _each(self, numbers: Sequence[int], part: int, parts: int) -> Iterator[Layer]:
        if part == 0:
            self._report(0, parts * len(numbers))
        reading = None
        for done, number in enumerate(numbers, start=1):
            if reading is None:
                self._load(number)
            else:
                self._ahead.put(reading)
            reading = None
            if done < len(numbers) and self._lacks_weights(following := numbers[done]):
                reading = self._ahead.begin(self.layers[following], self._name_of(following))
            module, calls = self.layers[number], self._captured.calls[number]
            yield Layer(number=number, name=self._name_of(number), module=module, calls=calls)
            unload(module)
            self._report(part * len(numbers) + done, parts * len(numbers))

    def _load(self, number: int) -> None:
        """Fill a layer that has no weights yet."""
        if self._lacks_weights(number):
            self.weights.load(self.layers[number], self._name_of(number))

    def _name_of(self, number: int) -> str:
        return f"{self.name}.{number}"

    def _lacks_weights(self, number: int) -> bool:
        return any(parameter.is_meta for parameter in self.layers[number].parameters())
