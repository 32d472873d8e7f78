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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vexport.calibration.model import HiddenStates, joined
from vexport.errors import InputError
from vexport.observers.flatten import channel_extremes
from vexport.records import HeadRanges, KeyValueRanges
from vexport.rules import calibration as rules

# Number of recent tensors with which `Interner` compares a new tensor, to store equal tensors once.
RECENT_TENSORS = 16
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


def _loaded(value: object, device: torch.device) -> object:
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
    """Stores equal tensors once. Masks and positions are equal for all layers and most samples."""

    def __init__(self) -> None:
        self._recent = deque[torch.Tensor](maxlen=RECENT_TENSORS)

    def intern(self, value: object) -> object:
        """Return the value, with tensors replaced by equal tensors that were stored recently."""
        if type(value) is tuple:
            return tuple(map(self.intern, value))
        if not isinstance(value, torch.Tensor):
            return value
        for known in self._recent:
            if known is value or (known.dtype == value.dtype and torch.equal(known, value)):
                return known
        self._recent.appendleft(value)
        return value


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
        # Large tensors of the current batch, by their ids.
        self._large: dict[int, tuple[torch.Tensor, Stored]] = {}
        self.rest: OutputRest = None

    def begin(self, *, has_pictures: bool) -> None:
        """Prepare for a batch. Call this before each batch."""
        self._passed = None
        self._has_pictures = has_pictures
        self._large.clear()

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
        kept = {name: self._kept(value) for name, value in kwargs.items()}
        self.calls[number].append(LayerCall(tuple(map(self._kept, args)), kept, added))
        self._passed = torch.zeros_like(states) if self._has_pictures else states
        return layer_output(self._passed, self.rest)

    def _kept(self, value: object) -> object:
        interned = self._interner.intern(value)
        return self._moved(interned) if self._has_pictures else interned

    def _moved(self, value: object) -> object:
        """Return a value with its large tensors stored."""
        if type(value) is tuple:
            return tuple(map(self._moved, value))
        if not isinstance(value, torch.Tensor) or value.nbytes < LARGE_BYTES:
            return value
        if id(value) not in self._large:
            self._stored.append(value)
            self._large[id(value)] = value, Stored(self._stored, len(self._stored) - 1)
        return self._large[id(value)][1]

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
    return recorder


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


def head_ranges(states: torch.Tensor) -> HeadRanges:
    """Return the range of each head in states (batch, heads, tokens, head size)."""
    heads, size = states.shape[1], states.shape[3]
    low, high = channel_extremes(states.transpose(1, 2).reshape(-1, heads * size)).view(
        2, heads, size
    )
    low, high = torch.stack((low.amin(-1), high.amax(-1))).tolist()  # wait for a GPU only once
    return HeadRanges(low=tuple(low), high=tuple(high))


@contextmanager
def watch_attention(
    module: torch.nn.Module,
    prefix: str,
    stored_name: Callable[[str], str],
    seen: dict[str, KeyValueRanges],
    *,
    queries: bool = False,
) -> Iterator[None]:
    """Collect the head ranges of the attention layers below `module` in `seen`.

    Keys of `seen` are the layers' names in the checkpoint. If `queries` is set, the ranges of
    queries are collected, too.
    """
    names = {id(child): joined(prefix, name) for name, child in module.named_modules()}

    def observe(
        attend: AttentionFunction | None,
        attention: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = key.shape[0] * key.shape[2]
        key_value_ranges = KeyValueRanges(
            key=head_ranges(key),
            value=head_ranges(value),
            tokens=tokens,
            query=_query_ranges(attention, query, kwargs.get("scaling")) if queries else None,
            kind=type(attention).__name__ if queries else "",
        )
        name = stored_name(names[id(attention)])
        seen[name] = seen[name] + key_value_ranges if name in seen else key_value_ranges
        function: AttentionFunction = (
            attend or sys.modules[type(attention).__module__].eager_attention_forward
        )
        return function(attention, query, key, value, *args, **kwargs)

    # "eager" is not in the table: each model file of transformers defines an eager function.
    own: Mapping[str, AttentionFunction | None] = {**ALL_ATTENTION_FUNCTIONS, "eager": None}
    with replaced_attention({name: partial(observe, attend) for name, attend in own.items()}):
        yield


def _query_ranges(attention: torch.nn.Module, query: torch.Tensor, scaling: object) -> HeadRanges:
    """Return the range of each head of the queries that vLLM passes to its attention.

    Some models of transformers (OPT) multiply the queries by the layer's `scaling`, and pass 1.0 to
    the attention. vLLM's models pass the plain queries and the scaling.
    """
    own = getattr(attention, "scaling", scaling)
    ranges = head_ranges(query)
    if not isinstance(own, float) or not isinstance(scaling, float) or own in (0.0, scaling):
        return ranges
    low, high = ([each * scaling / own for each in side] for side in (ranges.low, ranges.high))
    return HeadRanges(low=tuple(low), high=tuple(high))


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
    """Return True if the device multiplies float32 faster than 16-bit floats.

    This is the case for x86 CPUs without fast bf16 instructions. AMX counts as fast. AVX-512
    BF16 counts as fast only on CPUs of other vendors than Intel.

    Measured on a Sapphire Rapids CPU whose hypervisor hides AMX (one thread, 512 tokens, 576 x
    1536): torch 2.13 multiplies bf16 at 84 GFLOPS and float32 at 154.
    """
    if device != "cpu" or not hasattr(torch.cpu, "get_capabilities"):  # torch is too old
        return False
    known = torch.cpu.get_capabilities()
    is_intel = "Intel" in str(known.get("cpu_name"))
    has_units = known.get("amx_bf16") or (known.get("avx512_bf16") and not is_intel)
    return known["architecture"] == "x86_64" and not has_units


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
