"""vexport's observers with the methods in llm-compressor's documents."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from vexport.observers import imatrix, minmax, mse
from vexport.observers.flatten import tiles_of_observations
from vexport.observers.imatrix import Importance
from vexport.observers.llmcompressor.observer import Observer
from vexport.observers.llmcompressor.older import (
    call_for_pair,
    flatten_dimensions,
    implied_range,
)
from vexport.observers.qparams import is_nvfp4
from vexport.observers.search import Range
from vexport.records import observer_names
from vexport.records.observer_names import OptionValue

# llm-compressor's names for the attributes of a module with the sums of importance and the number
# of tokens.
MODULE_SUM_NAMES = ("_imatrix_sum", "_imatrix_count")


class _Option:
    """A field of `options`, as an attribute that subclasses may change."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, observer: Observer, owner: type) -> Any:
        return getattr(observer.options, self._name)

    def __set__(self, observer: Observer, value: OptionValue) -> None:
        observer.options = replace(observer.options, **{self._name: value})


class MemorylessMinMaxObserver(Observer, minmax.MemorylessMinMax):
    """Range of the last observed tensor."""


class StaticMinMaxObserver(Observer, minmax.StaticMinMax):
    """Running minimum and maximum over all observed tensors."""


class MinMaxObserver(Observer, minmax.MinMax):
    """Moving average of minimum and maximum."""

    averaging_constant = _Option()
    avg_constant = _Option("averaging_constant")


class MemorylessMSEObserver(Observer, mse.MemorylessMSE):
    """Range with the smallest quantization error for the last tensor."""

    maxshrink = _Option()
    patience = _Option()
    grid = _Option()
    norm = _Option()
    expand = _Option()

    def calculate_mse_min_max(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> Range:
        """Return a tensor's range with the smallest error. Dimensions in `reduce_dims` get size 1.

        For NVFP4 with a global scale, return the range that yields the best block scale.
        """
        flat, shape = flatten_dimensions(observed, reduce_dims)
        tiles = tiles_of_observations(flat)
        self.prepare(tiles)
        if global_scale is not None and is_nvfp4(self.args):
            scales = self.weight_scales(tiles, global_scale)
            low, high = implied_range(scales, self.args, global_scale)
        else:
            low, high = self.find_range(tiles)
        return low.reshape(shape), high.reshape(shape)

    def _new_range(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None,
        global_scale: torch.Tensor | None,
    ) -> Range:
        given = {"reduce_dims": reduce_dims, "global_scale": global_scale}
        return call_for_pair(self.calculate_mse_min_max, observed, given)


class MovingAverageMSEObserver(MemorylessMSEObserver, mse.MovingAverageMSE):
    """Moving average of the ranges with the smallest quantization error."""

    averaging_constant = _Option()
    avg_constant = _Option("averaging_constant")


class NVFP4ExpandedMSEObserver(MemorylessMSEObserver, mse.NVFP4ExpandedMSE):
    """NVFP4 search by error between 1.8 and 0.8 times the range."""


class IMatrixMSEObserver(MemorylessMSEObserver, imatrix.IMatrixMSE):
    """Smallest quantization error, weighted by the mean square of each input channel.

    `attach(module)` starts collecting importance from the module's inputs, and `detach(module)`
    stops it. Run the module in between, before the weight is observed. `gathered` may also be set
    to importance from another place.
    """

    strict = _Option()
    _hook: RemovableHandle | None = None

    def attach(self, module: torch.nn.Module) -> None:
        """Collect importance from the inputs of a module with `in_features`; ignore other modules.

        If an earlier observer has stored sums on the module, use these sums and collect nothing.
        """
        self._stop()
        channels = getattr(module, "in_features", None)
        if not isinstance(channels, int):
            return
        total, tokens = (getattr(module, name, None) for name in MODULE_SUM_NAMES)
        if isinstance(total, torch.Tensor) and tokens is not None and int(tokens):
            self.gathered = Importance(total.to(torch.float64), int(tokens))
            return
        gathered = Importance.zeros(channels)
        self.gathered = gathered

        def gather(module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
            first = inputs[0] if inputs else None
            first = first[0] if isinstance(first, tuple) and first else first
            if isinstance(first, torch.Tensor):
                gathered.add(Importance.of(first))

        self._hook = module.register_forward_pre_hook(gather)

    def detach(self, module: torch.nn.Module) -> None:
        """Stop collecting, and store the sums on the module. The observer keeps the importance.

        The sums have llm-compressor's names: `_imatrix_sum` (in_features,), and `_imatrix_count`
        for the number of tokens.
        """
        was_gathering = self._hook is not None
        self._stop()
        if was_gathering and self.gathered is not None and self.gathered.tokens:
            for name, value in zip(
                MODULE_SUM_NAMES,
                (self.gathered.total, torch.tensor(self.gathered.tokens)),
                strict=True,
            ):
                setattr(module, name, value)

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def relative_importance(self, channels: int) -> torch.Tensor | None:
        """Return the importance of each column, in the order of the columns' groups."""
        relative, order = super().relative_importance(channels), self._order
        return relative if relative is None or order is None else relative.to(order.device)[order]

    def reduce_over_ranks(self) -> None:
        super().reduce_over_ranks()
        if self.gathered is not None:
            self.gathered.all_reduce()


class NVFP4ExpandedIMatrixObserver(IMatrixMSEObserver, imatrix.NVFP4ExpandedIMatrix):
    """NVFP4 search by importance between 1.5 and 0.5 times the range."""


# vexport's observers by name.
OBSERVERS: Mapping[str, type[Observer]] = {
    name: globals()[known.kind] for name, known in observer_names.OBSERVERS.items()
}
for _name, _kind in OBSERVERS.items():
    Observer.register_value(_kind, _name, observer_names.OBSERVERS[_name].aliases)
