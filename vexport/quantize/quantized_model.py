"""Run a model in which some layers compute with dequantized weights and rounded inputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch

from vexport.calibration.capture import Forward, replaced_forwards
from vexport.calibration.inputs import ExpertPosition, expert_runner_of
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import as_tensor, read_tensor
from vexport.formats.dequantize import ct_scheme
from vexport.formats.input_rounding import InputRounding
from vexport.formats.packing.base import Array
from vexport.formats.plan import FusionGroup
from vexport.quantize.stream import static_scales
from vexport.records import CalibrationRecord, LinearPlan
from vexport.records.calibration import LayerRounding

# Rounds the inputs of a module.
Hook = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


@contextmanager
def rounded_experts(
    module: torch.nn.Module, hooks: Mapping[ExpertPosition, Hook]
) -> Iterator[None]:
    """Call these hooks on the inputs of experts inside the block.

    Inputs of experts with an unsupported class are not rounded.
    """
    runner = expert_runner_of(module)
    if runner is None:
        yield
        return

    def rounded(value: torch.Tensor, expert: int, *, is_down: bool) -> torch.Tensor:
        hook = hooks.get(ExpertPosition(expert=expert, is_down=is_down))
        return value if hook is None or not len(value) else hook(module, (value,))[0]

    def forward(number: int, own: Forward, *args: object, **kwargs: object) -> torch.Tensor:
        routed = runner.route_tokens(module, args, kwargs)
        answers = []
        for expert, route in enumerate(routed.routes):
            tokens = rounded(routed.tokens[route], expert, is_down=False)
            between = rounded(runner.down_input(module, expert, tokens), expert, is_down=True)
            answers.append(runner.down_output(module, expert, between))
        return runner.combine_outputs(routed, answers)

    with replaced_forwards([module], forward):
        yield


class QuantizedModel:
    """Replaces weights and rounds inputs in the model of a `LayerWalk`."""

    def __init__(self, walk: LayerWalk, calibration: CalibrationRecord) -> None:
        self.index = walk.index
        self.device = walk.device
        self.places = walk.places
        # Input statistics for static scales and searches, filled in as text reaches each layer.
        self._ranges = dict(calibration.ranges)
        self._importance = dict(calibration.importance)
        self.calibration = replace(calibration, ranges=self._ranges, importance=self._importance)
        self._model = walk.model
        self._weights = walk.weights
        self._roundings: dict[tuple[str, str], InputRounding] = {}

    @property
    def reader(self) -> Reader:
        """Return the reader of the walk that is running."""
        return self._weights.reader

    def record_statistics(self, layer: LayerRounding) -> None:
        """Record the input statistics of a layer, before its scales or importance are needed."""
        self._ranges.update(layer.ranges)
        self._importance.update(layer.importance)

    def weights_of(
        self, group: FusionGroup, stored: Mapping[str, Array]
    ) -> dict[LinearPlan, torch.Tensor]:
        """Return the weights (out, in) of a group's layers, dequantized by compressed-tensors.

        `stored` contains the bytes of the quantized tensors by name.
        """
        scheme = group.scheme
        weights: dict[LinearPlan, torch.Tensor] = {}
        for member in group.members:
            tensors = {
                spec.name.removeprefix(f"{member.name}."): as_tensor(stored[spec.name], spec).to(
                    self.device
                )
                for spec in scheme.layout(member, self.index.tensors[member.weight].dtype)
            }
            weights[member] = scheme.format.dequantize(scheme.args, tensors)
        return weights

    def _input_rounding(self, group: FusionGroup) -> InputRounding | None:
        args = ct_scheme(group.scheme.args).input_activations
        if args is None:
            return None
        key = (group.name, group.scheme.name)
        if key not in self._roundings:
            scales = static_scales(group, self.calibration)
            tensors = {
                name: torch.from_numpy(value).to(self.device) for name, value in scales.items()
            }
            self._roundings[key] = InputRounding(args, tensors)
        return self._roundings[key]

    def rounded_input(self, group: FusionGroup, value: torch.Tensor) -> torch.Tensor:
        """Return an input (..., in) of a group's layers as their scheme rounds it."""
        rounding = self._input_rounding(group)
        # compressed-tensors stores nothing on the module, so any module can be passed.
        return value if rounding is None else rounding.rounded(value, self._model)

    @contextmanager
    def apply_groups(
        self, groups: Sequence[FusionGroup], weights: Mapping[LinearPlan, torch.Tensor]
    ) -> Iterator[None]:
        """Inside the block, use these weights in the model and round the inputs of these groups."""
        with self.with_weights(weights), self.rounding_inputs(groups):
            yield

    @contextmanager
    def with_weights(self, weights: Mapping[LinearPlan, torch.Tensor]) -> Iterator[None]:
        """Use these weights in the model inside the block."""
        changed = self._weights.parameters_from(self._stored_tensors(weights))
        with ExitStack() as block:
            for name, value in changed.items():
                block.enter_context(_replaced(self._model, name, value))
            yield

    @contextmanager
    def rounding_inputs(self, groups: Sequence[FusionGroup]) -> Iterator[None]:
        """Round the inputs of these groups inside the block.

        Inputs of experts with an unsupported class are not rounded.
        """
        experts: dict[torch.nn.Module, dict[ExpertPosition, Hook]] = {}
        with ExitStack() as block:
            for group in groups:
                if group.scheme.args.input_activations is None:
                    continue
                hook = partial(self._round_input, group)
                for member in group.members:
                    module, place = self.places.linear(member), self.places.expert(member)
                    if module is not None:
                        block.callback(module.register_forward_pre_hook(hook).remove)
                    elif place is not None:
                        owner, layer = place
                        experts.setdefault(owner, {})[layer] = hook
            for owner, layers in experts.items():
                block.enter_context(rounded_experts(owner, layers))
            yield

    def _round_input(
        self, group: FusionGroup, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Round a module's input, in a forward pre-hook. Static scales must be known by then."""
        rounding = self._input_rounding(group)
        return inputs if rounding is None else rounding.hook(module, inputs)

    def _stored_tensors(
        self, weights: Mapping[LinearPlan, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for member, weight in weights.items():
            name, part = member.weight, member.part
            if part is None:
                tensors[name] = weight
                continue
            if name not in tensors:
                original = read_tensor(self.reader, self.index.tensors[name])
                tensors[name] = original.to(self.device, copy=True)
            expert = tensors[name].view(-1, *tensors[name].shape[-2:])[part.expert]
            (expert.T if part.transposed else expert)[part.start : part.stop] = weight
        return tensors


@contextmanager
def _replaced(model: torch.nn.Module, name: str, value: torch.Tensor) -> Iterator[None]:
    owner_name, _, parameter = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    before = getattr(owner, parameter)
    setattr(owner, parameter, torch.nn.Parameter(value, requires_grad=False))
    try:
        yield
    finally:
        setattr(owner, parameter, before)
