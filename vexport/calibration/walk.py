"""One walk of calibration text through a model: one decoder layer has weights at a time.

Where a forward makes a value that is not finite, it is said where first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from vexport.calibration.attention import fast_products
from vexport.calibration.capture import HiddenStates, LayerCall, base_of, capture_layer_calls, replayed_layers
from vexport.calibration.data import Samples
from vexport.calibration.model import build_on_meta, decoder_layers, joined, tie_head, unload
from vexport.calibration.weights import Weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.errors import CheckpointFailed

OnLayer = Callable[[int, int], None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one length that run together, token ids (samples, tokens), and the lines they come from."""

    ids: torch.Tensor
    rows: tuple[int, ...]


def make_batches(samples: Samples, batch_size: int = 1) -> list[Batch]:
    """The samples in batches of equal length, in the order in which each length first comes."""
    lengths: dict[int, list[int]] = {}
    for position, ids in enumerate(samples.token_ids):
        lengths.setdefault(len(ids) if batch_size > 1 else -position, []).append(position)
    chunks = [
        positions[start : start + batch_size]
        for positions in lengths.values()
        for start in range(0, len(positions), batch_size)
    ]
    return [
        Batch(
            ids=torch.tensor([samples.token_ids[position] for position in chunk]),
            rows=tuple(samples.rows[position] for position in chunk),
        )
        for chunk in chunks
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer that has its weights, its name in the model, and how it is called for each batch."""

    number: int
    name: str
    module: torch.nn.Module
    calls: Sequence[LayerCall]

    def run(self, position: int, states: torch.Tensor) -> torch.Tensor:
        """The hidden states behind the layer of the batch at `position`, from those in front of it."""
        return self.calls[position].run(self.module, states)


class LayerWalk:
    """The model of a checkpoint, built once, and batches of text on their way through its layers.

    `begin` runs what is in front of the decoder layers; `forward` and `backward` load one layer after the
    other and show it to a visitor, which runs the batches through it, in as many streams of hidden states
    as it keeps; `logits` runs what is behind them.
    """

    def __init__(
        self,
        index: SourceIndex,
        reader: Reader,
        batches: Sequence[Batch],
        *,
        trust_remote_code: bool,
        device: str,
    ) -> None:
        self.model = build_on_meta(index.root, trust_remote_code=trust_remote_code, device=device)
        self.name, self.layers = decoder_layers(self.model)
        self.batches = batches
        self.ids = [batch.ids.to(device) for batch in batches]
        self.device = device
        self.weights = Weights(index, reader, self.model, device)
        self.weights.load_around(self.name)
        tie_head(self.model)

    def begin(self, hidden: HiddenStates) -> None:
        """Append what enters the first layer to `hidden`, batch by batch, and see how layers are called.

        Raises InputError for a model that cannot run layer by layer, CheckpointFailed where what enters the
        first layer is not finite.
        """
        self._load(0)
        self._captured = capture_layer_calls(self.model, self.name, self.layers, self.ids, hidden)
        for position in range(len(self.batches)):
            states = hidden[position].to(self.device)
            if not is_finite(states):
                with self._behind(states):
                    run = partial(base_of(self.model), input_ids=self.ids[position], use_cache=False)
                    raise self.not_finite(self.model, "", position, run)

    def forward(self, visit: Callable[[Layer], None], on_layer: OnLayer, *, last: int | None = None) -> None:
        """Show every layer to the visitor, from the first on; with `last` no layer behind that one."""
        depth = len(self.layers)
        self._visit(range(depth if last is None else min(depth, last + 1)), visit, on_layer)

    def backward(self, visit: Callable[[Layer], None], on_layer: OnLayer) -> None:
        """Show every layer to the visitor, from the last on."""
        self._visit(reversed(range(len(self.layers))), visit, on_layer)

    def logits(self, position: int, states: torch.Tensor) -> torch.Tensor:
        """(samples, tokens, vocabulary) of a batch, from the hidden states behind the last layer."""
        with self._behind(states):
            logits: torch.Tensor = self.model(input_ids=self.ids[position], use_cache=False).logits
        return logits

    def run_behind(self, part: torch.nn.Module, position: int, states: torch.Tensor) -> None:
        """Run the model or its base; only what is outside of the layers computes anything."""
        with self._behind(states):
            part(input_ids=self.ids[position], use_cache=False)

    def not_finite(
        self,
        module: torch.nn.Module,
        name: str,
        position: int,
        run: Callable[[], object],
        layer: str | None = None,
    ) -> CheckpointFailed:
        """The error that says where a value of a batch first is not finite: `run` runs it once more.

        Where no module shows it, or only a module of experts as a whole, it is the input of the watched
        `layer`.
        """
        rows = self.batches[position].rows
        found = first_not_finite(module, name, len(rows), run)
        found = found or NotFinite(module=name, side="output", sample=0)
        found = replace(found, module=self.weights.stored_name(found.module))
        if layer and layer.startswith(f"{found.module}."):
            found = replace(found, module=layer, side="input")
        return found.error(rows[found.sample])

    def _behind(self, states: torch.Tensor) -> AbstractContextManager[None]:
        return replayed_layers(self.layers, states.to(self.device), self._captured.rest)

    def _visit(self, numbers: Iterable[int], visit: Callable[[Layer], None], on_layer: OnLayer) -> None:
        depth = len(self.layers)
        # compressed-tensors compiles its FP4 rounding, which would ask for a C++ compiler.
        with torch.compiler.set_stance("force_eager"), fast_products(self.layers, self.device):
            for done, number in enumerate(numbers):
                module, name = self.layers[number], f"{self.name}.{number}"
                self._load(number)
                visit(Layer(number=number, name=name, module=module, calls=self._captured.calls[number]))
                unload(module)
                on_layer(done + 1, depth)

    def _load(self, number: int) -> None:
        """Fill a layer that has no weights yet."""
        if any(one.is_meta for one in self.layers[number].parameters()):
            self.weights.load(self.layers[number], f"{self.name}.{number}")
