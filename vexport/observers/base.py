"""Base class of observers, which collect statistics and compute quantization parameters."""

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import ClassVar, Literal, Self, TypedDict, overload

import torch
from torch import distributed

from vexport.numerics.ranks import gather, rank_and_size
from vexport.observers import older
from vexport.observers.bases import InternalModule
from vexport.observers.flatten import (
    WEIGHT,
    Tiles,
    flatten_for_calibration,
    layout_of,
    tiles_of,
    tiles_of_observations,
    tokens_in,
)
from vexport.observers.older import ScalePair
from vexport.observers.qparams import (
    ObserverArgs,
    global_scale_of,
    is_nvfp4,
    scale_and_zero_point,
    strategy_of,
    with_keywords,
)
from vexport.observers.registration import RegisteredObserver
from vexport.observers.search import Range, extremes_of, range_of, ranges_of_rows, scales_of_rows
from vexport.records.observer_names import (
    Options,
    OptionsT,
    OptionValue,
    option_problems,
    read_options,
)

Reduction = Literal["extremes", "average"]
# Attributes that hold the statistics of an observer.
ENDS = ("min_vals", "max_vals")
# All attributes that depend on the observed tensors, and the fusion with other observers.
OBSERVATION = (
    *ENDS,
    "_extremes",
    "_factor",
    "_found",
    "_fused",
    "_global_scale",
    "_order",
    "_pair",
    "_pending_tensor",
    "_scales_from_forward",
    "_shape",
    "_weight",
)


class QParamsDict(TypedDict):
    """Quantization parameters of an observed tensor.

    `scale` is float32 with a value per group, and `zero_point` is int32 with the same shape.
    `global_scale` is float32 with shape (1,), or None if the strategy has no global scale.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor
    global_scale: torch.Tensor | None


@dataclass(slots=True)
class FusionState:
    """State that fused observers share.

    `extremes` maps each observer's index among the fused observers to its observed extremes, or to
    None before its first observation. `members` holds weak references to the observers, so that
    unused observers and their weights can be freed.
    """

    extremes: dict[int, Range | None]
    members: "list[weakref.ref[Observer]]" = field(default_factory=list)
    # Factor that reduces the global scale computed from the largest value.
    factor: float = 1.0
    is_fitted: bool = False


class Observer(InternalModule, RegisteredObserver):
    """Base class of all observers.

    `base_name` names the observed tensor ("weight", "input", "output", "q", "k" or "v"). `args` are
    the quantization arguments of vexport or of compressed-tensors. Keywords come from
    `args.observer_kwargs` and `observer_kwargs`. If both set a keyword, `observer_kwargs` wins.
    Raises ValueError for an unknown name, strategy or keyword. An observer can be unpacked: `scale,
    zero_point = observer(value)`.

    A subclass overrides `find_range`, which returns the range of an observation, and `combine`,
    which merges this range with the earlier range. The ranges of weights are not combined: the last
    observation replaces the earlier ones.

    `min_vals` and `max_vals` hold the statistics. Scales, the range, the extremes and the global
    scale are computed from them after a subclass or a caller has changed them. vexport's scales
    are computed directly from the weight only while both attributes are as vexport found them.

    A subclass may override `update_statistics_from_observed`, as in llm-compressor. Such a subclass
    sets `min_vals` and `max_vals` itself, or calls `super()` and changes them. It accepts any
    keyword unless it defines `defaults`. It reads its keywords from `self.args.observer_kwargs`.

    A subclass written for llm-compressor's older documentation overrides `calculate_qparams` or
    another method that returns scales (see `vexport.observers.older`). Raises ValueError if a
    subclass overrides a method that is never called.

    `Observer(quantization_args=args)` is the call in llm-compressor's older documentation. It
    creates an observer of a weight. If this observer observes several tensors, it passes their
    ranges to `combine`, except for NVFP4. Its `get_qparams()` returns a scale and a zero point
    instead of a dictionary.

    If a weight has a scale per channel, group or block, the observer only keeps a reference to the
    weight. It computes the scales tile by tile when quantization parameters are requested, which
    saves memory for large weights. NVFP4 scales are relative to the global scale that `fuse`
    shares.
    """

    # Observed range, with shape qparam_shape. Both attributes are missing until a tensor is
    # observed. Subclasses may set them, as in llm-compressor.
    min_vals: torch.Tensor
    max_vals: torch.Tensor
    defaults: ClassVar[Options] = Options()
    # How ranks reduce the ranges of activations, or None if only the last observation counts.
    reduction: ClassVar[Reduction | None] = None

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
        name, arguments = self._constructor_arguments(base_name, args, quantization_args)
        # An older constructor call names no tensor. The observer then combines the observations of
        # a weight, and `get_qparams` returns a pair (scale, zero point).
        self._is_older = name is None
        self.base_name: str = name or preset or WEIGHT
        layout_of(self.base_name, arguments)  # raises ValueError for an unsupported pair
        older.require_used_overrides(type(self))
        self.args = self.quantization_args = with_keywords(arguments, observer_kwargs)
        self._overrides = older.overridden_older_methods(type(self))
        # Ranges that `calculate_updated_min_max` has returned, by tensor id.
        self.min_val: dict[Hashable, torch.Tensor] = {}
        self.max_val: dict[Hashable, torch.Tensor] = {}
        self.tokens = 0
        self._fused: FusionState | None = None
        self._fused_index = 0
        self._factor = 1.0
        # Whether a subclass's `forward` is running, and the last result that it got from `super()`.
        self._is_in_subclass = False
        self._super_answer: ScalePair | torch.Tensor | None = None
        self._drop_observation()
        self.configure(self._keywords())

    def _drop_observation(self) -> None:
        """Drop the last observation."""
        self._weight: Tiles | None = None
        # Order that sorts the weight's columns by group, if `g_idx` was given.
        self._order: torch.Tensor | None = None
        # Extremes of an NVFP4 weight, or extremes derived from the global scale of an older method.
        self._extremes: Range | None = None
        self._global_scale: torch.Tensor | None = None
        # Observed weight and its `g_idx`, if an older method computes the scales.
        self._pending_tensor: tuple[torch.Tensor, torch.Tensor | None] | None = None
        # Scales from an older method.
        self._pair: ScalePair | None = None
        # Whether the scales come from the `forward` of a subclass.
        self._scales_from_forward = False
        self._drop_range()

    def _drop_range(self) -> None:
        # Copy of the range that this class stored in `min_vals` and `max_vals`, if the scales may
        # come from anything else.
        self._found: Range | None = None
        # Shape of the scales, if the observation determines it.
        self._shape: tuple[int, ...] | None = None
        for name in ENDS:
            if name in self._kept:
                delattr(self, name)

    @staticmethod
    def _constructor_arguments(
        base_name: str | ObserverArgs | None,
        args: ObserverArgs | None,
        quantization_args: ObserverArgs | None,
    ) -> tuple[str | None, ObserverArgs]:
        """Return the base name and the quantization arguments.

        The name is None if the call has the form of the older documentation. Raises ValueError if
        there are no quantization arguments, or several.
        """
        name = base_name if isinstance(base_name, str) else None
        first = None if isinstance(base_name, str) else base_name
        given = [each for each in (first, args, quantization_args) if each is not None]
        if len(given) != 1 or isinstance(given[0], str | int | float):
            raise ValueError(
                "observer: got no quantization arguments, or several, need Observer(base_name, "
                "args) or "
                "Observer(quantization_args=args); give keywords by name"
            )
        return (WEIGHT if name is None and args is not None else name), given[0]

    def _keywords(self) -> dict[str, OptionValue]:
        """Return the observer keywords for `configure`.

        If a class has a custom constructor, that constructor has already read its additional
        keywords. Keywords that `defaults` does not list are then left out.
        """
        keywords = dict(self.args.observer_kwargs or {})
        if older.is_overridden(type(self), "__init__"):
            unknown = {name for name, _ in option_problems(self.defaults, keywords)}
            own = {name for name in unknown if not hasattr(self.defaults, name)}
            return {name: value for name, value in keywords.items() if name not in own}
        return keywords

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
        kind = cls.of_name(name)
        if base_name is None and args is None and not older.is_older_constructor(kind):
            return kind(quantization_args=arguments, **observer_kwargs)  # type: ignore[arg-type]
        observer = kind.create(base_name or WEIGHT, arguments, observer_kwargs)
        observer._is_older = base_name is None and args is None
        return observer

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        """Read the keywords. A subclass with additional keywords overrides this method."""
        takes_any = self._keeps_statistics or bool(self._overrides)
        if not takes_any or "defaults" in vars(type(self)):
            self.read(self.defaults, keywords)

    def read(self, defaults: OptionsT, keywords: dict[str, OptionValue]) -> OptionsT:
        """Return `defaults` updated with the keywords.

        Raises ValueError, with this observer's name, if a keyword is invalid.
        """
        return read_options(defaults, keywords, f"observer {self.registry_name}")

    @property
    def has_statistics(self) -> bool:
        """True if at least one tensor was observed."""
        return self._weight is not None or self._pending_tensor is not None or self._has_range

    @property
    def _kept(self) -> dict[str, object]:
        return {**vars(self), **self._buffers, **self._parameters}

    @property
    def _has_range(self) -> bool:
        return {*ENDS} <= self._kept.keys()

    @property
    def _is_range_changed(self) -> bool:
        """True if `min_vals` or `max_vals` is not the range that `_found` holds.

        A subclass or a caller has then set the range, or changed it in place. The scales follow
        from the range, and not from the weight or from an older method.
        """
        if not {*ENDS} & self._kept.keys():
            return False
        found = self._found or (None, None)
        ends = zip((self._kept.get(name) for name in ENDS), found, strict=True)
        return any(end is not None and not older.is_same(end, own) for end, own in ends)

    def __getattr__(self, name: str) -> torch.Tensor | torch.nn.Module:
        """Compute and keep the range of a weight when `min_vals` or `max_vals` is read."""
        if name in ENDS and (self._weight is not None or self._pending_tensor is not None):
            observed = self._observed_range()
            self._found = older.copies(observed)
            for each, end in zip(ENDS, observed, strict=True):
                if each not in self._kept:
                    setattr(self, each, end)
            return observed[ENDS.index(name)]
        return super().__getattr__(name)

    @property
    def strategy(self) -> str:
        """Strategy of the scales, by its compressed-tensors name."""
        return strategy_of(self.args)

    @property
    def _keeps_statistics(self) -> bool:
        """True if a subclass updates `min_vals` and `max_vals` itself."""
        return (
            type(self).update_statistics_from_observed
            is not Observer.update_statistics_from_observed
        )

    @property
    def _decides_scales(self) -> bool:
        """True if a subclass overrides an older method that returns scales or their range."""
        return bool(self._overrides & {*older.SCALE_METHODS})

    @property
    def _decides_global_scale(self) -> bool:
        """True if a subclass overrides an older method that determines the global scale."""
        return bool(self._overrides & {*older.GLOBAL_SCALE_METHODS, *older.SCALE_METHODS})

    @property
    def _computes_weight_scales(self) -> bool:
        """True for a weight if a subclass computes its scales with `weight_scales`."""
        is_own = older.is_overridden(type(self), "weight_scales")
        return self.base_name == WEIGHT and is_own and not self._decides_range

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

    @overload
    def __call__(self, observed: torch.Tensor, g_idx: torch.Tensor | None = None) -> "Observer": ...

    @overload
    def __call__(
        self,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        should_calculate_gparam: bool = False,
    ) -> "Observer | ScalePair | torch.Tensor": ...

    def __call__(
        self,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        should_calculate_gparam: bool = False,
    ) -> "Observer | ScalePair | torch.Tensor":
        """Observe a tensor with `forward`, and keep the scales if a subclass's `forward` returns
        scales.
        """
        given = {"g_idx": g_idx, "global_scale": global_scale}
        if "forward" not in self._overrides:
            arguments = (observed, g_idx, global_scale, should_calculate_gparam)
            answer: Observer | ScalePair | torch.Tensor = super().__call__(*arguments)
            return answer
        if not observed.numel():
            return self
        if should_calculate_gparam:
            with self._set_aside():
                found = self._call_forward(observed, {"should_calculate_gparam": True})
                return self._shared_global_scale() if found is self or found is None else found
        return self._observe_with_forward(observed, given)

    @overload
    def forward(self, observed: torch.Tensor, g_idx: torch.Tensor | None = None) -> "Observer": ...

    @overload
    def forward(
        self,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        should_calculate_gparam: bool = False,
    ) -> "Observer | ScalePair | torch.Tensor": ...

    @torch.no_grad()
    def forward(
        self,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        should_calculate_gparam: bool = False,
    ) -> "Observer | ScalePair | torch.Tensor":
        """Observe a tensor and return the observer. Ignore an empty tensor.

        `g_idx` (columns,) maps each column to its group. If `global_scale` is given, return the
        scale (relative to `global_scale`) and the zero point. If `should_calculate_gparam` is set,
        return the global scale of the tensor.
        """
        if not observed.numel():
            return self
        self.record_observed_tokens(observed)
        if not should_calculate_gparam and global_scale is None:
            self._observe(observed, g_idx)
            return self
        if self._is_in_subclass and self._observes_range(observed, g_idx):
            # The subclass may change the range instead of this method's result.
            self._observe_range(observed, g_idx)
        answer: ScalePair | torch.Tensor
        if should_calculate_gparam:
            answer = self.get_gparam(observed)
        else:
            answer = self.get_qparams(observed, g_idx, global_scale)
        self._super_answer = answer
        return answer

    def _observe(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> None:
        """Observe a tensor.

        Older methods compute the scales if a subclass overrides them, or if groups differ in size.
        """
        if not self._observes_range(observed, g_idx):
            self._observe_for_scales(observed, g_idx)
            return
        if self.strategy == "tensor" and self._computes_weight_scales:
            pair = self.weight_scales(self._tiles(observed, g_idx), None)
            self._store_scales(pair, observed, g_idx)
            return
        self._observe_range(observed, g_idx)
        if self.strategy == "tensor_group" and self._decides_global_scale:
            self._store_global_scale(self.get_gparam(observed))

    def _observes_range(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> bool:
        """Return True if the scales follow from a range, and not from an older method."""
        return not self._decides_scales and older.has_equal_groups(g_idx, observed, self.args)

    def _observe_range(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> None:
        """Observe a tensor and derive its scales from its range."""
        if not self._keeps_statistics:
            self._update(self._tiles(observed, g_idx))
            return
        self._order = older.column_order(g_idx, observed, self.args)
        ordered = observed if self._order is None else observed.index_select(-1, self._order)
        observations = flatten_for_calibration(ordered, self.base_name, self.args)
        self.update_statistics_from_observed(observations)
        if observations.ndim > 2:
            self._shape = observations.shape[1:-1]
        self._publish_extremes()

    def _tiles(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> Tiles:
        """Return the tiles of a tensor, with the columns of each group next to each other."""
        self._order = older.column_order(g_idx, observed, self.args)
        ordered = observed if self._order is None else observed.index_select(-1, self._order)
        return tiles_of(ordered, self.base_name, self.args)

    def _observe_for_scales(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> None:
        """Observe a tensor with an older method that computes its scales.

        If the strategy has a global scale, the scales are computed later, when the global scale is
        known.
        """
        if self.strategy == "tensor_group":
            global_scale = self.get_gparam(observed)
            self._set_pending_tensor(observed, g_idx)
            self._store_global_scale(global_scale)
        else:
            pair = self._qparams_from_override(observed, g_idx, None)
            self._set_pending_tensor(observed, g_idx)
            self._store_scales(pair, observed, g_idx)

    def _set_pending_tensor(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> None:
        """Replace the previous observation by a weight whose scales an older method computes.

        Do nothing for activations.
        """
        if self.base_name == WEIGHT:
            self._drop_observation()
            self._pending_tensor = observed, g_idx

    def _observe_with_forward(
        self, observed: torch.Tensor, given: Mapping[str, torch.Tensor | None]
    ) -> "Observer | ScalePair | torch.Tensor":
        """Call the `forward` of a subclass, and keep the scales if it returns any."""
        g_idx, global_scale = given["g_idx"], given["global_scale"]
        tokens, has_global = self.tokens, self.strategy == "tensor_group"
        if self._has_range:
            self._found = older.copies(self._statistics())
        answer: Observer | ScalePair | torch.Tensor | None = self
        if (
            has_global
            and global_scale is None
            and older.accepts(type(self).forward, "should_calculate_gparam")
        ):
            self._observe_global_scale(observed, g_idx)
        else:
            answer = self._call_forward(observed, given)
            if answer is self and global_scale is not None:
                answer = self._scales(global_scale)
            elif isinstance(answer, tuple | list):
                self._keep_scales(answer, observed, g_idx)
        if self.tokens == tokens:
            self.record_observed_tokens(observed)
        return self if answer is None else answer

    def _keep_scales(
        self, answer: Sequence[object], observed: torch.Tensor, g_idx: torch.Tensor | None
    ) -> None:
        """Keep the scales that the `forward` of a subclass returned."""
        pair = older.as_tensor_pair(answer, f"{type(self).__name__}.forward")
        global_scale = self.get_gparam(observed) if self.strategy == "tensor_group" else None
        self._set_pending_tensor(observed, g_idx)
        self._scales_from_forward = True
        if global_scale is None:
            self._store_scales(pair, observed, g_idx)
        else:
            self._store_global_scale(global_scale)

    def _observe_global_scale(self, observed: torch.Tensor, g_idx: torch.Tensor | None) -> None:
        """Observe a tensor with a `forward` of a subclass that can return a global scale.

        If `forward` returns what `super().forward` returned, the scales follow from the range.
        Otherwise, later calls of `forward` compute them, with the shared global scale.
        """
        kept, tokens = self._observation(), self.tokens
        global_scale = self._call_forward(observed, {"should_calculate_gparam": True})
        if not isinstance(global_scale, torch.Tensor):
            return
        is_inherited = global_scale is self._super_answer
        follows_range = self._is_range_changed
        if not follows_range and (is_inherited or self.base_name == WEIGHT):
            self._restore(kept)
            self.tokens = tokens
            given = {"g_idx": g_idx}
            if self.base_name == WEIGHT:
                given["global_scale"] = global_scale
            answer = self._call_forward(observed, given)
            is_pair_inherited = older.is_same_answer(answer, self._super_answer)
            follows_range = answer is self or (is_inherited and is_pair_inherited)
        if not follows_range:
            self._set_pending_tensor(observed, g_idx)
            self._scales_from_forward = True
        if not (follows_range and is_inherited):
            self._store_global_scale(global_scale)

    def _call_forward(
        self, observed: torch.Tensor, given: Mapping[str, object]
    ) -> "Observer | ScalePair | torch.Tensor | None":
        """Call the `forward` of a subclass with the arguments in `given` that it accepts.

        Return the observer if the subclass changed the range, but returned the result of
        `super().forward` unchanged: this result does not follow from the changed range.
        """
        self._super_answer = None
        self._is_in_subclass = True
        try:
            answer: Observer | ScalePair | torch.Tensor | None = super().__call__(
                observed, **older.accepted(type(self).forward, given)
            )
        finally:
            self._is_in_subclass = False
        is_inherited = older.is_same_answer(answer, self._super_answer)
        return self if is_inherited and self._is_range_changed else answer

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Keep the current observation and fusion out of a block, and restore them afterwards."""
        kept = self._observation()
        self._fused = None
        self._drop_observation()
        try:
            yield
        finally:
            self._restore(kept)

    def _observation(self) -> dict[str, object]:
        return {name: value for name, value in self._kept.items() if name in OBSERVATION}

    def _restore(self, observation: Mapping[str, object]) -> None:
        self._drop_observation()
        for name, value in observation.items():
            setattr(self, name, value)

    def _qparams_from_override(
        self, observed: torch.Tensor, g_idx: torch.Tensor | None, global_scale: torch.Tensor | None
    ) -> ScalePair:
        """Return scale and zero point of a tensor, computed by the subclass's methods."""
        given = {"g_idx": g_idx, "global_scale": global_scale}
        name = f"observer {type(self).__name__}"
        if self._scales_from_forward:
            if not older.accepts(type(self).forward, "global_scale"):
                raise ValueError(
                    f"{name}: got forward without global_scale, need it for {self.strategy}"
                )
            with self._set_aside():
                answer = self._call_forward(observed, given)
                pair = self._scales(global_scale) if answer is self else answer
            return older.as_tensor_pair(pair, f"{name}: forward")
        if "get_qparams" in self._overrides:
            return older.as_tensor_pair(
                older.call_older_method(self.get_qparams, observed, given), f"{name}: get_qparams"
            )
        return self._qparams_by_older_methods(observed, g_idx, global_scale)

    def _qparams_by_older_methods(
        self, observed: torch.Tensor, g_idx: torch.Tensor | None, global_scale: torch.Tensor | None
    ) -> ScalePair:
        pair = older.scales_by_older_methods(self, observed, g_idx, global_scale)
        self.post_calculate_qparams()
        return pair

    def _qparams_for_super_call(
        self, observed: torch.Tensor, g_idx: torch.Tensor | None, global_scale: torch.Tensor | None
    ) -> ScalePair:
        """Return scale and zero point for a subclass that calls `super().get_qparams`.

        The scales of a weight are not kept here, because the subclass may change them. The observer
        keeps the scales that the subclass's `get_qparams` or `forward` returns.
        """
        if global_scale is None and self.strategy == "tensor_group":
            global_scale = self.get_gparam(observed)
        computes = bool(self._overrides & {*older.SCALE_METHODS} - {"get_qparams"})
        if computes or not older.has_equal_groups(g_idx, observed, self.args):
            return self._qparams_by_older_methods(observed, g_idx, global_scale)
        is_kept = self._keeps_statistics or self._decides_range or self.strategy == "tensor"
        if self.base_name != WEIGHT or is_kept:
            self._observe_range(observed, g_idx)
            return self._scales_of_range(global_scale)
        tiles = self._tiles(observed, g_idx)
        self.prepare(tiles)
        return self.weight_scales(tiles, global_scale)

    def _store_scales(
        self, pair: ScalePair, observed: torch.Tensor, g_idx: torch.Tensor | None
    ) -> None:
        """Keep scales, rounded to the format, and the range that they imply."""
        self._pair = self._checked_scales(pair, observed, g_idx, None)
        self._store_range(*older.implied_range(self._pair, self.args, None))

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
        self._global_scale = global_scale.detach().to(torch.float32).reshape(1)
        low, high = self._extremes = older.extremes_of_global_scale(self._global_scale)
        if self.base_name == WEIGHT or self._has_range:
            self._publish_extremes()
        else:
            self._store_range(low.reshape(1), high.reshape(1))

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield scale and zero point, for `scale, zero_point = observer(value)`."""
        qparams = self.qparams()
        yield from (qparams["scale"], qparams["zero_point"])

    def __getitem__(self, place: int) -> torch.Tensor:
        """Return the scale (0) or the zero point (1), for `observer(value)[0]`."""
        return tuple(self)[place]

    @property
    def _num_observed_tokens(self) -> int | None:
        """Number of observed tokens, under llm-compressor's name. None if there are none."""
        return self.tokens or None

    @_num_observed_tokens.setter
    def _num_observed_tokens(self, tokens: int | None) -> None:
        self.tokens = tokens or 0

    def record_observed_tokens(self, observed: torch.Tensor) -> None:
        """Count the tokens of an activation. Weights have no tokens."""
        self.tokens += tokens_in(observed, self.base_name)

    @torch.no_grad()
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """Update the statistics with observations (num_observations, *qparam_shape, group_size)."""
        self._update(tiles_of_observations(observed))

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

    @torch.no_grad()
    def range(self) -> Range:
        """Return the observed range (low, high): float32, shape qparam_shape.

        This is `min_vals` and `max_vals`. Raises ValueError if nothing was observed, or if a
        subclass stored ranges of another shape.
        """
        if self._has_range or self._is_range_changed:
            return self._statistics()
        return self._observed_range()

    def _observed_range(self) -> Range:
        """Return the range of the observed weight, before any change by a subclass."""
        if self._pending_tensor is not None and self.strategy == "tensor_group":
            global_scale = self.get_global_scale()
            return older.implied_range(self._scales(global_scale), self.args, global_scale)
        if self._weight is None:
            return self._statistics()
        return range_of(self._weight) if is_nvfp4(self.args) else self.find_range(self._weight)

    def searched_weight(self) -> Tiles | None:
        """Return the weight from which scales are computed directly, or None if there is none."""
        return None if self._is_range_changed else self._weight

    def extremes(self) -> Range:
        """Return the smallest and the largest observed value: float32 without dimensions.

        They are not finite if an observed value is not finite. If the observer averages or searches
        ranges during observation, or if a subclass changes the range, the extremes of these ranges
        are returned instead. Raises ValueError if nothing was observed.
        """
        follows_range = self._is_range_changed and self._global_scale is None
        if self._extremes is not None and not follows_range:
            return self._extremes
        if self._weight is not None and not follows_range:
            return extremes_of(self._weight)
        low, high = self.range()
        return low.amin(), high.amax()

    def extremes_for_scales(self) -> Range:
        """Return the extremes for which fused inputs get this observer's scale or global scale.

        They are the observed extremes, unless a subclass overrides a method of the global scale.
        """
        names = ("get_global_scale", "global_scale")
        if any(older.is_overridden(type(self), name) for name in names):
            global_scale = self.get_global_scale()
            if global_scale is not None:
                return older.extremes_of_global_scale(global_scale)
        return self.extremes()

    def global_scale(self) -> torch.Tensor | None:
        """Return the global scale that fused observers share: float32 (1,).

        Returns None if the strategy has no global scale.
        """
        return self._shared_global_scale() if self.strategy == "tensor_group" else None

    def _shared_global_scale(self) -> torch.Tensor:
        is_alone = self._fused is None or len(self._fused.extremes) == 1
        if is_alone and self._global_scale is not None:
            return self._global_scale * self.factor
        extremes = self.extremes() if self._fused is None else self._fused_extremes(self._fused)
        return global_scale_of(*extremes) * self.factor

    def get_global_scale(self) -> torch.Tensor | None:
        """Return `global_scale()`, under llm-compressor's name.

        `qparams` calls this method, so that a subclass may override it.
        """
        return self.global_scale()

    @property
    def factor(self) -> float:
        """Factor that reduces the global scale computed from the largest value."""
        return self._factor if self._fused is None else self._fused.factor

    @factor.setter
    def factor(self, factor: float) -> None:
        if self._fused is None:
            self._factor = factor
        else:
            self._fused.factor = factor

    @property
    def is_fitted(self) -> bool:
        """True if `factor` was chosen for the latest observations of all fused observers."""
        return self._fused is not None and self._fused.is_fitted

    def set_fitted(self) -> None:
        """Mark `factor` as chosen, until one of the fused observers observes another tensor."""
        if self._fused is not None:
            self._fused.is_fitted = True

    def fused(self) -> "list[Observer]":
        """Return this observer and the observers that it is fused with, if they still exist."""
        if self._fused is None:
            return [self]
        members = (reference() for reference in self._fused.members)
        return [member for member in members if member is not None]

    @overload
    def get_qparams(
        self, observed: None = None, g_idx: None = None, global_scale: None = None
    ) -> QParamsDict: ...

    @overload
    def get_qparams(
        self,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> ScalePair: ...

    @torch.no_grad()
    def get_qparams(
        self,
        observed: torch.Tensor | None = None,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> QParamsDict | ScalePair:
        """Return scale, zero point and global scale of the observations.

        Raises ValueError if nothing was observed. If `observed` is given, as in older code, observe
        this tensor and return only scale and zero point. An observer that was created with only
        `quantization_args` always returns this pair.
        """
        if observed is not None:
            if self._overrides & {"forward", "get_qparams"}:
                return self._qparams_for_super_call(observed, g_idx, global_scale)
            self._observe(observed, g_idx)
            return self._scales(self.global_scale() if global_scale is None else global_scale)
        qparams = self._qparams()
        return (qparams["scale"], qparams["zero_point"]) if self._is_older else qparams

    @torch.no_grad()
    def qparams(self) -> QParamsDict:
        """Return scale, zero point and global scale.

        Calls `get_qparams` only if a subclass overrides it in its newer form, without `observed`.
        """
        return self.get_qparams() if self.returns_own_qparams else self._qparams()

    @property
    def returns_own_qparams(self) -> bool:
        """True if a subclass overrides `get_qparams` in its newer form, without `observed`."""
        return (
            older.is_overridden(type(self), "get_qparams") and "get_qparams" not in self._overrides
        )

    def _qparams(self) -> QParamsDict:
        global_scale = self.get_global_scale()
        scale, zero_point = self._scales(global_scale)
        return QParamsDict(scale=scale, zero_point=zero_point, global_scale=global_scale)

    def weight_scales(
        self, tiles: Tiles, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale (float32) and zero point (int32) of each group of a weight.

        `global_scale` is the stored global scale. NVFP4 scales hold e4m3 values.
        """
        return scales_of_rows(ranges_of_rows(tiles), tiles, self.args, global_scale)

    def reset(self) -> None:
        """Drop all observations, the token count and the fusion with other observers."""
        self._drop_observation()
        self.min_val, self.max_val = {}, {}
        self.tokens, self._factor = 0, 1.0
        if self._fused is not None:
            self._fused.extremes.pop(self._fused_index, None)
            self._fused.members = [each for each in self._fused.members if each() is not self]
        self._fused = None

    def attach(self, module: torch.nn.Module) -> None:  # noqa: B027
        """Start collecting additional data from the module, if this observer needs any."""

    def detach(self, module: torch.nn.Module) -> None:  # noqa: B027
        """Stop collecting; the observer keeps the statistics."""

    def sync_activation_stats(self) -> list[distributed.Work]:
        """Reduce statistics and token counts over ranks, once, after the last observation.

        Every rank must call this method, even if the rank observed nothing. The reduction is
        complete when the method returns, so the list of pending works is empty. Without a process
        group nothing is reduced.
        """
        if rank_and_size()[1] > 1:
            self.reduce_over_ranks()
        return []

    def reduce_over_ranks(self) -> None:
        """Reduce statistics and token counts, for `sync_activation_stats`."""
        self.tokens = sum(gather(self.tokens))
        declared = older.declared_reductions(type(self))
        if declared is not None:
            self._reduce_declared(declared)
            return
        reduction = self.reduction or ("extremes" if self._overrides else None)
        if reduction is None or self.base_name == WEIGHT:
            return
        self._reduce_extremes()
        local = torch.stack((self.min_vals, self.max_vals)).cpu() if self._has_range else None
        of_ranks = [ends for ends in gather(local) if ends is not None]
        if of_ranks:
            ends = torch.stack(of_ranks)
            mean = ends.to(torch.float32).mean(0).to(ends.dtype)
            extremes = ends[:, 0].amin(0), ends[:, 1].amax(0)
            self._pair = None
            self._store_range(*(mean if reduction == "average" else extremes))

    def _reduce_extremes(self) -> None:
        """Reduce the extremes over all ranks. The global scale is computed from them."""
        rank_extremes = [ends for ends in gather(self._extremes) if ends is not None]
        if rank_extremes:
            lows, highs = zip(*rank_extremes, strict=True)
            self._extremes = torch.stack(lows).amin(), torch.stack(highs).amax()
            self._global_scale = global_scale_of(*self._extremes)

    def _reduce_declared(self, declared: Mapping[str, object]) -> None:
        """Reduce each attribute that a subclass lists in `_act_sync_dict`, with the listed
        operation.
        """
        own = {**vars(self), **self._buffers}
        for name, operation in declared.items():
            local = own.get(name)
            values = [value for value in gather(older.as_cpu_tensor(local)) if value is not None]
            if values:
                setattr(
                    self,
                    name,
                    older.convert_like(local, older.reduce_values(values, operation, name)),
                )
        if {"min_vals", "max_vals"} & declared.keys():
            self._reduce_extremes()
            self._pair = None
            self._publish_extremes()

    @staticmethod
    def fuse(observers: "Iterable[Observer]") -> None:
        """Make observers share the scale that vLLM needs to be equal for their fused layers.

        Strategy tensor_group shares the global scale of the largest observed value. Strategy tensor
        shares the union of the ranges. Other strategies share nothing. Observers may be fused
        before or after they observe. Request quantization parameters only after all fused observers
        have observed a tensor.
        """
        members = list(observers)
        for strategy in ("tensor_group", "tensor"):
            sharing = [observer for observer in members if observer.strategy == strategy]
            fused = FusionState(
                dict.fromkeys(range(len(sharing))), [weakref.ref(each) for each in sharing]
            )
            for index, observer in enumerate(sharing):
                observer._fused, observer._fused_index = fused, index
                observer._publish_extremes()

    def _statistics(self) -> Range:
        if not self.has_statistics:
            raise ValueError(
                f"{self.base_name} observer: got no observation, need one before its range is read"
            )
        low, high = (
            older.with_shape(
                getattr(self, name), self._shape, f"observer {type(self).__name__}: {name}"
            )
            for name in ENDS
        )
        return low, high

    def _scales(self, global_scale: torch.Tensor | None) -> ScalePair:
        """Return scale (float32) and zero point (int32) of the observations.

        `global_scale` is the stored global scale.
        """
        shares_range = (
            self.strategy == "tensor" and self._fused is not None and len(self._fused.extremes) > 1
        )
        if self._is_range_changed:
            scales = self._scales_of_range(global_scale)
            self.post_calculate_qparams()
            return scales
        if self._pending_tensor is not None and self.strategy == "tensor_group":
            observed, g_idx = self._pending_tensor
            pair = self._qparams_from_override(observed, g_idx, global_scale)
            return self._checked_scales(pair, observed, g_idx, global_scale)
        if self._pair is not None and not shares_range:
            return self._pair
        scales = self._scales_of_range(global_scale)
        self.post_calculate_qparams()
        return scales

    def _scales_of_range(self, global_scale: torch.Tensor | None) -> ScalePair:
        weight = self.searched_weight()
        if weight is not None:
            return self.weight_scales(weight, global_scale)
        low, high = self.range()
        if self.strategy == "tensor" and self._fused is not None:
            low, high = (end.expand(low.shape) for end in self._fused_extremes(self._fused))
        return scale_and_zero_point(low, high, self.args, global_scale)

    def _update(self, tiles: Tiles) -> None:
        self.prepare(tiles)
        averages = self.base_name != WEIGHT or (self._is_older and not is_nvfp4(self.args))
        many = self.strategy in ("channel", "group", "block") or is_nvfp4(self.args)
        if averages or not many or self._decides_range:
            new = self.find_range(tiles)
            self._pair = None
            self._store_range(
                *(self.combine(self._statistics(), new) if averages and self._has_range else new)
            )
            return
        order = self._order
        self._drop_observation()
        self._weight, self._order, self._shape = tiles, order, tiles.qparam_shape
        if is_nvfp4(self.args):
            self._extremes = extremes_of(tiles)
        self._publish_extremes()

    def _store_range(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.min_vals, self.max_vals = low, high
        if self._overrides or self._pair is not None:
            self._found = older.copies((low, high))
        self._publish_extremes()

    def _publish_extremes(self) -> None:
        """Store the extremes in the state of fused observers, and reset the global scale's factor.

        A factor that was chosen for earlier observations is not valid for new observations.
        """
        self._factor = 1.0
        if self._fused is None:
            return
        self._fused.factor, self._fused.is_fitted = 1.0, False
        self._update_fused_extremes(self._fused)

    def _update_fused_extremes(self, fused: FusionState) -> None:
        """Store the current extremes in the state of fused observers, if there are any."""
        if self._extremes is not None or self._has_range or self._is_range_changed:
            fused.extremes[self._fused_index] = self.extremes()

    @staticmethod
    def _fused_extremes(fused: FusionState) -> Range:
        """Return the extremes of all fused observers, without dimensions.

        Raises ValueError if one of the observers has not observed anything yet.
        """
        for reference in fused.members:
            member = reference()
            if member is not None:
                # Its range may have been changed since it observed a tensor.
                member._update_fused_extremes(fused)
        observed = [extremes for extremes in fused.extremes.values() if extremes is not None]
        if len(observed) < len(fused.extremes):
            raise ValueError(
                f"fused observers: got observations of {len(observed)} of {len(fused.extremes)}, "
                "need all before a shared scale is requested"
            )
        lows, highs = zip(*observed, strict=True)
        return reduce(torch.minimum, lows), reduce(torch.maximum, highs)

    # Methods of the older generation, to be called or overridden; see vexport.observers.older.

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
        low, high = older.as_tensor_pair(
            older.call_older_method(self.calculate_updated_min_max, observed, given),
            "calculate_updated_min_max",
        )
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
        answer = older.call_older_method(self.calculate_updated_min_max, observed, {})
        return global_scale_of(*older.as_tensor_pair(answer, "calculate_updated_min_max"))

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
        return older.as_tensor_pair(
            older.call_older_method(self.calculate_qparams, observed, given), "calculate_qparams"
        )

    def post_calculate_qparams(self) -> None:  # noqa: B027
        """Do nothing. This method is called after scales were computed, and subclasses override
        it.
        """
