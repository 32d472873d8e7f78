"""Base class of observers, which collect statistics and compute quantization parameters."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import ClassVar, Literal, TypedDict

import torch

from vexport.numerics.ranks import gather, rank_and_size
from vexport.observers.flatten import WEIGHT, Tiles, layout_of, tiles_of, tokens_in
from vexport.observers.qparams import (
    ObserverArgs,
    global_scale_of,
    is_nvfp4,
    scale_and_zero_point,
    strategy_of,
    with_keywords,
)
from vexport.observers.search import Range, extremes_of, range_of, ranges_of_rows, scales_of_rows
from vexport.records.observer_names import Options, OptionValue, read_options

Reduction = Literal["extremes", "average"]
# Scale and zero point.
ScalePair = tuple[torch.Tensor, torch.Tensor]
# Strategies with scales that fused layers share.
SHARING_STRATEGIES = ("tensor_group", "tensor")


class QParamsDict(TypedDict):
    """Quantization parameters of an observed tensor.

    `scale` is float32 with a value per group, and `zero_point` is int32 with the same shape.
    `global_scale` is float32 with shape (1,), or None if the strategy has no global scale.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor
    global_scale: torch.Tensor | None


@dataclass(slots=True)
class Observation:
    """What an observer keeps of the tensors that it has observed.

    `weight` is a weight whose scales are computed when they are requested. Otherwise `low` and
    `high` are the range, with shape qparam_shape. `extremes` are kept for NVFP4 weights, because
    their global scale is computed several times.
    """

    weight: Tiles | None = None
    low: torch.Tensor | None = None
    high: torch.Tensor | None = None
    extremes: Range | None = None

    @property
    def range(self) -> Range | None:
        """The range, or None if it is not kept."""
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(slots=True)
class Fusion:
    """State that fused observers share.

    `extremes` maps each observer's place among the fused observers to its observed extremes, or to
    None before its first observation. `members` holds weak references to the observers, so that
    unused observers and their weights can be freed. Both are empty if an observer is not fused.
    """

    extremes: dict[int, Range | None] = field(default_factory=dict)
    members: "list[weakref.ref[RangeObserver]]" = field(default_factory=list)
    # Factor that reduces the global scale computed from the largest value.
    factor: float = 1.0
    # True if `factor` was chosen for the latest observations of all fused observers.
    is_fitted: bool = False

    @property
    def is_shared(self) -> bool:
        """True if several observers share a scale."""
        return len(self.extremes) > 1


class RangeObserver:
    """Base class of all observers.

    `base_name` names the observed tensor ("weight", "input", "output", "q", "k" or "v"). `args` are
    the quantization arguments of vexport or of compressed-tensors. Keywords come from
    `args.observer_kwargs` and `observer_kwargs`. If both set a keyword, `observer_kwargs` wins.
    Raises ValueError for an unknown name, strategy or keyword.

    A subclass overrides `find_range`, which returns the range of an observation, and `combine`,
    which merges this range with the earlier range. The ranges of weights are not combined: the last
    observation replaces the earlier ones.

    If a weight has a scale per channel, group or block, the observer only keeps a reference to the
    weight. It computes the scales tile by tile when quantization parameters are requested, which
    saves memory for large weights. NVFP4 scales are relative to the global scale that `fuse`
    shares.

    `vexport.observers.llmcompressor` adds the methods in llm-compressor's documents.
    """

    registry_name: ClassVar[str] = ""
    defaults: ClassVar[Options] = Options()
    # How ranks reduce the ranges of activations, or None if only the last observation counts.
    reduction: Reduction | None = None
    options: Options

    def __init__(self, base_name: str, args: ObserverArgs, **observer_kwargs: OptionValue) -> None:
        layout_of(base_name, args)  # raises ValueError for an unsupported pair
        self.base_name = base_name
        self.args = with_keywords(args, observer_kwargs)
        self.tokens = 0
        self.fusion = Fusion()
        self._place = 0
        self._seen = self._nothing_seen()
        self.configure(dict(self.args.observer_kwargs or {}))

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        """Read the keywords into `options`. Raises ValueError if a keyword is invalid."""
        self.options = read_options(self.defaults, keywords, f"observer {self.registry_name}")

    def _nothing_seen(self) -> Observation:
        return Observation()

    @property
    def strategy(self) -> str:
        """Strategy of the scales, by its compressed-tensors name."""
        return strategy_of(self.args)

    @property
    def has_statistics(self) -> bool:
        """True if at least one tensor was observed."""
        return self._seen.weight is not None or self._seen.range is not None

    @property
    def combines(self) -> bool:
        """True if the range of a tensor is combined with earlier ranges."""
        return self.base_name != WEIGHT

    @property
    def _keeps_weight(self) -> bool:
        """True if scales are computed from the weight, when they are requested."""
        has_many = self.strategy in ("channel", "group", "block") or is_nvfp4(self.args)
        return has_many and not self.combines

    @torch.no_grad()
    def observe(self, value: torch.Tensor) -> None:
        """Observe a tensor. Ignore an empty tensor."""
        if value.numel():
            self.tokens += tokens_in(value, self.base_name)
            self._see(tiles_of(value, self.base_name, self.args))

    def _see(self, tiles: Tiles) -> None:
        self.prepare(tiles)
        if self._keeps_weight:
            self._seen = self._nothing_seen()
            self._seen.weight = tiles
            self._seen.extremes = extremes_of(tiles) if is_nvfp4(self.args) else None
            self._share_new_extremes()
            return
        new, old = self.find_range(tiles), self._stored_range() if self.combines else None
        self._store_range(new if old is None else self.combine(old, new))

    def _stored_range(self) -> Range | None:
        return self._seen.range

    def _store_range(self, ends: Range) -> None:
        self._seen.low, self._seen.high = ends
        self._share_new_extremes()

    def prepare(self, tiles: Tiles) -> None:  # noqa: B027
        """Prepare the search for ranges, for example compute the importance of each column.

        This method is called before `find_range`. By default it does nothing.
        """

    def find_range(self, tiles: Tiles) -> Range:
        """Return the range of an observation: float32, shape qparam_shape."""
        return range_of(tiles)

    def combine(self, old: Range, new: Range) -> Range:
        """Combine the range of earlier activations with the range of new activations.

        By default, only the new range counts.
        """
        return new

    def weight_scales(self, tiles: Tiles, global_scale: torch.Tensor | None) -> ScalePair:
        """Return scale (float32) and zero point (int32) of each group of a weight.

        `global_scale` is the stored global scale. NVFP4 scales hold e4m3 values.
        """
        return scales_of_rows(ranges_of_rows(tiles), tiles, self.args, global_scale)

    def searched_weight(self) -> Tiles | None:
        """Return the weight from which scales are computed directly, or None if there is none."""
        return self._seen.weight

    @torch.no_grad()
    def range(self) -> Range:
        """Return the observed range (low, high): float32, shape qparam_shape.

        Raises ValueError if nothing was observed.
        """
        stored = self._stored_range()
        return self._observed_range() if stored is None else stored

    def _observed_range(self) -> Range:
        weight = self._seen.weight
        if weight is None:
            raise ValueError(
                f"{self.base_name} observer: got no observation, need one before its range is read"
            )
        return range_of(weight) if is_nvfp4(self.args) else self.find_range(weight)

    def extremes(self) -> Range:
        """Return the smallest and the largest observed value: float32 without dimensions.

        They are not finite if an observed value is not finite. If the observer averages or searches
        ranges during observation, the extremes of these ranges are returned instead. Raises
        ValueError if nothing was observed.
        """
        if self._seen.extremes is not None:
            return self._seen.extremes
        if self._seen.weight is not None:
            return extremes_of(self._seen.weight)
        low, high = self.range()
        return low.amin(), high.amax()

    def extremes_for_scales(self) -> Range:
        """Return the extremes for which fused inputs get this observer's scale or global scale."""
        return self.extremes()

    def global_scale(self) -> torch.Tensor | None:
        """Return the global scale that fused observers share: float32 (1,).

        Returns None if the strategy has no global scale.
        """
        if self.strategy != "tensor_group":
            return None
        return global_scale_of(*self._shared_extremes()) * self.fusion.factor

    @torch.no_grad()
    def qparams(self) -> QParamsDict:
        """Return scale, zero point and global scale. Raises ValueError if nothing was observed."""
        return self._qparams_relative_to(self.global_scale())

    def _qparams_relative_to(self, global_scale: torch.Tensor | None) -> QParamsDict:
        scale, zero_point = self.scales(global_scale)
        return QParamsDict(scale=scale, zero_point=zero_point, global_scale=global_scale)

    def scales(self, global_scale: torch.Tensor | None) -> ScalePair:
        """Return scale (float32) and zero point (int32) of the observations.

        `global_scale` is the stored global scale.
        """
        weight = self.searched_weight()
        if weight is not None:
            return self.weight_scales(weight, global_scale)
        low, high = self.range()
        if self.strategy == "tensor":
            low, high = (end.expand(low.shape) for end in self._shared_extremes())
        return scale_and_zero_point(low, high, self.args, global_scale)

    def reset(self) -> None:
        """Drop all observations, the token count and the fusion with other observers."""
        self._seen = self._nothing_seen()
        self.tokens = 0
        self.fusion.extremes.pop(self._place, None)
        self.fusion.members = [each for each in self.fusion.members if each() is not self]
        self.fusion = Fusion()

    def sync(self) -> None:
        """Reduce statistics and token counts over ranks, once, after the last observation.

        Every rank must call this method, even if the rank observed nothing. Without a process group
        nothing is reduced.
        """
        if rank_and_size()[1] > 1:
            self.reduce_over_ranks()

    def reduce_over_ranks(self) -> None:
        """Reduce statistics and token counts, for `sync`."""
        self.tokens = sum(gather(self.tokens))
        if self.reduction is not None and self.base_name != WEIGHT:
            self._reduce_range(self.reduction)

    def _reduce_range(self, reduction: Reduction) -> None:
        stored = self._stored_range()
        gathered = gather(None if stored is None else torch.stack(stored).cpu())
        of_ranks = [ends for ends in gathered if ends is not None]
        if not of_ranks:
            return
        ends = torch.stack(of_ranks)
        if reduction == "average":
            low, high = ends.to(torch.float32).mean(0).to(ends.dtype)
            self._store_range((low, high))
        else:
            self._store_range((ends[:, 0].amin(0), ends[:, 1].amax(0)))

    @staticmethod
    def fuse(observers: "Iterable[RangeObserver]") -> None:
        """Make observers share the scale that vLLM needs to be equal for their fused layers.

        Strategy tensor_group shares the global scale of the largest observed value. Strategy tensor
        shares the union of the ranges. Other strategies share nothing. Observers may be fused
        before or after they observe. Request quantization parameters only after all fused observers
        have observed a tensor.
        """
        members = list(observers)
        for strategy in SHARING_STRATEGIES:
            sharing = [observer for observer in members if observer.strategy == strategy]
            fusion = Fusion(
                dict.fromkeys(range(len(sharing))), [weakref.ref(each) for each in sharing]
            )
            for place, observer in enumerate(sharing):
                observer.fusion, observer._place = fusion, place
                observer._share_extremes()

    def fused(self) -> "list[RangeObserver]":
        """Return this observer and the observers that it is fused with, if they still exist."""
        members = [reference() for reference in self.fusion.members]
        return [member for member in members if member is not None] or [self]

    def _share_new_extremes(self) -> None:
        """Share the extremes of a new observation.

        A factor that was chosen for earlier observations is not valid for new observations.
        """
        self.fusion.factor, self.fusion.is_fitted = 1.0, False
        self._share_extremes()

    def _share_extremes(self) -> None:
        if self._place in self.fusion.extremes and self.has_statistics:
            self.fusion.extremes[self._place] = self.extremes()

    def _shared_extremes(self) -> Range:
        """Return the extremes of all fused observers, without dimensions.

        Raises ValueError if one of the observers has not observed anything yet.
        """
        if not self.fusion.is_shared:
            return self.extremes()
        for member in self.fused():
            # Its range may have been changed since it observed a tensor.
            member._share_extremes()
        extremes = self.fusion.extremes.values()
        observed = [ends for ends in extremes if ends is not None]
        if len(observed) < len(extremes):
            raise ValueError(
                f"fused observers: got observations of {len(observed)} of {len(extremes)}, "
                "need all before a shared scale is requested"
            )
        lows, highs = zip(*observed, strict=True)
        return reduce(torch.minimum, lows), reduce(torch.maximum, highs)
