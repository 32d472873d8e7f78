"""The calls of a model's decoder layers, recorded without knowledge of the model's class.

The hidden states between two layers lie in memory, and on disk from a size on.
"""

import mmap
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from vexport.errors import InputError

# Tensors that one is compared with before it counts as new.
RECENT = 16

Forward = Callable[..., object]
# What a layer returns in a tuple after the hidden states; None where it returns them alone.
Rest = tuple[object, ...] | None


# Hidden states beyond this many bytes go to memory-mapped temporary files.
MEMORY_BYTES = 2**30


class HiddenStates:
    """The hidden states of every batch, overwritten layer after layer; they lie in main memory.

    The first `memory_bytes` stay in memory. Others lie in unnamed files of the temporary folder (TMPDIR), and
    their pages leave the process's memory as soon as they are written.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._room = memory_bytes
        self._states: list[torch.Tensor] = []
        # The mapped pages of those that lie on disk.
        self._pages: dict[int, mmap.mmap] = {}

    def __len__(self) -> int:
        return len(self._states)

    def append(self, states: torch.Tensor) -> None:
        """Copy the states of the next batch."""
        if states.nbytes <= self._room:
            self._room -= states.nbytes
            pinned = states.device.type == "cuda" or states.is_pinned()  # copied at the speed of the bus
            self._states.append(torch.empty_like(states, device="cpu", pin_memory=pinned).copy_(states))
            return
        with tempfile.TemporaryFile(prefix="vexport-hidden-") as file:
            file.truncate(states.nbytes)
            pages = self._pages[len(self)] = mmap.mmap(file.fileno(), states.nbytes)
        self._states.append(torch.frombuffer(pages, dtype=states.dtype).view(states.shape))
        self[len(self) - 1] = states

    def __getitem__(self, batch: int) -> torch.Tensor:
        """The states of a batch; valid until they are overwritten."""
        return self._states[batch]

    def __setitem__(self, batch: int, states: torch.Tensor) -> None:
        """Overwrite the states of a batch with others of the same shape."""
        kept = self._states[batch]
        assert states.shape == kept.shape, (states.shape, kept.shape)
        kept.copy_(states)
        if batch in self._pages:
            self._pages[batch].madvise(mmap.MADV_DONTNEED)  # a shared mapping: its data stay in the file


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of one decoder layer for one batch, besides the hidden states."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    def run(self, layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's new hidden states."""
        return first_tensor(layer(hidden, *self.args, **self.kwargs))


def first_tensor(output: object) -> torch.Tensor:
    """The hidden states of a layer that returns them alone or in front of a tuple."""
    states = output[0] if isinstance(output, tuple) else output
    assert isinstance(states, torch.Tensor)
    return states


def as_output(states: torch.Tensor, rest: Rest) -> object:
    """Hidden states as a layer returns them."""
    return states if rest is None else (states, *rest)


class Interner:
    """Keeps equal tensors of calls once: masks and positions are the same for all layers and most samples."""

    def __init__(self) -> None:
        self._recent = deque[torch.Tensor](maxlen=RECENT)

    def of(self, value: object) -> object:
        """The value with tensors that were seen lately, and are equal, in the place of its own."""
        if type(value) is tuple:
            return tuple(map(self.of, value))
        if not isinstance(value, torch.Tensor):
            return value
        for known in self._recent:
            if known is value or (known.dtype == value.dtype and torch.equal(known, value)):
                return known
        self._recent.appendleft(value)
        return value


class Recorder:
    """Stands in for the layers' forwards: records the calls of each and passes the states through.

    `rest` is what layers return after the hidden states: for the first batch the first layer really runs.
    """

    def __init__(self, name: str, layers: torch.nn.ModuleList, hidden: HiddenStates) -> None:
        self.calls: list[list[LayerCall]] = [[] for _ in layers]
        self._name = name
        self._hidden = hidden
        self._interner = Interner()
        self._passed: object = None
        self.rest: Rest = None

    def begin(self) -> None:
        """Call before each batch."""
        self._passed = None

    def record(self, number: int, forward: Forward, *args: object, **kwargs: object) -> object:
        """The forward of a layer, in the place of its own."""
        states, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states", None), args)
        if not isinstance(states, torch.Tensor):
            raise self.unusual(number, "a call without hidden states in front")
        if len(self.calls[number]) != len(self._hidden) - (number > 0):
            raise self.unusual(number, "not called once per forward, in the order of the list")
        if number and states is not self._passed:
            raise self.unusual(number, "another input than the output of the layer before")
        if number == 0:
            self._first(states, forward, args, kwargs)
        kept = {name: self._interner.of(value) for name, value in kwargs.items()}
        self.calls[number].append(LayerCall(tuple(map(self._interner.of, args)), kept))
        self._passed = states
        return as_output(states, self.rest)

    def _first(
        self, states: torch.Tensor, forward: Forward, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        if not len(self._hidden):
            output = forward(states, *args, **kwargs)
            self.rest = output[1:] if isinstance(output, tuple) else None
        self._hidden.append(states)

    def unusual(self, number: int, got: str) -> InputError:
        """The error for a model that calls a layer in a way that calibration cannot repeat."""
        return InputError(
            f"{self._name}.{number}",
            got=got,
            need="decoder layers that run one after the other, each on the output of the one before",
            fix="use a weight-only scheme",
        )


@contextmanager
def replaced_forwards(layers: Sequence[torch.nn.Module], forward: Forward) -> Iterator[None]:
    """Within the block each layer runs `forward(number, own, ...)`, which gets its number and own forward."""
    before = [layer.__dict__.get("forward") for layer in layers]
    for number, layer in enumerate(layers):
        layer.forward = partial(forward, number, layer.forward)
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            del layer.forward
            if own is not None:
                layer.forward = own


def capture_layer_calls(
    model: torch.nn.Module,
    name: str,
    layers: torch.nn.ModuleList,
    batches: Sequence[torch.Tensor],
    hidden: HiddenStates,
) -> Recorder:
    """The calls of each layer by the model for each batch; the first layer's inputs go to `hidden`.

    `batches` are token ids (samples, tokens). The first layer must be loaded, the others need not. Raises
    InputError for a model that does not run its layers one after the other.
    """
    recorder = Recorder(name, layers, hidden)
    base = base_of(model)
    with replaced_forwards(list(layers), recorder.record):
        for ids in batches:
            recorder.begin()
            base(input_ids=ids, use_cache=False)
            for number, calls in enumerate(recorder.calls):
                if len(calls) != len(hidden):
                    raise recorder.unusual(number, "a layer that the forward does not call")
    return recorder


@contextmanager
def replayed_layers(layers: torch.nn.ModuleList, final: torch.Tensor, rest: Rest) -> Iterator[None]:
    """Within the block the layers need no weights: the last one returns the hidden states `final`."""

    def replay(number: int, forward: Forward, *args: object, **kwargs: object) -> object:
        given = args[0] if args else kwargs["hidden_states"]
        assert isinstance(given, torch.Tensor)
        return as_output(final if number == len(layers) - 1 else given, rest)

    with replaced_forwards(list(layers), replay):
        yield


def base_of(model: torch.nn.Module) -> torch.nn.Module:
    """The model without its head."""
    base = getattr(model, "base_model", model)
    assert isinstance(base, torch.nn.Module)
    return base
