"""A model with some of its layers quantized: their weights as they are stored, their inputs rounded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from vexport.calibration.capture import Forward, replaced_forwards
from vexport.calibration.experts import arithmetic_of
from vexport.calibration.inputs import ExpertLayer, Places
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import as_tensor, read_tensor
from vexport.formats.dequantize import ct_scheme
from vexport.formats.input_rounding import InputRounding
from vexport.formats.packing.base import Array
from vexport.formats.schemes import get_scheme
from vexport.plan.blocks import group_layout
from vexport.quantize.stream import static_scales
from vexport.types import Calibration, FusionGroup, LinearPlan

# What rounds the inputs of a module.
Hook = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


@contextmanager
def rounded_experts(module: torch.nn.Module, hooks: Mapping[ExpertLayer, Hook]) -> Iterator[None]:
    """Within the block experts round what these hooks round; those of unknown arithmetic nothing."""
    arithmetic = arithmetic_of(module)
    if arithmetic is None:
        yield
        return

    def rounded(value: torch.Tensor, expert: int, *, is_down: bool) -> torch.Tensor:
        hook = hooks.get(ExpertLayer(expert=expert, is_down=is_down))
        return value if hook is None or not len(value) else hook(module, (value,))[0]

    def forward(number: int, own: Forward, *args: object, **kwargs: object) -> torch.Tensor:
        entered, answers = arithmetic.enter(module, args, kwargs), []
        for expert, route in enumerate(entered.routes):
            tokens = rounded(entered.tokens[route], expert, is_down=False)
            between = rounded(arithmetic.between(module, expert, tokens), expert, is_down=True)
            answers.append(arithmetic.down(module, expert, between))
        return arithmetic.leave(entered, answers)

    with replaced_forwards([module], forward):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayer:
    """A linear layer's weight (out, in) after quantization, and what rounds its inputs, if anything does."""

    member: LinearPlan
    weight: torch.Tensor
    round_inputs: Hook | None


class QuantizedModel:
    """Puts quantized layers into the model that a walk fills layer by layer."""

    def __init__(self, walk: LayerWalk, calibration: Calibration) -> None:
        self.index, self.calibration = walk.index, calibration
        self.device = walk.device
        self._model, self._weights = walk.model, walk.weights
        self._roundings: dict[tuple[str, str], InputRounding] = {}
        self.places = Places(walk.model, walk.weights)

    @property
    def reader(self) -> Reader:
        """That of the text which is on its way."""
        return self._weights.reader

    def layers_of(self, group: FusionGroup, stored: Mapping[str, Array]) -> Iterator[QuantizedLayer]:
        """The layers of a group as compressed-tensors dequantizes its `stored` bytes, by tensor name."""
        layout = group_layout(group, self.index.tensors)
        tensors = {spec.name: as_tensor(stored[spec.name], spec).to(self.device) for spec in layout}
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
                round_inputs=rounding.hook if rounding else None,
            )

    def _input_rounding(self, group: FusionGroup) -> InputRounding | None:
        """What rounds a group's inputs; None where they are not rounded."""
        args = ct_scheme(get_scheme(group.scheme).args).input_activations
        if args is None:
            return None
        key = (group.name, group.scheme)
        if key not in self._roundings:
            scales = static_scales(group, self.calibration)
            own = {name: torch.from_numpy(value).to(self.device) for name, value in scales.items()}
            self._roundings[key] = InputRounding(args, own)
        return self._roundings[key]

    def rounded_input(self, group: FusionGroup, value: torch.Tensor) -> torch.Tensor:
        """An input (..., in) of a group's layers as their scheme rounds it."""
        rounding = self._input_rounding(group)
        # compressed-tensors keeps nothing on the module that it is given.
        return value if rounding is None else rounding.rounded(value, self._model)

    @contextmanager
    def rounding_inputs(self, groups: Sequence[FusionGroup]) -> Iterator[None]:
        """Within the block the layers of these groups round their inputs; their weights are the source's."""
        with self._rounding(
            {
                member: partial(self._round_input, group)
                for group in groups
                if get_scheme(group.scheme).args.input_activations is not None
                for member in group.members
            }
        ):
            yield

    def _round_input(
        self, group: FusionGroup, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """A hook: its static scales need be known when text comes to it, not before."""
        rounding = self._input_rounding(group)
        return inputs if rounding is None else rounding.hook(module, inputs)

    @contextmanager
    def applied(self, layers: Sequence[QuantizedLayer]) -> Iterator[None]:
        """Within the block the model has these weights and rounds these inputs."""
        hooks = {layer.member: layer.round_inputs for layer in layers if layer.round_inputs is not None}
        with self.with_weights(layers), self._rounding(hooks):
            yield

    @contextmanager
    def with_weights(self, layers: Sequence[QuantizedLayer]) -> Iterator[None]:
        """Within the block the model has these weights."""
        changed = self._weights.parameters_from(self._stored(layers))
        with ExitStack() as block:
            for name, value in changed.items():
                block.enter_context(_replaced(self._model, name, value))
            yield

    @contextmanager
    def _rounding(self, hooks: Mapping[LinearPlan, Hook]) -> Iterator[None]:
        """Within the block these layers round their inputs; experts whose arithmetic is unknown do not."""
        experts: dict[torch.nn.Module, dict[ExpertLayer, Hook]] = {}
        with ExitStack() as block:
            for member, hook in hooks.items():
                module, found = self.places.linear(member), self.places.expert(member)
                if module is not None:
                    block.callback(module.register_forward_pre_hook(hook).remove)
                elif found is not None:
                    owner, layer = found
                    experts.setdefault(owner, {})[layer] = hook
            for owner, own in experts.items():
                block.enter_context(rounded_experts(owner, own))
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
                tensors[name] = original.to(self.device, copy=True)
            expert = tensors[name].view(-1, *tensors[name].shape[-2:])[part.expert]
            (expert.T if part.transposed else expert)[part.start : part.stop : part.step] = layer.weight
        return tensors


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
