"""Base class of observers that follow llm-compressor's documents, newer or older."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import distributed

from vexport.numerics.ranks import gather
from vexport.observers.base import (
    Fusion,
    Observation,
    QParamsDict,
    RangeObserver,
    Reduction,
    ScalePair,
)
from vexport.observers.flatten import (
    WEIGHT,
    Tiles,
    flatten_for_calibration,
    tiles_of,
    tiles_of_observations,
    tokens_in,
)
from vexport.observers.llmcompressor import older
from vexport.observers.llmcompressor.bases import InternalModule
from vexport.observers.llmcompressor.registration import RegisteredObserver
from vexport.observers.qparams import (
    ObserverArgs,
    global_scale_of,
    is_nvfp4,
    scale_and_zero_point,
)
from vexport.observers.search import Range
from vexport.records.observer_names import OptionValue

# Method that computes the scales of a tensor, given its `g_idx` and global scale.
Scales = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], ScalePair]
# Attributes that hold the statistics of an observer.
ENDS = ("min_vals", "max_vals")


@dataclass(slots=True)
class Seen(Observation):
    """Last observation of an observer whose range and scales subclasses may change.

    `low` and `high` are `min_vals` and `max_vals`.
    """

    # Copy of the range that vexport stored in `low` and `high`.
    found: Range | None = None
    # Shape of the scales, if a subclass sets the range.
    shape: tuple[int, ...] | None = None
    # Global scale from an older method.
    global_scale: torch.Tensor | None = None
    # Observed weight and its `g_idx`, if an older method or `forward` computes the scales.
    pending: "tuple[Scales, torch.Tensor, torch.Tensor | None] | None" = None
    # Scales from an older method or `forward`, if they need no global scale.
    pair: ScalePair | None = None

    @property
    def is_changed(self) -> bool:
        """True if `low` or `high` is not the range that vexport stored.

        A subclass or a caller has then set the range, or changed it in place. The scales follow
        from the range, and not from the weight or from an older method.
        """
        ends = zip((self.low, self.high), self.found or (None, None), strict=True)
        return any(end is not None and not older.is_same(end, own) for end, own in ends)


class Observer(InternalModule, RegisteredObserver, RangeObserver):
    """Observer with the methods in llm-compressor's documents, to be called or overridden.

    An observer can be unpacked: `scale, zero_point = observer(value)`.

    `min_vals` and `max_vals` hold the statistics. Scales, the range, the extremes and the global
    scale are computed from them after a subclass or a caller has changed them. vexport's scales
    are computed directly from the weight only while both attributes are as vexport found them.

    A subclass may override `update_statistics_from_observed`, as in llm-compressor. Such a subclass
    sets `min_vals` and `max_vals` itself, or calls `super()` and changes them. It accepts any
    keyword unless it defines `defaults`. It reads its keywords from `self.args.observer_kwargs`.

    A subclass written for llm-compressor's older documentation overrides `calculate_qparams` or
    another method that returns scales (see `older.py`). Raises ValueError if a subclass overrides a
    method that is never called.

    `Observer(quantization_args=args)` is the call in llm-compressor's older documentation. It
    creates an observer of a weight. If this observer observes several tensors, it passes their
    ranges to `combine`, except for NVFP4. Its `get_qparams()` returns a scale and a zero point
    instead of a dictionary.
    """

    _seen: Seen

    def __init__(
        self,
        base_name: str | ObserverArgs | None = None,
        args: ObserverArgs | None = None,
        *,
        quantization_args: ObserverArgs | None = None,
        **observer_kwargs: OptionValue,
    ) -> None:
        # `create` presets the base name if the class's constructor has no `base_name` parameter.
        preset = vars(self).get("base_name")
        super().__init__()
        name, arguments = _constructor_arguments(base_name, args, quantization_args)
        # An older constructor call names no tensor. The observer then combines the observations of
        # a weight, and `get_qparams` returns a pair (scale, zero point).
        self._is_older = name is None
        older.require_used_overrides(type(self))
        self._overrides = older.overridden_older_methods(type(self))
        if self._overrides and self.reduction is None:
            self.reduction = "extremes"
        # Ranges that `calculate_updated_min_max` has returned, by tensor id.
        self.min_val: dict[Hashable, torch.Tensor] = {}
        self.max_val: dict[Hashable, torch.Tensor] = {}
        # Order that sorts the weight's columns by group, if `g_idx` was given.
        self._order: torch.Tensor | None = None
        # Last result that a subclass's `forward` got from `super()`.
        self._super_answer: object = None
        RangeObserver.__init__(self, name or preset or WEIGHT, arguments, **observer_kwargs)
        self.quantization_args = self.args

    @classmethod
    def create(
        cls, base_name: str, args: ObserverArgs, keywords: Mapping[str, OptionValue]
    ) -> Self:
        """Return a new observer, even if its constructor takes only `quantization_args`."""
        if not older.is_older_constructor(cls):
            return cls(base_name, args, **keywords)  # type: ignore[arg-type]
        observer = cls.__new__(cls)
        vars(observer)["base_name"] = base_name
        own = {**(args.observer_kwargs or {}), **keywords}
        try:
            observer.__init__(quantization_args=args, **own)  # type: ignore[misc]
        except TypeError as error:
            raise ValueError(
                f"observer {cls.__name__}: {error}, need keywords of this observer"
            ) from error
        observer._is_older = False
        return observer

    @classmethod
    def load_from_registry(
        cls,
        name: str,
        *,
        base_name: str | None = None,
        args: ObserverArgs | None = None,
        quantization_args: ObserverArgs | None = None,
        **observer_kwargs: OptionValue,
    ) -> Self:
        """Return a new observer by name. `quantization_args` is the older name of `args`.

        Raises ValueError, with a list of the known names, if `name` is unknown.
        """
        arguments = args or quantization_args
        if arguments is None:
            raise ValueError(f"observer {name!r}: got no args, need the quantization arguments")
        observer = cls.get_value_from_registry(name).create(
            base_name or WEIGHT, arguments, observer_kwargs
        )
        observer._is_older = base_name is None and args is None
        return observer

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        """Read the keywords. Ignore the keywords that only the subclass knows."""
        changes_scales = self._keeps_statistics or bool(self._overrides)
        has_defaults = bool(fields(self.defaults)) or "defaults" in vars(type(self))
        accepts_any = changes_scales and not has_defaults
        if accepts_any or older.is_overridden(type(self), "__init__"):
            keywords = {
                name: value for name, value in keywords.items() if hasattr(self.defaults, name)
            }
        super().configure(keywords)

    def _nothing_seen(self) -> Seen:
        return Seen()

    # The statistics, which subclasses and callers may change.

    @property
    def min_vals(self) -> torch.Tensor:
        """Lower ends of the observed range, with shape qparam_shape."""
        return self._end(0)

    @min_vals.setter
    def min_vals(self, low: torch.Tensor) -> None:
        self._seen.low = low

    @property
    def max_vals(self) -> torch.Tensor:
        """Upper ends of the observed range, with shape qparam_shape."""
        return self._end(1)

    @max_vals.setter
    def max_vals(self, high: torch.Tensor) -> None:
        self._seen.high = high

    def _end(self, place: int) -> torch.Tensor:
        """Return an end of the range. The range of a weight is computed when it is first read."""
        seen = self._seen
        kept = (seen.low, seen.high)[place]
        if kept is not None:
            return kept
        if seen.weight is None and seen.pending is None:
            raise AttributeError(f"{type(self).__name__} has no {ENDS[place]} before it observes")
        observed = self._observed_range()
        seen.found = older.copies(observed)
        low, high = observed
        seen.low = low if seen.low is None else seen.low
        seen.high = high if seen.high is None else seen.high
        return observed[place]

    @property
    def _num_observed_tokens(self) -> int | None:
        """Number of observed tokens, under llm-compressor's name. None if there are none."""
        return self.tokens or None

    @_num_observed_tokens.setter
    def _num_observed_tokens(self, tokens: int | None) -> None:
        self.tokens = tokens or 0

    @property
    def has_statistics(self) -> bool:
        return self._seen.pending is not None or super().has_statistics

    def _stored_range(self) -> Range | None:
        seen = self._seen
        if not self.has_statistics or (seen.low is None and seen.high is None):
            return None
        shape = seen.shape if seen.weight is None else seen.weight.qparam_shape
        where = f"observer {type(self).__name__}"
        low, high = (
            older.with_shape(getattr(self, name), shape, f"{where}: {name}") for name in ENDS
        )
        return low, high

    def _store_range(self, ends: Range, pair: ScalePair | None = None) -> None:
        self._seen.pair, self._seen.found = pair, older.copies(ends)
        super()._store_range(ends)

    def _observed_range(self) -> Range:
        if self._seen.pending is None or self.strategy != "tensor_group":
            return super()._observed_range()
        global_scale = self.get_global_scale()
        return older.implied_range(self._pending_scales(global_scale), self.args, global_scale)

    def searched_weight(self) -> Tiles | None:
        return None if self._seen.is_changed else super().searched_weight()

    def extremes(self) -> Range:
        if self._seen.is_changed and self._seen.global_scale is None:
            low, high = self.range()
            return low.amin(), high.amax()
        return super().extremes()

    def extremes_for_scales(self) -> Range:
        names = ("get_global_scale", "global_scale")
        if any(older.is_overridden(type(self), name) for name in names):
            global_scale = self.get_global_scale()
            if global_scale is not None:
                return older.extremes_of_global_scale(global_scale)
        return super().extremes_for_scales()

    def global_scale(self) -> torch.Tensor | None:
        if self._seen.global_scale is not None and not self.fusion.is_shared:
            return self._seen.global_scale * self.fusion.factor
        return super().global_scale()

    def get_global_scale(self) -> torch.Tensor | None:
        """Return `global_scale()`, under llm-compressor's name.

        `qparams` calls this method, so that a subclass may override it.
        """
        return self.global_scale()

    # Which methods a subclass overrides.

    @property
    def combines(self) -> bool:
        return super().combines or (self._is_older and not is_nvfp4(self.args))

    @property
    def _keeps_weight(self) -> bool:
        return super()._keeps_weight and not self._decides_range

    @property
    def _keeps_statistics(self) -> bool:
        """True if a subclass updates `min_vals` and `max_vals` itself."""
        return older.is_overridden(type(self), older.NEWER_METHOD)

    @property
    def _decides_range(self) -> bool:
        """True if a subclass overrides `range`, or `find_range` but not `weight_scales`.

        The scales must then be computed from the range, because the inherited `weight_scales` calls
        neither method.
        """
        if older.is_overridden(type(self), "range"):
            return True
        order = type(self).__mro__
        find, scale = (
            next(place for place, kind in enumerate(order) if name in vars(kind))
            for name in ("find_range", "weight_scales")
        )
        return find < scale

    @property
    def returns_own_qparams(self) -> bool:
        """True if a subclass overrides `get_qparams` in its newer form, without `observed`."""
        return (
            older.is_overridden(type(self), "get_qparams") and "get_qparams" not in self._overrides
        )

    # Observing.

    def observe(self, value: torch.Tensor) -> None:
        self(value)

    def __call__(
        self,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        should_calculate_gparam: bool = False,
    ) -> Any:
        """Observe a tensor with `forward`, and keep the scales if a subclass's `forward` returns
        scales.
        """
        if "forward" not in self._overrides:
            return super().__call__(observed, g_idx, global_scale, should_calculate_gparam)
        if not observed.numel():
            return self
        if should_calculate_gparam:
            return self._global_scale_by_forward(observed)[0]
        return self._observe_with_forward(observed, g_idx, global_scale)

    @torch.no_grad()
    def forward(
        self,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        should_calculate_gparam: bool = False,
    ) -> Any:
        """Observe a tensor and return the observer. Ignore an empty tensor.

        `g_idx` (columns,) maps each column to its group. If `global_scale` is given, return the
        scale (relative to `global_scale`) and the zero point. If `should_calculate_gparam` is set,
        return the global scale of the tensor.
        """
        if not observed.numel():
            return self
        self.record_observed_tokens(observed)
        returns_observer = global_scale is None and not should_calculate_gparam
        # A subclass that calls `super().forward` may change the range instead of the result.
        may_change = "forward" in self._overrides and self._observes_range(observed, g_idx)
        if returns_observer or may_change:
            self._observe(observed, g_idx)
        if returns_observer:
            return self
        if should_calculate_gparam:
            self._super_answer = self.get_gparam(observed)
        elif may_change:
            self._super_answer = self.scales(global_scale)
        else:
            self._super_answer = self.get_qparams(observed, g_idx, global_scale)
        return self._super_answer

    def record_observed_tokens(self, observed: torch.Tensor) -> None:
        """Count the tokens of an activation. Weights have no tokens."""
        self.tokens += tokens_in(observed, self.base_name)

    @torch.no_grad()
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """Update the statistics with observations (num_observations, *qparam_shape, group_size)."""
        self._see(tiles_of_observations(observed))

    def _observe(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> None:
        """Observe a tensor.

        Older methods compute the scales if a subclass overrides them, or if groups differ in size.
        """
        is_own = older.is_overridden(type(self), "weight_scales") and not self._decides_range
        if not self._observes_range(observed, g_idx):
            self._observe_scales(self._scales_by_override, observed, g_idx)
        elif self.strategy == "tensor" and self.base_name == WEIGHT and is_own:
            pair = self.weight_scales(self._tiles(observed, g_idx), None)
            self._store_scales(pair, observed, g_idx)
        else:
            self._observe_range(observed, g_idx)
            decides_global_scale = self._overrides & {*older.GLOBAL_SCALE_METHODS}
            if self.strategy == "tensor_group" and decides_global_scale:
                self._store_global_scale(self.get_gparam(observed))

    def _observes_range(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> bool:
        """Return True if the scales follow from a range, and not from an older method."""
        decides_scales = self._overrides & {*older.SCALE_METHODS}
        return not decides_scales and older.has_equal_groups(g_idx, observed, self.args)

    def _observe_range(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> None:
        """Observe a tensor and derive its scales from its range."""
        if not self._keeps_statistics:
            self._see(self._tiles(observed, g_idx))
            return
        ordered = self._ordered(observed, g_idx)
        observations = flatten_for_calibration(ordered, self.base_name, self.args)
        self.update_statistics_from_observed(observations)
        if observations.ndim > 2:
            self._seen.shape = observations.shape[1:-1]
        self._share_new_extremes()

    def _tiles(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> Tiles:
        return tiles_of(self._ordered(observed, g_idx), self.base_name, self.args)

    def _ordered(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor with the columns of each group next to each other."""
        self._order = older.column_order(g_idx, observed, self.args)
        return observed if self._order is None else observed.index_select(-1, self._order)

    # Scales from the methods of a subclass.

    def _observe_scales(
        self,
        scales: Scales,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None,
        pair: ScalePair | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> None:
        """Observe a tensor whose scales an older method or `forward` computes.

        `pair` has the scales if they are already computed. If the strategy has a global scale, the
        scales of a weight are computed later, when the shared global scale is known.
        """
        has_global = self.strategy == "tensor_group"
        if has_global and global_scale is None:
            global_scale = self.get_gparam(observed)
        elif not has_global and pair is None:
            pair = scales(observed, g_idx, None)
        if self.base_name == WEIGHT:
            self._seen = Seen(pending=(scales, observed, g_idx))
        if has_global and global_scale is not None:
            self._store_global_scale(global_scale)
        elif pair is not None:
            self._store_scales(pair, observed, g_idx)

    def _observe_with_forward(
        self,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None,
        global_scale: torch.Tensor | None,
    ) -> object:
        """Call the `forward` of a subclass, and keep the scales if it returns any."""
        tokens, answer = self.tokens, None
        if self._seen.range is not None:
            self._seen.found = older.copies(self.range())
        own_scale, is_own = None, False
        calculates_gparam = older.accepts(type(self).forward, "should_calculate_gparam")
        if self.strategy == "tensor_group" and global_scale is None and calculates_gparam:
            own_scale, is_own = self._global_scale_by_forward(observed)
            self.tokens = tokens
        is_weight = self.base_name == WEIGHT
        # Inputs with a global scale need no other scales.
        if is_weight or not is_own:
            given = own_scale if is_weight and global_scale is None else global_scale
            answer = self._call_forward(observed, {"g_idx": g_idx, "global_scale": given})
            is_inherited = older.is_same_answer(answer, self._super_answer)
            if is_inherited and self._observes_range(observed, g_idx):
                answer = self
        if isinstance(answer, tuple | list):
            pair = older.as_tensor_pair(answer, f"{type(self).__name__}.forward")
            self._observe_scales(self._scales_by_forward, observed, g_idx, pair, own_scale)
        elif is_own and own_scale is not None:
            self._store_global_scale(own_scale)
        if self.tokens == tokens:
            self.record_observed_tokens(observed)
        if answer is self and global_scale is not None:
            return self.scales(global_scale)
        return self if answer is None else answer

    def _global_scale_by_forward(self, observed: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the global scale of a tensor from the `forward` of a subclass.

        The second value is False if `super().forward` or the range determines the global scale.
        """
        with self._set_aside():
            answer = self._call_forward(observed, {"should_calculate_gparam": True})
            if isinstance(answer, torch.Tensor):
                return answer, answer is not self._super_answer
            return global_scale_of(*self.extremes()), False

    def _call_forward(self, observed: torch.Tensor, given: Mapping[str, object]) -> Any:
        """Call the `forward` of a subclass with the arguments in `given` that it accepts.

        Return the observer if the subclass changed the range, but returned the result of
        `super().forward` unchanged: this result does not follow from the changed range.
        """
        self._super_answer = None
        answer = super().__call__(observed, **older.accepted(type(self).forward, given))
        is_inherited = older.is_same_answer(answer, self._super_answer)
        return self if is_inherited and self._seen.is_changed else answer

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Keep the current observation and fusion out of a block, and restore them afterwards."""
        kept, fusion = self._seen, self.fusion
        self._seen, self.fusion = Seen(), Fusion()
        try:
            yield
        finally:
            self._seen, self.fusion = kept, fusion

    def _scales_by_override(
        self, observed: torch.Tensor, g_idx: torch.Tensor | None, global_scale: torch.Tensor | None
    ) -> ScalePair:
        """Return scale and zero point of a tensor, computed by the subclass's methods."""
        if "get_qparams" not in self._overrides:
            return self._scales_by_older_methods(observed, g_idx, global_scale)
        given = {"g_idx": g_idx, "global_scale": global_scale}
        return older.call_for_pair(self.get_qparams, observed, given)

    def _scales_by_older_methods(
        self, observed: torch.Tensor, g_idx: torch.Tensor | None, global_scale: torch.Tensor | None
    ) -> ScalePair:
        pair = older.scales_by_older_methods(self, observed, g_idx, global_scale)
        self.post_calculate_qparams()
        return pair

    def _pending_scales(self, global_scale: torch.Tensor | None) -> ScalePair:
        assert self._seen.pending is not None
        scales, observed, g_idx = self._seen.pending
        with self._set_aside():
            pair = scales(observed, g_idx, global_scale)
        return self._checked_scales(pair, observed, g_idx, global_scale)

    def _scales_by_forward(
        self, observed: torch.Tensor, g_idx: torch.Tensor | None, global_scale: torch.Tensor | None
    ) -> ScalePair:
        name = f"observer {type(self).__name__}"
        if not older.accepts(type(self).forward, "global_scale"):
            raise ValueError(
                f"{name}: got forward without global_scale, need it for {self.strategy}"
            )
        answer = self._call_forward(observed, {"g_idx": g_idx, "global_scale": global_scale})
        pair = self.scales(global_scale) if answer is self else answer
        return older.as_tensor_pair(pair, f"{name}: forward")

    def _store_scales(
        self, pair: ScalePair, observed: torch.Tensor, g_idx: torch.Tensor | None
    ) -> None:
        """Keep scales, rounded to the format, and the range that they imply."""
        stored = self._checked_scales(pair, observed, g_idx, None)
        self._store_range(older.implied_range(stored, self.args, None), stored)

    def _checked_scales(
        self,
        pair: ScalePair,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None,
        global_scale: torch.Tensor | None,
    ) -> ScalePair:
        if self.strategy in ("group", "tensor_group"):
            assert self.args.group_size is not None
            groups = len(older.group_widths(g_idx, observed.shape[-1], self.args.group_size))
            shape: tuple[int, ...] = (groups,)
            if self.base_name == WEIGHT:
                shape = observed.shape[0], groups
        else:
            shape = tiles_of(observed.to("meta"), self.base_name, self.args).qparam_shape
        return older.checked_scales(
            pair,
            shape,
            self.args,
            global_scale,
            is_relative=older.is_relative_to_global(self, self._overrides),
            where=f"observer {type(self).__name__}: {self.base_name}",
        )

    def _store_global_scale(self, global_scale: torch.Tensor) -> None:
        """Keep the global scale of an older method and the extremes that it implies."""
        seen = self._seen
        seen.global_scale = global_scale.detach().to(torch.float32).reshape(1)
        low, high = seen.extremes = older.extremes_of_global_scale(seen.global_scale)
        if self.base_name == WEIGHT or seen.range is not None:
            self._share_new_extremes()
        else:
            self._store_range((low.reshape(1), high.reshape(1)))

    # Quantization parameters.

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield scale and zero point, for `scale, zero_point = observer(value)`."""
        qparams = self.qparams()
        yield from (qparams["scale"], qparams["zero_point"])

    def __getitem__(self, place: int) -> torch.Tensor:
        """Return the scale (0) or the zero point (1), for `observer(value)[0]`."""
        return tuple(self)[place]

    @torch.no_grad()
    def qparams(self) -> QParamsDict:
        """Return scale, zero point and global scale.

        Calls `get_qparams` only if a subclass overrides it in its newer form, without `observed`.
        """
        return self.get_qparams() if self.returns_own_qparams else self._own_qparams()

    def _own_qparams(self) -> QParamsDict:
        return self._qparams_relative_to(self.get_global_scale())

    @torch.no_grad()
    def get_qparams(
        self,
        observed: torch.Tensor | None = None,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> Any:
        """Return scale, zero point and global scale of the observations.

        Raises ValueError if nothing was observed. If `observed` is given, as in older code, observe
        this tensor and return only scale and zero point. An observer that was created with only
        `quantization_args` always returns this pair.
        """
        if observed is None:
            qparams = self._own_qparams()
            return (qparams["scale"], qparams["zero_point"]) if self._is_older else qparams
        if self._overrides & {"forward", "get_qparams"}:
            return self._scales_for_super_call(observed, g_idx, global_scale)
        self._observe(observed, g_idx)
        return self.scales(self.global_scale() if global_scale is None else global_scale)

    def _scales_for_super_call(
        self, observed: torch.Tensor, g_idx: torch.Tensor | None, global_scale: torch.Tensor | None
    ) -> ScalePair:
        """Return scale and zero point for a subclass that calls `super().get_qparams`.

        The observer keeps the scales that the subclass's `get_qparams` or `forward` returns.
        """
        if global_scale is None and self.strategy == "tensor_group":
            global_scale = self.get_gparam(observed)
        computes = bool(self._overrides & {*older.SCALE_METHODS} - {"get_qparams"})
        if computes or not older.has_equal_groups(g_idx, observed, self.args):
            return self._scales_by_older_methods(observed, g_idx, global_scale)
        self._observe_range(observed, g_idx)
        return super().scales(global_scale)

    def scales(self, global_scale: torch.Tensor | None) -> ScalePair:
        seen = self._seen
        if not seen.is_changed:
            if seen.pending is not None and self.strategy == "tensor_group":
                return self._pending_scales(global_scale)
            if seen.pair is not None and not self.fusion.is_shared:
                return seen.pair
        scales = super().scales(global_scale)
        self.post_calculate_qparams()
        return scales

    def reset(self) -> None:
        super().reset()
        self.min_val, self.max_val = {}, {}

    # Lifecycle.

    def attach(self, module: torch.nn.Module) -> None:  # noqa: B027
        """Start collecting additional data from the module, if this observer needs any."""

    def detach(self, module: torch.nn.Module) -> None:  # noqa: B027
        """Stop collecting; the observer keeps the statistics."""

    def sync_activation_stats(self) -> list[distributed.Work]:
        """Reduce statistics and token counts over ranks, as `sync` does.

        The reduction is complete when the method returns, so the list of pending works is empty.
        """
        self.sync()
        return []

    def reduce_over_ranks(self) -> None:
        declared = older.declared_reductions(type(self))
        if declared is None:
            super().reduce_over_ranks()
            return
        self.tokens = sum(gather(self.tokens))
        for name, operation in declared.items():
            local = getattr(self, name, None)
            values = [value for value in gather(older.as_cpu_tensor(local)) if value is not None]
            if values:
                reduced = older.reduce_values(values, operation, name)
                setattr(self, name, older.convert_like(local, reduced))
        if {*ENDS} & declared.keys():
            self._reduce_extremes()
            self._seen.pair = None
            self._share_new_extremes()

    def _reduce_range(self, reduction: Reduction) -> None:
        self._reduce_extremes()
        super()._reduce_range(reduction)

    def _reduce_extremes(self) -> None:
        """Reduce the extremes over all ranks. The global scale is computed from them."""
        rank_extremes = [ends for ends in gather(self._seen.extremes) if ends is not None]
        if rank_extremes:
            lows, highs = zip(*rank_extremes, strict=True)
            self._seen.extremes = torch.stack(lows).amin(), torch.stack(highs).amax()
            self._seen.global_scale = global_scale_of(*self._seen.extremes)

    # Methods of the older generation, to be called or overridden (see `older.py`).

    def calculate_qparams(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None = None,
        tensor_id: Hashable = None,
        global_scale: torch.Tensor | None = None,
    ) -> ScalePair:
        """Return scale and zero point of a tensor. Dimensions in `reduce_dims` get size 1.

        The range is combined with earlier ranges of the same `tensor_id`, by `combine`.
        """
        given = {"reduce_dims": reduce_dims, "tensor_id": tensor_id, "global_scale": global_scale}
        low, high = older.call_for_pair(self.calculate_updated_min_max, observed, given)
        if low.ndim == 0:
            low, high = low.reshape(1), high.reshape(1)
        return scale_and_zero_point(low, high, self.args, global_scale)

    @torch.no_grad()
    def calculate_updated_min_max(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None = None,
        tensor_id: Hashable = None,
        global_scale: torch.Tensor | None = None,
    ) -> Range:
        """Return a tensor's range, combined with the earlier ranges of the same `tensor_id`."""
        new = self._new_range(observed, reduce_dims, global_scale)
        name = older.DEFAULT_ID if tensor_id is None else tensor_id
        if name in self.min_val and self.min_val[name].shape == new[0].shape:
            new = self.combine((self.min_val[name], self.max_val[name]), new)
        self.min_val[name], self.max_val[name] = new
        return new

    def _new_range(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None,
        global_scale: torch.Tensor | None,
    ) -> Range:
        """Return the range of a single observation."""
        flat, shape = older.flatten_dimensions(observed, reduce_dims)
        tiles = tiles_of_observations(flat)
        self.prepare(tiles)
        low, high = self.find_range(tiles)
        return low.reshape(shape), high.reshape(shape)

    def calculate_gparam(self, observed: torch.Tensor) -> torch.Tensor:
        """Return the global scale of a tensor: float32 (1,)."""
        return global_scale_of(*older.call_for_pair(self.calculate_updated_min_max, observed, {}))

    def get_gparam(self, observed: torch.Tensor) -> torch.Tensor:
        """Return the global scale of a tensor: float32 (1,).

        Raises ValueError if the strategy has no global scale.
        """
        if self.strategy != "tensor_group":
            raise ValueError(f"global scale: got strategy {self.strategy}, need tensor_group")
        return self.calculate_gparam(observed)

    def get_qparams_along_dim(
        self,
        observed: torch.Tensor,
        dim: int | Iterable[int],
        tensor_id: Hashable = None,
        global_scale: torch.Tensor | None = None,
    ) -> ScalePair:
        """Return scale and zero point for each index of `dim`, or of several dimensions."""
        dims = [dim] if isinstance(dim, int) else list(dim)
        kept = {each % observed.ndim for each in dims}
        reduce_dims = tuple(each for each in range(observed.ndim) if each not in kept)
        given = {"reduce_dims": reduce_dims, "tensor_id": tensor_id, "global_scale": global_scale}
        return older.call_for_pair(self.calculate_qparams, observed, given)

    def post_calculate_qparams(self) -> None:  # noqa: B027
        """Do nothing. This method is called after scales were computed, and subclasses override
        it.
        """


def _constructor_arguments(
    base_name: str | ObserverArgs | None,
    args: ObserverArgs | None,
    quantization_args: ObserverArgs | None,
) -> tuple[str | None, ObserverArgs]:
    """Return the base name and the quantization arguments.

    The name is None if the call has the form of the older documentation. Raises ValueError if there
    are no quantization arguments, or several.
    """
    name = base_name if isinstance(base_name, str) else None
    first = None if isinstance(base_name, str) else base_name
    given = [each for each in (first, args, quantization_args) if each is not None]
    if len(given) != 1 or isinstance(given[0], str | int | float):
        raise ValueError(
            "observer: got no quantization arguments, or several, need Observer(base_name, args) "
            "or Observer(quantization_args=args); give keywords by name"
        )
    return (WEIGHT if name is None and args is not None else name), given[0]
