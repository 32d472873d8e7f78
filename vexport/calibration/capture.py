"""Capture the calls of a model's decoder layers and of its attention, for any model class.

Keys and values are observed at the point where transformers passes them to the attention: keys
after rotary embedding, before they are repeated for the query heads. Multi-head latent attention
(DeepSeek) caches other tensors. vLLM reads no scales for these tensors, and the planner rejects
such scales.

On CPUs that multiply float32 faster than 16-bit floats, the products of 16-bit layers and of
attention are computed in float32.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import transformers
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vexport.calibration.model import HiddenStates, joined, read_flags
from vexport.errors import InputError
from vexport.numerics.cpu import bf16_units
from vexport.observers.flatten import channel_extremes
from vexport.records import HeadRanges, KeyValueRanges
from vexport.rules import calibration as rules

# Number of recent tensors with which `Interner` compares a new tensor, to store equal tensors once.
RECENT_TENSORS = 16
# New tensors are compared when they have this many bytes together, or after the last batch.
WAITING_BYTES = 1 << 26
# Tensors with at least this many bytes are stored like hidden states, for batches with pictures.
LARGE_BYTES = 1 << 16

Forward = Callable[..., object]
# The elements of a layer's output tuple after the hidden states. None if the layer returns only the
# hidden states, without a tuple.
OutputRest = tuple[object, ...] | None


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Arguments of a decoder layer for a batch, without the hidden states.

    `added` is what the model adds to the hidden states in front of the layer, as some models do for
    pictures (Qwen3-VL's deepstack).
    """

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    added: "Addition | None" = None

    def run(self, layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layer and return its new hidden states.

        The layer may return a tensor or a tuple.
        """
        if self.added is not None:
            hidden = self.added.to(hidden)
        args = (_loaded(value, hidden.device) for value in self.args)
        kwargs = {name: _loaded(value, hidden.device) for name, value in self.kwargs.items()}
        output = layer(hidden, *args, **kwargs)
        states = output[0] if isinstance(output, tuple) else output
        assert isinstance(states, torch.Tensor)
        return states


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that waits in `values` in the place `index`."""

    values: HiddenStates
    index: int

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the tensor on a device."""
        return self.values[self.index].to(device, non_blocking=True)


@dataclass(slots=True, eq=False)
class Kept:
    """An argument of layers: a tensor, or the equal or stored tensor that replaces it."""

    value: "torch.Tensor | Kept | Stored"


def _kind(value: object) -> object:
    """Return what equal tensors have in common, or None for a stored tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.shape, value.dtype, value.device


def _are_equal(value: object, other: object) -> torch.Tensor:
    """Return a Boolean tensor without dimensions: True if two tensors are equal."""
    assert isinstance(value, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    return (value == other).all()


def _loaded(value: object, device: torch.device) -> object:
    if isinstance(value, Kept):
        return _loaded(value.value, device)
    if isinstance(value, Stored):
        return value.on(device)
    return tuple(_loaded(item, device) for item in value) if type(value) is tuple else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Values that a model adds to the hidden states of some tokens of a batch."""

    tokens: torch.Tensor
    values: Stored

    @classmethod
    def of(cls, difference: torch.Tensor, values: HiddenStates) -> "Addition | None":
        """Store the tokens of a difference (1, tokens, channels) that are not zero in `values`."""
        tokens = difference[0].any(-1).nonzero()[:, 0]
        if not len(tokens):
            return None
        values.append(difference[:, tokens])
        return cls(tokens=tokens, values=Stored(values, len(values) - 1))

    def to(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states with the values added, as a copy."""
        added = hidden.clone()
        added[:, self.tokens] += self.values.on(hidden.device)
        return added


def layer_output(states: torch.Tensor, rest: OutputRest) -> object:
    """Return a layer's output: the hidden states, or a tuple that begins with them."""
    return states if rest is None else (states, *rest)


class Interner:
    """Stores equal tensors once. Masks and positions are equal for all layers and most samples.

    Tensors are compared later and many at a time, so that the host rarely waits for a GPU.
    """

    def __init__(self) -> None:
        self._recent = deque[Kept](maxlen=RECENT_TENSORS)
        # Tensors that were not compared yet, by their ids.
        self._waiting = dict[int, Kept]()
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Return True if the tensors that were not compared yet need much memory."""
        return self._bytes > WAITING_BYTES

    def intern(self, value: object) -> object:
        """Return the value, with its tensors in `Kept` objects."""
        if type(value) is tuple:
            return tuple(map(self.intern, value))
        if not isinstance(value, torch.Tensor):
            return value
        known = next((kept for kept in self._recent if kept.value is value), None)
        if known is None and id(value) not in self._waiting:
            self._waiting[id(value)] = Kept(value)
            self._bytes += value.nbytes
        return known or self._waiting[id(value)]

    def settle(self) -> list[Kept]:
        """Replace tensors by equal tensors, and return the `Kept` objects of the other tensors.

        For all tensors together, the host waits for a GPU as often as there are different tensors
        of the same shape. A shape is given up when a tensor equals no other tensor of its shape.
        """
        different = list[Kept]()
        groups = self._groups()
        while groups:
            references = [group.reference(different) for group in groups]
            flags = [
                _are_equal(reference.value, kept.value)
                for group, reference in zip(groups, references, strict=True)
                for kept in group.waiting
            ]
            equal = iter(read_flags(flags))
            for group, reference in zip(groups, references, strict=True):
                group.sort_out(reference, equal, different)
            groups = [group for group in groups if group.waiting]
        self._recent.extendleft(different)
        return different

    def _groups(self) -> list["_Alike"]:
        """Return the tensors that were not compared yet, by shape."""
        groups = dict[object, _Alike]()
        for kept in self._waiting.values():
            kind = _kind(kept.value)
            if kind not in groups:
                known = [other for other in self._recent if _kind(other.value) == kind]
                groups[kind] = _Alike(known=known)
            groups[kind].waiting.append(kept)
        self._waiting.clear()
        self._bytes = 0
        return list(groups.values())


@dataclass(slots=True, kw_only=True)
class _Alike:
    """Tensors of the same shape, dtype and device.

    Those in `waiting` are compared with those in `known`, and then with each other.
    """

    known: list[Kept]
    waiting: list[Kept] = field(default_factory=list)
    _is_new: bool = False

    def reference(self, different: list[Kept]) -> Kept:
        """Remove and return the tensor with which all others are compared next.

        It is appended to `different` if it was not known.
        """
        self._is_new = not self.known
        if not self._is_new:
            return self.known.pop(0)
        different.append(self.waiting.pop(0))
        return different[-1]

    def sort_out(self, reference: Kept, equal: Iterator[bool], different: list[Kept]) -> None:
        """Replace the tensors that equal the reference. `equal` yields a value for each."""
        unequal = list[Kept]()
        for kept in self.waiting:
            if next(equal):
                kept.value = reference
            else:
                unequal.append(kept)
        if self._is_new and len(unequal) == len(self.waiting):
            different += unequal
            unequal = []
        self.waiting = unequal


class Recorder:
    """Replaces the layers' forwards: records each call and passes the hidden states through.

    In the first batch, the first layer really runs, because its output is needed for `rest`: the
    elements of the output tuple after the hidden states.

    For a batch with pictures, zeros are passed instead of the hidden states. The input of the next
    layer is then exactly what the model adds between the layers. Masks and positions of such a
    batch equal no other batch's, so they are stored like hidden states.
    """

    def __init__(self, name: str, layers: torch.nn.ModuleList, hidden: HiddenStates) -> None:
        self.calls: list[list[LayerCall]] = [[] for _ in layers]
        self._name = name
        self._hidden = hidden
        self._interner = Interner()
        self._passed: object = None
        self._has_pictures = False
        self._stored = HiddenStates()
        self.rest: OutputRest = None

    def begin(self, *, has_pictures: bool) -> None:
        """Prepare for a batch. Call this before each batch."""
        if self._has_pictures or self._interner.is_full:
            self.settle()
        self._passed = None
        self._has_pictures = has_pictures

    def settle(self) -> None:
        """Store equal arguments of the recorded calls once. Call this after the last batch."""
        for kept in self._interner.settle():
            value = kept.value
            if (
                self._has_pictures
                and isinstance(value, torch.Tensor)
                and value.nbytes >= LARGE_BYTES
            ):
                self._stored.append(value)
                kept.value = Stored(self._stored, len(self._stored) - 1)

    def record(self, number: int, forward: Forward, *args: object, **kwargs: object) -> object:
        """Record a call of a layer, in place of the layer's forward."""
        states, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states", None), args)
        if not isinstance(states, torch.Tensor):
            raise self.unsupported_call_error(
                number, "a call without hidden states as its first argument"
            )
        if len(self.calls[number]) != len(self._hidden) - (number > 0):
            raise self.unsupported_call_error(
                number, "a layer that is not called once, in the order of the list"
            )
        added = None
        if number and self._has_pictures:
            added = Addition.of(states, self._stored)
        elif number and states is not self._passed:
            raise self.unsupported_call_error(
                number, "an input that is not the output of the previous layer"
            )
        if number == 0:
            if not len(self._hidden):
                output = forward(states, *args, **kwargs)
                self.rest = output[1:] if isinstance(output, tuple) else None
            self._hidden.append(states)
        intern = self._interner.intern
        kept = {name: intern(value) for name, value in kwargs.items()}
        self.calls[number].append(LayerCall(tuple(map(intern, args)), kept, added))
        self._passed = torch.zeros_like(states) if self._has_pictures else states
        return layer_output(self._passed, self.rest)

    def verify(self, number: int, forward: Forward, *args: object, **kwargs: object) -> object:
        """Check what the model adds between the layers, in place of a layer's forward.

        The layers pass hidden states again, which must give the recorded inputs.
        """
        states = args[0] if args else kwargs["hidden_states"]
        assert isinstance(states, torch.Tensor)
        if number:
            added = self.calls[number][-1].added
            assert isinstance(self._passed, torch.Tensor)
            expected = self._passed if added is None else added.to(self._passed)
            if not torch.equal(states, expected):
                raise self.unsupported_call_error(
                    number,
                    "an input that is not the sum of the previous layer's output and a tensor",
                )
        self._passed = states
        return layer_output(states.clone(), self.rest)

    def unsupported_call_error(self, number: int, got: str) -> InputError:
        """Return the error for a model whose layers calibration cannot run one after the other."""
        return InputError.of(rules.LAYER_ORDER, f"{self._name}.{number}", found=got)


@contextmanager
def replaced_forwards(layers: Sequence[torch.nn.Module], forward: Forward) -> Iterator[None]:
    """Replace the layers' forwards inside the block.

    Each layer runs `forward(number, original, ...)`, with its position in `layers` and its original
    forward.
    """
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
    model: transformers.PreTrainedModel,
    name: str,
    layers: torch.nn.ModuleList,
    batches: Iterable[tuple[torch.Tensor, Mapping[str, torch.Tensor]]],
    hidden: HiddenStates,
) -> Recorder:
    """Record the calls of each layer while the model runs each batch.

    The first layer's inputs are appended to `hidden`. `batches` are token ids (samples, tokens),
    and the model's other inputs for batches with pictures. The first layer must be loaded, the
    other layers need not be. Raises InputError if the model does not run its layers one after the
    other.
    """
    recorder = Recorder(name, layers, hidden)
    decoder_calls = list[tuple[tuple[object, ...], Mapping[str, object]]]()

    def keep_call(module: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        decoder_calls[:] = [(args, kwargs)]

    decoder = model.get_decoder()
    is_verified = False
    with replaced_forwards(list(layers), recorder.record), ExitStack() as block:
        block.callback(decoder.register_forward_pre_hook(keep_call, with_kwargs=True).remove)
        for ids, pictures in batches:
            recorder.begin(has_pictures=bool(pictures))
            with nullcontext() if pictures else single_sequences():
                model.base_model(input_ids=ids, use_cache=False, **pictures)
            for number, calls in enumerate(recorder.calls):
                if len(calls) != len(hidden):
                    raise recorder.unsupported_call_error(
                        number, "a layer that the forward does not call"
                    )
            if not is_verified and any(calls[-1].added for calls in recorder.calls):
                args, kwargs = decoder_calls[0]
                with replaced_forwards(list(layers), recorder.verify):
                    decoder(*args, **kwargs)
                is_verified = True
    recorder.settle()
    return recorder


@contextmanager
def single_sequences() -> Iterator[None]:
    """Let transformers build masks for rows with a single sequence each inside the block.

    Otherwise, transformers reads the positions of each row to find sequences that are packed into
    the row. The host would wait for a GPU.
    """
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


@contextmanager
def replayed_layers(
    layers: torch.nn.ModuleList, final: torch.Tensor, rest: OutputRest
) -> Iterator[None]:
    """Let the model run without its layers' weights inside the block.

    The last layer returns the hidden states `final`.
    """

    def replay(number: int, forward: Forward, *args: object, **kwargs: object) -> object:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        assert isinstance(hidden_states, torch.Tensor)
        return layer_output(final if number == len(layers) - 1 else hidden_states, rest)

    with replaced_forwards(list(layers), replay):
        yield


# An attention function of transformers. It returns outputs, and probabilities or None.
AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def head_ranges(states: torch.Tensor) -> torch.Tensor:
    """Return the range of each head in states (batch, heads, tokens, head size).

    The result (2, heads) has the minima and the maxima. The host does not wait for a GPU.
    """
    heads, size = states.shape[1], states.shape[3]
    low, high = channel_extremes(states.transpose(1, 2).reshape(-1, heads * size)).view(
        2, heads, size
    )
    return torch.stack((low.amin(-1), high.amax(-1)))


@dataclass(slots=True, kw_only=True)
class _SeenStates:
    """Head ranges of the states of an attention layer: keys, values, and queries if observed.

    Finished ranges of queries are multiplied by `multiplier` and divided by `divisor`.
    """

    ranges: list[torch.Tensor]
    tokens: int
    kind: str
    multiplier: float
    divisor: float

    def add(self, other: "_SeenStates") -> None:
        """Add the ranges of other rows."""
        self.tokens += other.tokens
        for own, more in zip(self.ranges, other.ranges, strict=True):
            own[0] = torch.minimum(own[0], more[0])
            own[1] = torch.maximum(own[1], more[1])

    def read(self) -> KeyValueRanges:
        """Return the ranges as numbers. The host waits for a GPU once."""
        lows, highs = torch.cat([each.to(torch.float32) for each in self.ranges], 1).tolist()
        read = list[HeadRanges]()
        for each in self.ranges:
            heads = each.shape[1]
            read.append(HeadRanges(low=tuple(lows[:heads]), high=tuple(highs[:heads])))
            lows, highs = lows[heads:], highs[heads:]
        key, value, *queries = read
        return KeyValueRanges(
            key=key,
            value=value,
            tokens=self.tokens,
            query=self._scaled(queries[0]) if queries else None,
            kind=self.kind,
        )

    def _scaled(self, ranges: HeadRanges) -> HeadRanges:
        low, high = (
            tuple(each * self.multiplier / self.divisor for each in side)
            for side in (ranges.low, ranges.high)
        )
        return HeadRanges(low=low, high=high)


@contextmanager
def watch_attention(
    module: torch.nn.Module,
    prefix: str,
    stored_name: Callable[[str], str],
    seen: dict[str, KeyValueRanges],
    *,
    queries: bool = False,
) -> Iterator[None]:
    """Add the head ranges of the attention layers below `module` to `seen` after the block.

    Keys of `seen` are the layers' names in the checkpoint. If `queries` is set, the ranges of
    queries are collected, too.
    """
    names = {id(child): joined(prefix, name) for name, child in module.named_modules()}
    found = dict[str, _SeenStates]()

    def observe(
        attend: AttentionFunction | None,
        attention: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        multiplier, divisor = query_scaling(attention, kwargs.get("scaling"))
        states = _SeenStates(
            ranges=[
                head_ranges(each) for each in ((key, value, query) if queries else (key, value))
            ],
            tokens=key.shape[0] * key.shape[2],
            kind=type(attention).__name__ if queries else "",
            multiplier=multiplier,
            divisor=divisor,
        )
        name = stored_name(names[id(attention)])
        if name in found:
            found[name].add(states)
        else:
            found[name] = states
        function: AttentionFunction = (
            attend or sys.modules[type(attention).__module__].eager_attention_forward
        )
        return function(attention, query, key, value, *args, **kwargs)

    # "eager" is not in the table: each model file of transformers defines an eager function.
    own: Mapping[str, AttentionFunction | None] = {**ALL_ATTENTION_FUNCTIONS, "eager": None}
    with replaced_attention({name: partial(observe, attend) for name, attend in own.items()}):
        yield
    for name, states in found.items():
        seen[name] = seen[name] + states.read() if name in seen else states.read()


def query_scaling(attention: torch.nn.Module, scaling: object) -> tuple[float, float]:
    """Return the factor and the divisor for the queries that vLLM passes to its attention.

    Some models of transformers (OPT) multiply the queries by the layer's `scaling`, and pass 1.0 to
    the attention. vLLM's models pass the plain queries and the scaling.
    """
    own = getattr(attention, "scaling", scaling)
    if not isinstance(own, float) or not isinstance(scaling, float) or own in (0.0, scaling):
        return 1.0, 1.0
    return scaling, own


@contextmanager
def replaced_attention(functions: Mapping[str, AttentionFunction]) -> Iterator[None]:
    """Register these attention functions in transformers under these names inside the block."""
    before = dict(ALL_ATTENTION_FUNCTIONS)
    for name, attend in functions.items():
        ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        yield
    finally:
        for name in functions:
            del ALL_ATTENTION_FUNCTIONS[name]
            if name in before and ALL_ATTENTION_FUNCTIONS[name] is not before[name]:
                ALL_ATTENTION_FUNCTIONS[name] = before[name]


WIDENED_DTYPES = (torch.bfloat16, torch.float16)


def prefers_float32(device: str) -> bool:
    """Return True if the device multiplies float32 faster than 16-bit floats."""
    return device == "cpu" and bf16_units() == "none"


@contextmanager
def float32_products(model: torch.nn.Module, device: str) -> Iterator[None]:
    """Compute 16-bit linear layers and attention in float32 inside the block, if that is faster.

    Linear layers accumulate in float32 in either case and round the sum once to their dtype, so
    only the order of the sum differs. Attention no longer rounds its probabilities.
    """
    if not prefers_float32(device):
        yield
        return
    linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
    attend = partial(_float32_attention, ALL_ATTENTION_FUNCTIONS["sdpa"])
    with (
        replaced_forwards(linears, partial(_float32_linear, linears)),
        replaced_attention({"sdpa": attend}),
    ):
        yield


def _float32_linear(
    linears: Sequence[torch.nn.Linear], number: int, forward: Forward, value: torch.Tensor
) -> object:
    module = linears[number]
    if value.dtype not in WIDENED_DTYPES or module.weight.dtype != value.dtype:
        return forward(value)
    bias = None if module.bias is None else module.bias.to(torch.float32)
    output = torch.nn.functional.linear(
        value.to(torch.float32), module.weight.to(torch.float32), bias
    )
    return output.to(value.dtype)


# Rows of an output head that are converted to float32 at a time.
HEAD_ROWS = 1 << 13


@contextmanager
def float32_head_gradient(head: torch.nn.Module | None, device: str) -> Iterator[None]:
    """Compute the gradient of a 16-bit output head in float32 inside the block, if that is faster.

    The head's output does not change. The gradient of its input is a sum over the vocabulary. On
    CPUs without units for 16-bit products, torch reads the weight column by column for this sum.
    With 49,152 x 576 bf16 values the gradient took 40 times as long as the output. Both torch and
    this function accumulate in float32 and round the sum once, so only the order of the sum
    differs.
    """
    if not prefers_float32(device) or type(head) is not torch.nn.Linear:
        yield
        return
    with replaced_forwards([head], partial(_float32_head, head)):
        yield


def _float32_head(
    head: torch.nn.Linear, number: int, forward: Forward, value: torch.Tensor
) -> object:
    if value.dtype not in WIDENED_DTYPES or head.weight.dtype != value.dtype:
        return forward(value)
    return _HeadProduct.apply(value, head.weight, head.bias)  # type: ignore[no-untyped-call]


class _HeadProduct(torch.autograd.Function):
    """Multiplies the input of an output head by its weight. Only the input gets a gradient."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        value: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return torch.nn.functional.linear(value, weight, bias)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        total = torch.zeros(*gradient.shape[:-1], weight.shape[1])
        gradients = torch.split(gradient, HEAD_ROWS, dim=-1)
        weights = torch.split(weight, HEAD_ROWS)
        for gradient_part, weight_part in zip(gradients, weights, strict=True):
            total += gradient_part.to(torch.float32) @ weight_part.to(torch.float32)
        return total.to(gradient.dtype), None, None


def _float32_attention(
    attend: AttentionFunction,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype = query.dtype
    if dtype not in WIDENED_DTYPES or not dtype == key.dtype == value.dtype:
        return attend(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None and attention_mask.dtype == dtype:
        attention_mask = attention_mask.to(torch.float32)
    states = (tensor.to(torch.float32) for tensor in (query, key, value))
    output, weights = attend(module, *states, attention_mask, **kwargs)
    return output.to(dtype), weights
