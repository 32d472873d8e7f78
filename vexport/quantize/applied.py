"""A model with some of its layers quantized: their weights as they are stored, their inputs rounded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs

from vexport.calibration.weights import Weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import as_tensor, read_tensor
from vexport.formats.dequantize import ct_scheme
from vexport.formats.input_rounding import round_activations, rounding_hook
from vexport.formats.packing.base import Array
from vexport.formats.schemes import get_scheme
from vexport.plan.blocks import group_layout
from vexport.quantize.stream import static_scales
from vexport.types import Calibration, FusionGroup, LinearPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayer:
    """A linear layer's weight (out, in) after quantization, and what rounds its inputs, if anything does."""

    member: LinearPlan
    weight: torch.Tensor
    round_inputs: Callable[..., object] | None


class QuantizedModel:
    """Puts quantized layers into the model of a checkpoint, whose `weights` fill it layer by layer."""

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
        self.index = index
        self.calibration = calibration
        self.reader = reader
        self._model = model
        self._weights = weights
        self._device = device

    def parameter_of(self, member: LinearPlan) -> str:
        """The name of the parameter that holds a layer's weight; empty where the model has none."""
        return next(iter(self._weights.parameters_of(member.weight)), "")

    def layers_of(self, group: FusionGroup, stored: Mapping[str, Array]) -> Iterator[QuantizedLayer]:
        """The layers of a group as compressed-tensors dequantizes its `stored` bytes, by tensor name."""
        layout = group_layout(group, self.index.tensors)
        tensors = {spec.name: as_tensor(stored[spec.name], spec).to(self._device) for spec in layout}
        scheme = get_scheme(group.scheme)
        rounding = self._input_rounding(group)
        for member in group.members:
            prefix = f"{member.name}."
            own = {
                key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
            }
            yield QuantizedLayer(
                member=member,
                weight=scheme.format.dequantize(scheme.args, own),
                round_inputs=rounding_hook(*rounding) if rounding else None,
            )

    def _input_rounding(self, group: FusionGroup) -> tuple[QuantizationArgs, dict[str, torch.Tensor]] | None:
        """Arguments and static scales by which a group's inputs are rounded; None where they are not."""
        args = ct_scheme(get_scheme(group.scheme).args).input_activations
        scales = static_scales(group, self.calibration)
        own = {name: torch.from_numpy(value).to(self._device) for name, value in scales.items()}
        return None if args is None else (args, own)

    def rounded_input(self, group: FusionGroup, value: torch.Tensor) -> torch.Tensor:
        """An input (..., in) of a group's layers as their scheme rounds it."""
        rounding = self._input_rounding(group)
        module = self.linear(group.members[0])
        assert module is not None
        return value if rounding is None else round_activations(value, *rounding, module)

    @contextmanager
    def rounding_inputs(self, groups: Sequence[FusionGroup]) -> Iterator[None]:
        """Within the block the layers of these groups round their inputs; their weights are the source's."""
        with ExitStack() as block:
            for group in groups:
                rounding = self._input_rounding(group)
                if rounding is None:
                    continue
                for member in group.members:
                    module = self.linear(member)
                    if module is not None:
                        hook = rounding_hook(*rounding)
                        block.callback(module.register_forward_pre_hook(hook).remove)
            yield

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
                module = self.linear(layer.member)
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
                original = read_tensor(self.reader, self.index.tensors[name])
                tensors[name] = original.to(self._device, copy=True)
            expert = tensors[name][part.expert]
            (expert.T if part.transposed else expert)[part.start : part.stop : part.step] = layer.weight
        return tensors

    def linear(self, member: LinearPlan) -> torch.nn.Module | None:
        """The module that multiplies by the layer's weight alone, if there is one."""
        if member.part is not None:
            return None
        name = self.parameter_of(member)
        module = self._model.get_submodule(name.rpartition(".")[0]) if name else None
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
