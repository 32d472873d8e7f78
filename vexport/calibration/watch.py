"""What calibration watches: the inputs of linear layers, for static scales and for channel importance."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vexport.calibration.extremes import Extremes
from vexport.observers import (
    Importance,
    MemorylessMinMaxObserver,
    MinMaxObserver,
    Observer,
    StaticMinMaxObserver,
    load_observer,
)
from vexport.observers.importance import IMPORTANCE_OBSERVER
from vexport.schemes import get_scheme
from vexport.types import Plan

DEFAULT_INPUT_OBSERVER = "static_minmax"
# Observers whose statistics follow from the extremes of an observation, and strategies that group channels.
OF_RANGES = (MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver)
OF_CHANNELS = ("tensor", "group", "tensor_group")

Hook = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The observers of a plan by the name of the linear layer whose input they see."""

    inputs: Mapping[str, Observer]
    importance: Mapping[str, Importance]

    @property
    def names(self) -> frozenset[str]:
        """The layers that are watched."""
        return frozenset((*self.inputs, *self.importance))

    @contextmanager
    def watching(
        self, module: torch.nn.Module, prefix: str, stored_name: Callable[[str], str]
    ) -> Iterator[Extremes]:
        """Within the block the inputs below `module`, named `prefix`, are observed.

        `stored_name` turns a module's name into the checkpoint's, which the plan goes by. What is yielded
        tells whether all inputs were finite.
        """
        extremes = Extremes()
        handles = []
        for name, child in module.named_modules():
            full = stored_name(".".join(part for part in (prefix, name) if part))
            if full in self.names:
                hook = _hook(self.inputs.get(full), self.importance.get(full), extremes)
                handles.append(child.register_forward_pre_hook(hook))
        try:
            yield extremes
        finally:
            for handle in handles:
                handle.remove()


def watched_by(plan: Plan) -> Watched:
    """Observers for every static input scale and every weight search by importance of a plan."""
    searched = [group for group in plan.groups if group.observer == IMPORTANCE_OBSERVER]
    members = [member for group in searched for member in group.members]
    return Watched(
        inputs=input_observers(plan),
        importance={member.name: Importance.zeros(member.in_features) for member in members},
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


def _hook(observer: Observer | None, importance: Importance | None, extremes: Extremes) -> Hook:
    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        value = inputs[0]
        if not value.numel():
            return
        rows = extremes.of(value)
        if observer is not None:
            show(observer, value, rows)
        if importance is not None:
            importance.add(value)

    return hook


def show(observer: Observer, value: torch.Tensor, rows: torch.Tensor) -> None:
    """Let an observer see an activation; one of ranges sees its extremes, which give the same range."""
    if isinstance(observer, OF_RANGES) and observer.strategy in OF_CHANNELS:
        observer(rows)
        observer.tokens += value.numel() // value.shape[-1] - len(rows)
    else:
        observer(value)
