"""Walk samples of text through a model. Only a single decoder layer at a time has weights.

The walk runs the rows and calls its watchers: statistics, rounding, gradients and trials of schemes
are watchers. If a forward computes a value that is not finite, the error names the first module
with such a value.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from vexport.calibration.capture import (
    capture_layer_calls,
    float32_products,
    replayed_layers,
    single_sequences,
)
from vexport.calibration.data import Samples
from vexport.calibration.inputs import Counted, CountedTokens, Places
from vexport.calibration.model import (
    HiddenStates,
    build_on_meta,
    decoder_layers,
    finite,
    joined,
    read_flags,
    require_device,
    tie_head,
    unload,
)
from vexport.calibration.weights import Weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.smoothed import reader_of
from vexport.errors import CheckpointFailed, VexportError
from vexport.formats.packing.base import not_finite
from vexport.records import OnProgress, Smoothing, silent
from vexport.records.calibration import PICTURES
from vexport.rules import calibration as rules

# Outputs of rows wait until they were checked for values that are not finite. The host waits for a
# GPU when the outputs have this many bytes together, and at the end of a layer.
UNCHECKED_BYTES = 1 << 26


# Maximum number of tokens of rows that run together on a device.
BATCH_TOKENS = 8192


def batches_of(samples: Samples, most_tokens: int) -> list[list[int]]:
    """Return the positions of the rows that run together, in the order of their first rows.

    These rows have the same length, no pictures, and together at most `most_tokens` tokens.
    """
    batches = list[list[int]]()
    # The last batch for each length.
    growing = dict[int, list[int]]()
    for row, ids in enumerate(samples.token_ids):
        batch = growing.get(len(ids), [])
        has_pictures = samples.pictures_of(row) is not None
        if not batch or has_pictures or (len(batch) + 1) * len(ids) > most_tokens:
            batch = []
            batches.append(batch)
        if not has_pictures:
            growing[len(ids)] = batch
        batch.append(row)
    return batches


def is_finite(value: torch.Tensor) -> bool:
    """Return True if no element is infinite or NaN. An empty tensor is finite."""
    return bool(finite(value))


def first_not_finite(
    module: torch.nn.Module, name: str, run: Callable[[], object]
) -> tuple[str, str, torch.Tensor] | None:
    """Run a forward of `module` and return the first module with a value that is not finite.

    Returns the module's name, "input" or "output" for the place of the value, and the value.
    Returns None if all values are finite. Values are checked in the order of execution: an input
    before the output computed from it, and a child's output before its parent's output.
    """
    places: list[tuple[str, str, torch.Tensor]] = []

    def check_value(name: str, side: str, module: torch.nn.Module, *values: object) -> None:
        states = values[-1]
        value = next(iter(states), None) if isinstance(states, tuple | list) else states
        if places or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return
        if not is_finite(value):
            places.append((name, side, value))

    with ExitStack() as block:
        for child_name, child in module.named_modules():
            full_name = joined(name, child_name)
            before = child.register_forward_pre_hook(partial(check_value, full_name, "input"))
            block.callback(before.remove)
            behind = child.register_forward_hook(partial(check_value, full_name, "output"))
            block.callback(behind.remove)
        run()
    return places[0] if places else None


def first_bad_row(value: torch.Tensor, rows: int) -> int | None:
    """Return the first row of a batch of `rows` rows that is not finite, or None."""
    if len(value) % rows:  # a router chose some of the tokens
        return None
    each = value.reshape(rows, -1)
    return next((row for row in range(rows) if not is_finite(each[row])), None)


# Runs a layer. Receives the row's index and its hidden states, and returns the layer's output.
RunRow = Callable[[int, torch.Tensor], torch.Tensor]
# Returns the input of a layer. Receives the layer's number and the row's index.
LayerInputs = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer with its weights, or the model's head, which counts as the last layer.

    The head has the number of layers as its `number`, an empty `name` and the whole model as its
    `module`. It returns logits. `run` runs the module on the hidden states of a row. `input_of`
    copies the layer's input for a row to the device. In a forward pass, call it for a row only
    until `Watcher.row` returns for this row: the output may then replace the input. Context
    managers in `watching` end when all rows have run, also if the walk fails.
    """

    number: int
    name: str
    module: torch.nn.Module
    run: RunRow
    input_of: Callable[[int], torch.Tensor]
    watching: ExitStack = field(default_factory=ExitStack)

    @property
    def is_head(self) -> bool:
        """Return True for the model's head, False for a decoder layer."""
        return not self.name

    def run_again(self, index: int) -> torch.Tensor:
        """Run a row through the layer again."""
        return self.run(index, self.input_of(index))


class Watcher(Protocol):
    """Receives rows of text while they run through the layers of a model.

    For each layer the walk calls `enter` once, `row` for each row, and `leave` once.
    """

    def enter(self, layer: Layer) -> None:
        """Prepare for a layer that has its weights. Hooks belong into `layer.watching`."""

    def row(self, index: int, hidden: torch.Tensor) -> None:
        """Watch a row that has just run through the layer.

        In a forward pass, `hidden` is the layer's output, or the head's logits. In a backward pass,
        it is the layer's input.
        """

    def leave(self, layer: Layer) -> None:
        """Finish a layer that all rows have run through. It still has its weights, but no hooks."""


class Stream(Protocol):
    """Hidden states of all rows, which the walk replaces layer after layer."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> torch.Tensor: ...
    def __setitem__(self, index: int, states: torch.Tensor, /) -> None: ...


class LayerWalk:
    """Runs samples of text through a checkpoint's model, layer by layer.

    `start` runs the parts in front of the decoder layers. `forward`, `run_head` and `backward` run
    rows of hidden states through the layers and call watchers. Layers are loaded one after the
    other. Layers run on `device`. Hidden states wait in main memory, or on disk beyond a size.
    Raises InputError for an unusable device and for a model that transformers cannot build.

    On a CPU, rows run one by one, because in bf16 a batched product rounds differently. On other
    devices, rows of equal length run together if `start` allows it. They share an index: a batch of
    rows then takes the place of a row. `batch_tokens` is the maximum number of tokens of a batch.
    By default, it depends on the device.
    """

    def __init__(
        self,
        index: SourceIndex,
        *,
        trust_remote_code: bool = False,
        device: str = "cpu",
        batch_tokens: int | None = None,
    ) -> None:
        require_device(device)
        default = 0 if device == "cpu" else BATCH_TOKENS
        self._batch_tokens = default if batch_tokens is None else batch_tokens
        self.index = index
        self.device = device
        self.model = build_on_meta(index.root, trust_remote_code=trust_remote_code, device=device)
        self.name, self.layers = decoder_layers(self.model)
        # The positions of the rows that run together, and their token ids (rows, tokens).
        self.batches: list[list[int]] = []
        self.ids: list[torch.Tensor] = []
        # The number of tokens in all rows that statistics count.
        self.counted_tokens = 0
        self._counted: list[CountedTokens] = []
        # Outputs that replace the states of a stream when they were checked, by the row's index.
        self._outputs: list[tuple[Stream, int, torch.Tensor]] = []
        # Boolean tensors that must be True, and the errors to raise otherwise.
        self._checks: list[tuple[torch.Tensor, Callable[[], VexportError]]] = []
        # The row that began to run last.
        self._row = 0
        with Reader() as reader:
            self.weights = Weights(index, reader, self.model, device)
            self.weights.load_around(self.name)
        self.places = Places(self.model, self.weights, self.name, len(self.layers))
        tie_head(self.model)

    @contextmanager
    def start(
        self,
        samples: Samples,
        smoothing: Mapping[str, Smoothing] | None = None,
        *,
        in_batches: bool = False,
        stage: str = "layers",
        on_progress: OnProgress = silent,
    ) -> Iterator[HiddenStates]:
        """Run the samples through the parts of the smoothed model in front of its decoder layers.

        The layers can run inside the block. With `in_batches`, rows of equal length may run
        together. Set it only if the watchers need no calls for single rows.

        `on_progress` receives a step of `stage` for each layer, and for the head if it runs. Raises
        InputError for a model that cannot run layer by layer.
        """
        self._steps = len(self.layers)
        self._done = 0
        self.batches = batches_of(samples, self._batch_tokens if in_batches else 0)
        self.ids = [
            torch.tensor([samples.token_ids[row] for row in batch], device=self.device)
            for batch in self.batches
        ]
        pictures = len(samples.pictures) - samples.pictures.count(None)
        seen = self._pictures_of(samples, partial(on_progress, PICTURES), pictures)
        self.counted_tokens = samples.counted_tokens
        self._counted = [
            CountedTokens.of(
                [token for row in batch for token in samples.counted[row]], self.device
            )
            for batch in self.batches
            if samples.counted
        ]
        self._outputs.clear()
        self._checks.clear()
        self._rows = samples.places
        self._report = partial(on_progress, stage)
        with (
            torch.no_grad(),
            # compressed-tensors compiles its FP4 rounding, which needs a C++ compiler.
            torch.compiler.set_stance("force_eager"),
            float32_products(self.layers, self.device),
            reader_of(smoothing or {}) as self.weights.reader,
        ):
            self._load(0)
            hidden = HiddenStates()
            # Towers of pictures are outside the decoder layers.
            around = float32_products(self.model, self.device) if pictures else nullcontext()
            with around:
                self._captured = capture_layer_calls(
                    self.model, self.name, self.layers, zip(self.ids, seen, strict=True), hidden
                )
            self.settle()
            if self.device.startswith("cuda"):
                torch.cuda.synchronize()  # the host may now read the states
            yield hidden

    def _pictures_of(
        self, samples: Samples, report: Callable[[int, int], object], total: int
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield the inputs of each row beside its token ids. Only rows with pictures have some.

        Floats are in the model's dtype, as in vLLM.
        """
        done = 0
        for index, batch in enumerate(self.batches):
            self._row = index
            sample = samples.pictures_of(batch[0])
            if sample is None:
                yield {}
                continue
            report(done, total)
            inputs = sample.inputs()
            yield {
                name: value.to(
                    self.device, self.model.dtype if value.is_floating_point() else value.dtype
                )
                for name, value in inputs.items()
            }
            done += 1
            report(done, total)

    def expect_steps(self, steps: int) -> None:
        """Set the number of progress steps. The default is the number of decoder layers.

        Call this inside the block of `start`, before anything runs.
        """
        self._steps = steps

    def finish_step(self) -> None:
        """Report that rows have run through a layer or the head."""
        self._done += 1
        self._report(self._done, self._steps)

    def forward(
        self, stream: Stream, *watchers: Watcher, rows: Sequence[int] | None = None
    ) -> None:
        """Run rows of a stream through all layers, first to last.

        `rows` are indices into the stream. If it is None, all rows run. Afterwards the stream has
        the states behind the last layer. Raises CheckpointFailed if a hidden state is not finite.
        """
        numbers = range(len(self.layers))
        for layer in self._layers_with_weights(numbers, self._current_states(stream)):
            with _watched(layer, watchers):
                for index in range(len(stream)) if rows is None else rows:
                    output = layer.run(index, self.on_device(stream[index]))
                    _notify(watchers, index, output)
                    self._check_output(layer, index, output, stream[index])
                    self.replace(stream, index, output)
                self.settle()

    def run_head(
        self, stream: Stream, *watchers: Watcher, rows: Sequence[int] | None = None
    ) -> None:
        """Run rows of a stream through the model's head, after `forward` has run all layers."""
        layer = Layer(
            number=len(self.layers),
            name="",
            module=self.model,
            run=self.logits,
            input_of=partial(self._current_states(stream), len(self.layers)),
        )
        with _watched(layer, watchers):
            for index in range(len(stream)) if rows is None else rows:
                _notify(watchers, index, layer.run(index, stream[index]))
            self.settle()
        self.finish_step()

    def backward(
        self,
        back: Callable[[Layer, int], torch.Tensor],
        input_of: LayerInputs,
        *watchers: Watcher,
    ) -> None:
        """Call `back` for every row of every layer, last to first.

        `back` receives the layer and the row's index, and returns the layer's input. `input_of`
        returns a copy of this input on the device.
        """
        numbers = range(len(self.layers))[::-1]
        for layer in self._layers_with_weights(numbers, input_of):
            with _watched(layer, watchers):
                for index in range(len(self.ids)):
                    _notify(watchers, index, back(layer, index))

    def counted_of(self, index: int) -> Counted:
        """Return True for each token of a row that statistics count, or None if all count."""
        return self._counted[index] if self._counted else None

    def counted_now(self) -> Counted:
        """Return `counted_of` the row that runs. Hooks call this while rows run one by one."""
        return self.counted_of(self._row)

    def on_device(self, states: torch.Tensor) -> torch.Tensor:
        """Return hidden states on the device.

        The host does not wait for the copy. This is safe because only the device changes pinned
        states.
        """
        return states.to(self.device, non_blocking=True)

    def run_row(self, layer: Layer, index: int, states: torch.Tensor) -> torch.Tensor:
        """Run a row's hidden states through a layer, without changing the stream of `forward`.

        For example, run the states of a quantized model. `settle` raises CheckpointFailed if the
        output is not finite. Do not change the states until then.
        """
        output = layer.run(index, self.on_device(states))
        self._check_output(layer, index, output, states)
        return output

    def _check_output(
        self, layer: Layer, index: int, output: torch.Tensor, states: torch.Tensor
    ) -> None:
        def run() -> object:
            return layer.run(index, states.to(self.device, copy=True))

        self.check(finite(output), partial(self.not_finite_error, layer, index, run))

    def check(self, is_right: torch.Tensor, error: Callable[[], VexportError]) -> None:
        """Let `settle` raise an error if a Boolean tensor without dimensions is False."""
        self._checks.append((is_right, error))

    def replace(self, stream: Stream, index: int, output: torch.Tensor) -> None:
        """Replace a row's states in a stream by a layer's output, at the latest in `settle`."""
        self._outputs.append((stream, index, output))
        if sum(each.nbytes for _, _, each in self._outputs) > UNCHECKED_BYTES:
            self.settle()

    def settle(self) -> None:
        """Raise the error of the first check that fails. Otherwise, replace the states of rows.

        The host waits for a GPU once. A layer calls this after its last row, with the hooks and
        weights of its forward, because an error runs its row again.
        """
        checks, outputs = self._checks, self._outputs
        self._checks, self._outputs = [], []
        right = read_flags([is_right for is_right, _ in checks])
        for is_right, (_, error) in zip(right, checks, strict=True):
            if not is_right:
                raise error()
        for stream, index, output in outputs:
            stream[index] = output

    def logits(
        self, index: int, states: torch.Tensor, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a row's logits (1, tokens, vocabulary) from its states behind the last layer.

        If `places` (tokens,) int64 is given, only these tokens of the row have logits.
        """
        self._row = index
        if places is None:
            return self._logits(index, states)
        # Most of transformers' models can leave out tokens, which saves time.
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            return self._logits(index, states, logits_to_keep=places)
        return self._logits(index, states)[:, places]

    def _logits(self, index: int, states: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        with (
            single_sequences(),
            replayed_layers(self.layers, self.on_device(states), self._captured.rest),
        ):
            output = self.model(input_ids=self.ids[index], use_cache=False, **kwargs)
        logits: torch.Tensor = output.logits
        return logits

    def not_finite_error(
        self, layer: Layer, index: int, run: Callable[[], object], watched: str | None = None
    ) -> VexportError:
        """Return the error that names the cause of a value that is not finite.

        If a weight is not finite, every row fails, and the error names the weight. Otherwise it
        names the row, and the first module with such a value.

        `run` runs the row at `index` through the layer once more. `watched` is a linear layer whose
        input had such a value. The error names this input if the second run finds only a module
        that contains the linear layer (such as a module of experts), or no module at all.
        """
        if weight := self._weight_not_finite():
            return not_finite(weight)
        outputs = list[object]()
        found = first_not_finite(layer.module, layer.name, lambda: outputs.append(run()))
        name, side, *values = found or (layer.name, "output")
        name = self.weights.stored_name(name)
        if watched and watched.startswith(f"{name}."):
            name = watched
            side = "input"
        row = self._bad_row(index, *outputs, *values)
        return CheckpointFailed.of(rules.NOT_FINITE, name, row=row, side=side)

    def _bad_row(self, index: int, *values: object) -> str:
        """Return the first row of a batch with a value that is not finite, for messages."""
        batch = self.batches[index]
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        found = (first_bad_row(value, len(batch)) for value in tensors)
        return self._rows[batch[next((row for row in found if row is not None), 0)]]

    def not_finite_input(self, module: str) -> Callable[[], VexportError]:
        """Return a function that makes the error for an input of a module in front of the layers.

        The row that runs now has a value that is not finite in this input. If a weight is not
        finite, the error names the weight.
        """
        row = self._rows[self.batches[self._row][0]]

        def error() -> VexportError:
            if weight := self._weight_not_finite():
                return not_finite(weight)
            return CheckpointFailed.of(rules.NOT_FINITE, module, row=row, side="input")

        return error

    def _weight_not_finite(self) -> str | None:
        """Return the stored name of a weight in memory that is not finite, or None."""
        for name, weight in self.model.named_parameters():
            if not weight.is_meta and not is_finite(weight):
                module, _, parameter = name.rpartition(".")
                return joined(self.weights.stored_name(module), parameter)
        return None

    def _current_states(self, stream: Stream) -> LayerInputs:
        """Return a function that copies the current hidden states of a row to the device."""

        def input_of(number: int, index: int) -> torch.Tensor:
            return stream[index].to(self.device, copy=True, non_blocking=True)

        return input_of

    def _layers_with_weights(
        self, numbers: Sequence[int], input_of: LayerInputs
    ) -> Iterator[Layer]:
        """Yield these layers with their weights, and drop the weights of each layer afterwards."""
        if self._done == 0:
            self._report(0, self._steps)
        for done, number in enumerate(numbers, start=1):
            self._load(number)
            if done < len(numbers) and self._lacks_weights(following := numbers[done]):
                self.weights.prefetch(self.layers[following], self._name_of(following))
            yield Layer(
                number=number,
                name=self._name_of(number),
                module=self.layers[number],
                run=partial(self._run, number),
                input_of=partial(input_of, number),
            )
            unload(self.layers[number])
            self.finish_step()

    def _run(self, number: int, index: int, states: torch.Tensor) -> torch.Tensor:
        """Run a decoder layer on the hidden states of a row."""
        self._row = index
        return self._captured.calls[number][index].run(self.layers[number], states)

    def _load(self, number: int) -> None:
        """Fill a layer that has no weights yet."""
        if self._lacks_weights(number):
            self.weights.load(self.layers[number], self._name_of(number))

    def _name_of(self, number: int) -> str:
        return f"{self.name}.{number}"

    def _lacks_weights(self, number: int) -> bool:
        return any(parameter.is_meta for parameter in self.layers[number].parameters())


@contextmanager
def _watched(layer: Layer, watchers: Sequence[Watcher]) -> Iterator[None]:
    """Let watchers enter a layer before the block and leave it after a block that succeeds."""
    with layer.watching:
        for watcher in watchers:
            watcher.enter(layer)
        yield
    for watcher in watchers:
        watcher.leave(layer)


def _notify(watchers: Sequence[Watcher], index: int, hidden: torch.Tensor) -> None:
    for watcher in watchers:
        watcher.row(index, hidden)
