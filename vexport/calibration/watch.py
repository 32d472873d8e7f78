"""What calibration watches: the inputs of linear layers, for static scales and for channel importance."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vexport.calibration.finite import is_finite
from vexport.observers import Importance, Observer, load_observer
from vexport.schemes import get_scheme
from vexport.types import Plan

DEFAULT_INPUT_OBSERVER = "static_minmax"
# The weight observer that asks for the importance of input channels.
IMPORTANCE_OBSERVER = "imatrix_mse"

Hook = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The observers of a plan by the name of the linear layer whose input they see."""

    inputs: Mapping[str, Observer]
    importance: Mapping[str, Importance]

    @property
    def names(self) -> tuple[str, ...]:
        """The layers that are watched, in plan order."""
        return tuple(dict.fromkeys((*self.inputs, *self.importance)))

    @contextmanager
    def watching(
        self, module: torch.nn.Module, prefix: str, stored_name: Callable[[str], str]
    ) -> Iterator["Watched"]:
        """Within the block the inputs below `module`, named `prefix`, are observed; yields that part.

        `stored_name` turns a module's name into the checkpoint's, which the plan goes by.
        """
        found, handles = [], []
        for name, child in module.named_modules():
            full = stored_name(".".join(part for part in (prefix, name) if part))
            hooks = self._hooks(full)
            found += [full] * bool(hooks)
            handles += [child.register_forward_pre_hook(hook) for hook in hooks]
        try:
            yield self._part(found)
        finally:
            for handle in handles:
                handle.remove()

    def is_finite(self) -> bool:
        """Whether every value seen so far was finite."""
        ranges = [observer.range() for observer in self.inputs.values() if observer.has_statistics]
        totals = [gathered.total for gathered in self.importance.values()]
        values = [side.flatten().to(torch.float64) for low_high in ranges for side in low_high]
        return is_finite(torch.cat([*values, *totals])) if values or totals else True

    def _hooks(self, name: str) -> list[Hook]:
        hooks = []
        if name in self.inputs:
            hooks.append(_hook(self.inputs[name]))
        if name in self.importance:
            hooks.append(_hook(self.importance[name].add))
        return hooks

    def _part(self, names: list[str]) -> "Watched":
        return Watched(
            inputs={name: self.inputs[name] for name in names if name in self.inputs},
            importance={name: self.importance[name] for name in names if name in self.importance},
        )


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


def _hook(observe: Callable[[torch.Tensor], object]) -> Hook:
    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        observe(inputs[0])

    return hook
