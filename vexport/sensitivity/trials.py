"""One layer group quantized while all else stays: its weights as they would be stored, its inputs rounded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from vexport.calibration.weights import Weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import as_tensor, read_tensor
from vexport.engine.reference import rounding_hook
from vexport.formats.dequantize import ct_scheme
from vexport.formats.schemes import get_scheme
from vexport.plan.blocks import group_layout
from vexport.quantize.stream import quantized_group, static_scales
from vexport.quantize.weight_scales import search_scales
from vexport.sensitivity.layer_groups import Option
from vexport.types import Calibration, FusionGroup, LinearPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """A layer group in one scheme."""

    unit: str
    option: Option


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayer:
    """A linear layer's weight (out, in) after quantization, and what rounds its inputs, if anything does."""

    member: LinearPlan
    weight: torch.Tensor
    round_inputs: Callable[..., object] | None


class Quantizer:
    """Makes trials of a checkpoint and puts them into its model."""

    def __init__(
        self,
        index: SourceIndex,
        calibration: Calibration,
        reader: Reader,
        model: torch.nn.Module,
        weights: Weights,
        *,
        device: str,
    ) -> None:
        self._index = index
        self._calibration = calibration
        self._reader = reader
        self._model = model
        self._weights = weights
        self._device = device

    def place(self, trial: Trial) -> str:
        """The name of a parameter that the trial changes; empty where the model has none of them."""
        first = trial.option.groups[0].members[0]
        names = self._weights.parameters_of(first.weight)
        return names[0] if names else ""

    def layers_of(self, trial: Trial) -> tuple[QuantizedLayer, ...]:
        """The trial's layers as compressed-tensors dequantizes what would be stored.

        Raises InputError where a weight is not finite.
        """
        return tuple(layer for group in trial.option.groups for layer in self._group(group))

    def _group(self, group: FusionGroup) -> Iterator[QuantizedLayer]:
        written = quantized_group(group, self._index, self._calibration, self._reader, search=search_scales)
        layout = group_layout(group, self._index.tensors)
        stored = {spec.name: as_tensor(written[spec.name], spec).to(self._device) for spec in layout}
        scheme = get_scheme(group.scheme)
        inputs = scheme.args.input_activations
        scales = {
            name: torch.from_numpy(value).to(self._device)
            for name, value in static_scales(group, self._calibration).items()
        }
        for member in group.members:
            prefix = f"{member.name}."
            own = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
            args = ct_scheme(scheme.args).input_activations
            yield QuantizedLayer(
                member=member,
                weight=scheme.format.dequantize(scheme.args, own),
                round_inputs=rounding_hook(args, scales) if inputs is not None and args is not None else None,
            )

    @contextmanager
    def applied(self, layers: Sequence[QuantizedLayer]) -> Iterator[None]:
        """Within the block the model has these weights and rounds these inputs.

        Inputs of routed experts are not rounded: transformers runs all experts of a layer in one module.
        """
        changed = self._weights.parameters_from(self._stored(layers))
        with ExitStack() as block:
            for name, value in changed.items():
                block.enter_context(_replaced(self._model, name, value))
            for layer in layers:
                module = self._linear(layer.member)
                if layer.round_inputs is not None and module is not None:
                    handle = module.register_forward_pre_hook(layer.round_inputs)
                    block.callback(handle.remove)
            yield

    def _stored(self, layers: Sequence[QuantizedLayer]) -> Mapping[str, torch.Tensor]:
        """The checkpoint's tensors with these weights in them."""
        tensors: dict[str, torch.Tensor] = {}
        for layer in layers:
            name, part = layer.member.weight, layer.member.part
            if part is None:
                tensors[name] = layer.weight
                continue
            if name not in tensors:
                original = read_tensor(self._reader, self._index.tensors[name])
                tensors[name] = original.to(self._device, copy=True)
            expert = tensors[name][part.expert]
            (expert.T if part.transposed else expert)[part.start : part.stop : part.step] = layer.weight
        return tensors

    def _linear(self, member: LinearPlan) -> torch.nn.Module | None:
        """The module that multiplies by the layer's weight alone, if there is one."""
        if member.part is not None:
            return None
        names = self._weights.parameters_of(member.weight)
        module = self._model.get_submodule(names[0].rpartition(".")[0]) if names else None
        return module if isinstance(module, torch.nn.Linear) else None


@contextmanager
def _replaced(model: torch.nn.Module, name: str, value: torch.Tensor) -> Iterator[None]:
    """Within the block a parameter has another value."""
    owner_name, _, parameter = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    before = getattr(owner, parameter)
    setattr(owner, parameter, torch.nn.Parameter(value, requires_grad=False))
    try:
        yield
    finally:
        setattr(owner, parameter, before)
