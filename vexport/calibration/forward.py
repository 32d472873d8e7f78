"""The forward of calibration: one decoder layer in memory at a time, whatever the size of the model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from vexport.calibration.data import Samples
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_tensor
from vexport.errors import CheckpointFailed, InputError
from vexport.observers import Observer, load_observer
from vexport.schemes import get_scheme
from vexport.types import Calibration, InputRange, Plan

DEFAULT_INPUT_OBSERVER = "static_minmax"


@dataclass(slots=True)
class LayerCall:
    """How the model calls one decoder layer for one sample, besides the hidden states."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]


def calibrate(
    index: SourceIndex,
    plan: Plan,
    samples: Samples,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
    trust_remote_code: bool = False,
) -> Calibration:
    """Run the samples through the model and record the range of every input that a scheme needs.

    `on_layer(done, total)` reports progress. Raises CheckpointFailed where an input is not finite or a
    layer saw no token.
    """
    observers = input_observers(plan)
    model = build_on_meta(index.root, trust_remote_code=trust_remote_code)
    prefix, layers = decoder_layers(model)
    with Reader() as reader, torch.no_grad():
        load_parameters(model, "", index, reader, skip=prefix)
        hidden, calls = capture_layer_calls(model, layers, samples)
        for number, layer in enumerate(layers):
            name = f"{prefix}.{number}"
            load_parameters(layer, name, index, reader)
            with observing(layer, name, observers):
                for row, call in enumerate(calls[number]):
                    output = layer(hidden[row], *call.args, **call.kwargs)
                    hidden[row] = output[0] if isinstance(output, tuple) else output
                    require_finite(observers, name, samples.rows[row])
            layer.to("meta")
            on_layer(number + 1, len(layers))
    return Calibration(
        rows=samples.rows,
        digest=samples.digest,
        tokens=sum(len(ids) for ids in samples.token_ids),
        ranges={name: _input_range(name, observer) for name, observer in observers.items()},
    )


def input_observers(plan: Plan) -> dict[str, Observer]:
    """An observer for the input of every layer whose scheme has a static input scale, by layer name."""
    observers = {}
    for group in plan.groups:
        inputs = get_scheme(group.scheme).args.input_activations
        if inputs is not None and inputs.dynamic is not True:
            for member in group.members:
                name = inputs.observer or DEFAULT_INPUT_OBSERVER
                observers[member.name] = load_observer(name, "input", inputs)
    return observers


def build_on_meta(root: Path, *, trust_remote_code: bool) -> torch.nn.Module:
    """The model in eval mode and its own dtype: parameters on the meta device, buffers real."""
    config = transformers.AutoConfig.from_pretrained(root, trust_remote_code=trust_remote_code)
    with parameters_on_meta():
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=config.dtype or torch.bfloat16, trust_remote_code=trust_remote_code
        )
    return model.eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the block every parameter that a module registers goes to the meta device at once.

    Buffers stay real: rotary frequencies are computed by the constructor and stored in no checkpoint.
    """
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def decoder_layers(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """Name and list of the decoder layers: the list of modules that holds most parameters."""
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)
    }
    if not lists:
        raise InputError(
            type(model).__name__,
            got="no list of layers",
            need="a decoder-only model",
            fix="use a weight-only scheme",
        )
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in lists.items()}
    name = max(sizes, key=lambda key: sizes[key])
    return name, lists[name]


def load_parameters(
    module: torch.nn.Module, prefix: str, index: SourceIndex, reader: Reader, *, skip: str | None = None
) -> None:
    """Fill a module's parameters from the checkpoint, except those below the name `skip`.

    Parameters that the checkpoint does not have (a tied output head) stay on the meta device.
    """
    for owner_name, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            full = ".".join(part for part in (prefix, owner_name, name) if part)
            if (skip and full.startswith(f"{skip}.")) or full not in index.tensors:
                continue
            value = read_tensor(reader, index.tensors[full]).to(parameter.dtype, copy=True)
            setattr(owner, name, torch.nn.Parameter(value, requires_grad=False))


def capture_layer_calls(
    model: torch.nn.Module, layers: torch.nn.ModuleList, samples: Samples
) -> tuple[list[torch.Tensor], list[list[LayerCall]]]:
    """The first layer's input of each sample, and for each layer how it is called for each sample.

    The layers' forwards are replaced by ones that record and pass the hidden states through, so every
    layer gets the mask and the positions that the model makes for it, without tracing.
    """
    first_inputs: list[torch.Tensor] = []
    calls: list[list[LayerCall]] = [[] for _ in layers]
    base = getattr(model, "base_model", model)

    def recorder(number: int) -> Callable[..., torch.Tensor]:
        def record(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            if number == 0:
                first_inputs.append(hidden_states)
            calls[number].append(LayerCall(args, kwargs))
            return hidden_states

        return record

    for number, layer in enumerate(layers):
        layer.forward = recorder(number)
    try:
        for ids in samples.token_ids:
            base(input_ids=torch.tensor([ids]), use_cache=False)
    finally:
        for layer in layers:
            del layer.forward
    return first_inputs, calls


@contextmanager
def observing(layer: torch.nn.Module, prefix: str, observers: Mapping[str, Observer]) -> Iterator[None]:
    """Within the block the observers see the inputs of the layer's linear modules."""
    handles = []
    for name, module in layer.named_modules():
        observer = observers.get(f"{prefix}.{name}")
        if observer is not None:
            handles.append(module.register_forward_pre_hook(_observe_with(observer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _observe_with(observer: Observer) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        observer(inputs[0])

    return hook


def require_finite(observers: Mapping[str, Observer], prefix: str, row: int) -> None:
    """CheckpointFailed where an input of this layer became infinite or NaN, with the row that did it."""
    for name, observer in observers.items():
        if name.startswith(f"{prefix}.") and observer.has_statistics:
            low, high = observer.range()
            if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
                raise CheckpointFailed(
                    name,
                    got=f"an input that is not finite, from calibration row {row}",
                    need="finite activations",
                    fix="remove the row, or keep this layer unquantized",
                )


def _input_range(name: str, observer: Observer) -> InputRange:
    if not observer.has_statistics:
        raise CheckpointFailed(
            name,
            got="0 tokens in calibration",
            need="at least one for its static input scale",
            fix="add calibration samples that reach this layer, or choose a dynamic scheme",
        )
    low, high = observer.range()
    return InputRange(low=float(low.min()), high=float(high.max()), tokens=observer.tokens)
