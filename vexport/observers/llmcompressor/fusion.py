"""Fuse the weight observers of a model's layers that vLLM runs as one layer."""

from typing import Any

import torch

from vexport.architectures import (
    USUAL_EXPERTS,
    USUAL_FUSED,
    Architecture,
    architecture_table,
    resolve,
    version_with,
)
from vexport.architectures.fusion import fuse
from vexport.observers.base import SHARING_STRATEGIES
from vexport.observers.llmcompressor.observer import Observer


def fuse_weight_observers(model: torch.nn.Module) -> None:
    """Fuse the `weight_observer`s of layers that vLLM runs as one (see `Observer.fuse`).

    The class of the model determines which layers vLLM fuses. If vLLM does not have this class, for
    example for a part of a model, the layers that nearly all classes fuse are assumed. Raises
    ValueError if only some of the layers that share a scale have an observer, or if their
    strategies differ.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or _observer_of(module) is not None
    }
    for layer in fuse(modules, architecture_of(model)):
        observers = {member: _observer_of(modules[member]) for member in layer.members}
        strategies = {observer and observer.strategy for observer in observers.values()}
        if not strategies & set(SHARING_STRATEGIES):
            continue
        if len(strategies) > 1:
            kinds = ", ".join(
                f"{member} {each.strategy if each else 'none'}"
                for member, each in observers.items()
            )
            raise ValueError(
                f"{layer.name}: got observers with strategies {kinds}, need the same strategy, "
                "because vLLM runs these layers as one layer"
            )
        Observer.fuse(observer for observer in observers.values() if observer is not None)


def architecture_of(model: torch.nn.Module) -> Architecture:
    """Return the table entry of a model's class, or an entry with the usual fused layers."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    config: dict[str, Any] = to_dict()
    for name in (*(config.get("architectures") or ()), type(model).__name__):
        if name in architecture_table(version_with(name)).architectures:
            return resolve(name, config)[0]
    return Architecture(fused=USUAL_FUSED, experts=USUAL_EXPERTS)


def _observer_of(module: torch.nn.Module) -> Observer | None:
    observer = getattr(module, "weight_observer", None)
    return observer if isinstance(observer, Observer) else None
