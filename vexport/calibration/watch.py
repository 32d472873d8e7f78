"""What calibration watches: inputs of linear layers, routing to experts, and what would be cached."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from vexport.calibration.attention import CachedStates, watching_attention
from vexport.calibration.capture import Forward, replaced_forwards
from vexport.calibration.experts.kinds import runner_of
from vexport.calibration.experts.layers import ExpertLayers
from vexport.calibration.extremes import Extremes
from vexport.calibration.model import joined
from vexport.calibration.weights import Weights
from vexport.formats.schemes import get_scheme
from vexport.observers import (
    Importance,
    MemorylessMinMaxObserver,
    MinMaxObserver,
    Observer,
    StaticMinMaxObserver,
    load_observer,
)
from vexport.types import LinearPlan, Plan, observer_names

DEFAULT_INPUT_OBSERVER = "static_minmax"
# Observers whose statistics follow from the extremes of an observation, and strategies that group channels.
OF_RANGES = (MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver)
OF_CHANNELS = ("tensor", "group", "tensor_group")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is watched, and the statistics so far.

    `inputs` and `importance` go by the name of the linear layer whose input they see; `layers` has the same
    layers by the stored tensor of their weight. `routed` counts tokens by module of experts and expert.
    With `all_experts` the experts' statistics see all tokens. `cached` is None where no KV cache is
    calibrated.
    """

    inputs: Mapping[str, Observer]
    importance: Mapping[str, Importance]
    layers: Mapping[str, tuple[LinearPlan, ...]]
    all_experts: bool = True
    routed: dict[str, torch.Tensor] = field(default_factory=dict)
    cached: dict[str, CachedStates] | None = None

    @contextmanager
    def watching(self, module: torch.nn.Module, prefix: str, weights: Weights) -> Iterator[Extremes]:
        """Within the block what is watched below `module`, named `prefix` in the model, is observed.

        `weights` tell which stored tensors a parameter is made of. What is yielded tells whether all inputs
        were finite. InputError for experts of a kind that cannot be observed.
        """
        extremes = Extremes()
        with ExitStack() as block:
            for name, child in module.named_modules():
                full = joined(prefix, name)
                layers = self.layers_of(weights.stored_as(f"{full}.weight"))
                if layers:
                    hook = self._linear_hook(layers, extremes)
                    block.callback(child.register_forward_pre_hook(hook).remove)
                forward = self._experts_forward(child, full, weights, extremes)
                if forward is not None:
                    block.enter_context(replaced_forwards([child], forward))
            if self.cached is not None:
                block.enter_context(watching_attention(module, prefix, weights.stored_name, self.cached))
            yield extremes

    def layers_of(self, stored: Sequence[Sequence[str]]) -> list[str]:
        """The watched layers whose weights are among these stored tensors."""
        return [layer.name for names in stored for name in names for layer in self.layers.get(name, ())]

    def see(self, layer: str, value: torch.Tensor, extremes: Extremes) -> None:
        """Take in the input of a layer (..., channels); an empty one changes nothing."""
        if not value.numel():
            return
        rows = extremes.of(value, layer)
        if layer in self.inputs:
            show(self.inputs[layer], value, rows)
        if layer in self.importance:
            self.importance[layer].add(value)

    def _experts_forward(
        self, module: torch.nn.Module, name: str, weights: Weights, extremes: Extremes
    ) -> Callable[[int, Forward], Forward] | None:
        """What stands in for the forward of a module of watched experts; None for any other module."""
        stacked = {
            own: weights.stored_as(f"{name}.{own}")
            for own, parameter in module.named_parameters(recurse=False)
            if parameter.dim() == 3
        }
        if not any(self.layers_of(stored) for stored in stacked.values()):
            return None
        run = runner_of(module, weights.stored_name(name))
        experts = ExpertLayers.of(module, stacked, self.layers)
        see = partial(self.see, extremes=extremes)
        return lambda _, own: experts.forward(
            partial(run, module, own, all_tokens=self.all_experts), see, self.routed
        )

    def _linear_hook(self, layers: Sequence[str], extremes: Extremes) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            for layer in layers:
                self.see(layer, inputs[0], extremes)

        return hook


def watched_by(plan: Plan, *, all_experts: bool = True) -> Watched:
    """What a plan needs: static input scales, weight searches by importance, the KV cache."""
    inputs = input_observers(plan)
    importance = {
        member.name: Importance.zeros(member.in_features)
        for group in plan.groups
        if group.observer in observer_names.BY_IMPORTANCE and group.rounding == "nearest"
        for member in group.members
    }
    layers: dict[str, tuple[LinearPlan, ...]] = {}
    for group in plan.groups:
        for member in group.members:
            if member.name in inputs or member.name in importance:
                layers[member.weight] = (*layers.get(member.weight, ()), member)
    return Watched(
        inputs=inputs,
        importance=importance,
        layers=layers,
        all_experts=all_experts,
        cached={} if plan.kv_cache else None,
    )


def input_observers(plan: Plan) -> dict[str, Observer]:
    """An observer for the input of every layer whose scheme has a static input scale, by layer name."""
    observers = {}
    for group in plan.groups:
        inputs = get_scheme(group.scheme).args.input_activations
        if inputs is not None and inputs.dynamic is not True:
            for member in group.members:
                name = group.input_observer or inputs.observer or DEFAULT_INPUT_OBSERVER
                observers[member.name] = load_observer(name, "input", inputs, group.input_observer_kwargs)
    return observers


def show(observer: Observer, value: torch.Tensor, rows: torch.Tensor) -> None:
    """Let an observer see an activation; one of ranges sees its extremes, which give the same range."""
    if type(observer) in OF_RANGES and observer.strategy in OF_CHANNELS:
        observer(rows)
        observer.tokens += value.numel() // value.shape[-1] - len(rows)
    else:
        observer(value)
