"""The observer: it sees tensors, keeps a range and answers with quantization parameters."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from importlib import import_module
from typing import ClassVar, Literal, Self, TypedDict, TypeVar

import torch
from torch import distributed

from vexport.numerics.ranks import gather, rank_and_size
from vexport.observers.flatten import (
    WEIGHT,
    Tiles,
    flatten_for_calibration,
    layout_of,
    tiles_of,
    tiles_of_observations,
    tokens_in,
)
from vexport.observers.qparams import (
    ObserverArgs,
    global_scale_of,
    is_nvfp4,
    scale_and_zero_point,
    strategy_of,
    with_keywords,
)
from vexport.observers.search import Range, extremes_of, range_of, ranges_of_rows, scales_of_rows
from vexport.records.observer_names import (
    CLASS_SEPARATOR,
    Options,
    OptionsT,
    OptionValue,
    folded,
    read_options,
)

Reduction = Literal["extremes", "average"]
ObserverT = TypeVar("ObserverT", bound="Observer")


class QParamsDict(TypedDict):
    """Scale (float32, per group), zero point (int32, same shape), global scale (float32 (1,) or None)."""

    scale: torch.Tensor
    zero_point: torch.Tensor
    global_scale: torch.Tensor | None


class Observer(torch.nn.Module):
    """Base of all observers.

    `base_name` says what is observed ("weight", "input", "output", "q", "k", "v"); `args` are the
    quantization arguments, of vexport or of compressed-tensors. Keywords come from `args.observer_kwargs` and
    `observer_kwargs`, the latter win. Raises ValueError for what is unknown. After an observation
    `scale, zero_point = observer(value)` works, too.

    A subclass says what range it makes of an observation (`find_range`) and how that is combined with what
    was seen before (`combine`). A weight is not combined: only the last one counts. One that overrides
    `update_statistics_from_observed`, as llm-compressor's do, keeps `min_vals` and `max_vals` itself; without
    `defaults` of its own it takes any keyword and finds it in `self.args.observer_kwargs`.

    The scales of a weight that has many are found when qparams are asked, a tile at a time, so that of large
    weights nothing but these is in memory, and those of NVFP4 are relative to the global scale that `fuse`
    shares. Until then the observer refers to the weight.
    """

    # Shape qparam_shape, absent until something is observed; subclasses may set them, as llm-compressor's do.
    min_vals: torch.Tensor
    max_vals: torch.Tensor
    registry_name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Options] = Options()
    # How statistics of activations are reduced over ranks; None where each observation stands for itself.
    reduction: ClassVar[Reduction | None] = None

    def __init__(self, base_name: str, args: ObserverArgs, **observer_kwargs: OptionValue) -> None:
        super().__init__()
        layout_of(base_name, args)  # refuses a pair without meaning
        self.base_name = base_name
        self.args = with_keywords(args, observer_kwargs)
        self.tokens = 0
        # The extremes of each fused observer by its seat: no observer, so that its weight can be freed.
        self._shared: dict[int, Range | None] | None = None
        self._seat = 0
        # The factor by which the global scale is reduced from that of the largest value.
        self.factor = 1.0
        self._weight: Tiles | None = None
        self.configure(dict(self.args.observer_kwargs or {}))

    @classmethod
    def load_from_registry(
        cls,
        name: str,
        *,
        base_name: str = WEIGHT,
        args: ObserverArgs | None = None,
        quantization_args: ObserverArgs | None = None,
        **observer_kwargs: OptionValue,
    ) -> Self:
        """A new observer by its name; `quantization_args` is what `args` were called before.

        ValueError lists the names.
        """
        arguments = args or quantization_args
        if arguments is None:
            raise ValueError(f"observer {name!r}: got no args, need the quantization arguments")
        return cls.of_name(name)(base_name, arguments, **observer_kwargs)

    @classmethod
    def register(
        cls, name: str | None = None, alias: str | Sequence[str] = ()
    ) -> Callable[[type[ObserverT]], type[ObserverT]]:
        """A decorator that gives a class a name, its own if none is given, and aliases.

        ValueError where another class has one of them.
        """

        def decorate(kind: type[ObserverT]) -> type[ObserverT]:
            names = (name or kind.__name__, *([alias] if isinstance(alias, str) else alias))
            known = cls.by_name()
            for spelling in names:
                if known.get(folded(spelling), kind) is not kind:
                    raise ValueError(
                        f"observer {spelling!r}: got a second class of that name, need one; rename it"
                    )
            kind.registry_name, kind.aliases = names[0], tuple(names[1:])
            return kind

        return decorate

    @classmethod
    def of_name(cls, name: str) -> type[Self]:
        """The class of a registry name, an alias or package.module:Class; ValueError for none."""
        if CLASS_SEPARATOR in name:
            return cls._imported(name)
        known = cls.by_name()
        if folded(name) not in known:
            names = ", ".join(sorted({kind.registry_name for kind in known.values()}))
            raise ValueError(
                f"observer {name!r}: got an unknown name, need one of {names}, or package.module:Class"
            )
        return known[folded(name)]

    @classmethod
    def by_name(cls) -> "dict[str, type[Self]]":
        """Every class by its folded registry name and aliases."""
        return {folded(name): kind for kind in cls.named() for name in (kind.registry_name, *kind.aliases)}

    @classmethod
    def named(cls) -> "Iterator[type[Self]]":
        """Every subclass that has its own registry name."""
        for kind in cls.__subclasses__():
            if "registry_name" in vars(kind):
                yield kind
            yield from kind.named()

    @classmethod
    def _imported(cls, name: str) -> "type[Self]":
        module, _, attribute = name.partition(CLASS_SEPARATOR)
        try:
            kind = getattr(import_module(module), attribute)
        except Exception as error:
            raise ValueError(
                f"observer {name!r}: got {type(error).__name__}: {error}, need a class that can be imported; "
                "install its package, or name its folder in PYTHONPATH"
            ) from error
        if not isinstance(kind, type) or not issubclass(kind, cls):
            raise ValueError(f"observer {name!r}: got {kind!r}, need a subclass of vexport's Observer")
        return kind

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        """Read the keywords; a subclass with more of them overrides this."""
        if not self._keeps_statistics or "defaults" in vars(type(self)):
            self.read(self.defaults, keywords)

    def read(self, defaults: OptionsT, keywords: dict[str, OptionValue]) -> OptionsT:
        """The keywords over `defaults`; ValueError names this observer."""
        return read_options(defaults, keywords, f"observer {self.registry_name}")

    @property
    def has_statistics(self) -> bool:
        """True when something was observed."""
        return self._weight is not None or self._has_range

    @property
    def _has_range(self) -> bool:
        return hasattr(self, "min_vals") and hasattr(self, "max_vals")

    @property
    def strategy(self) -> str:
        """The strategy of scales, by compressed-tensors' name."""
        return strategy_of(self.args)

    @property
    def _keeps_statistics(self) -> bool:
        """Return whether a subclass updates its statistics itself."""
        return type(self).update_statistics_from_observed is not Observer.update_statistics_from_observed

    @property
    def _finds_ranges_last(self) -> bool:
        """True where a subclass changes the range and leaves the scales to the class above it."""
        order = type(self).__mro__
        find, scale = (
            next(place for place, kind in enumerate(order) if name in vars(kind))
            for name in ("find_range", "weight_scales")
        )
        return find < scale

    @torch.no_grad()
    def forward(self, observed: torch.Tensor) -> "Observer":
        """Observe a tensor; an empty one changes nothing."""
        if observed.numel():
            self.record_observed_tokens(observed)
            if self._keeps_statistics:
                flat = flatten_for_calibration(observed, self.base_name, self.args)
                self.update_statistics_from_observed(flat)
                self._deposit()
            else:
                self._update(tiles_of(observed, self.base_name, self.args))
        return self

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Scale and zero point, for `scale, zero_point = observer(value)`."""
        qparams = self.get_qparams()
        yield from (qparams["scale"], qparams["zero_point"])

    def record_observed_tokens(self, observed: torch.Tensor) -> None:
        """Count the tokens of an activation; a weight has none."""
        self.tokens += tokens_in(observed, self.base_name)

    @torch.no_grad()
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """Update the statistics with observations of shape (num_observations, *qparam_shape, group_size)."""
        self._update(tiles_of_observations(observed))

    def prepare(self, tiles: Tiles) -> None:  # noqa: B027
        """Prepare what else is needed to find the ranges of these observations, now or later."""

    def find_range(self, tiles: Tiles) -> Range:
        """The range to keep of one observation: float32, shape qparam_shape."""
        return range_of(tiles)

    def combine(self, old: Range, new: Range) -> Range:
        """The range after a new observation of an activation."""
        return new

    def range(self) -> Range:
        """The range that was seen: (low, high), shape qparam_shape, float32.

        Raises ValueError when nothing was seen.
        """
        if self._weight is None:
            return self._statistics()
        return range_of(self._weight) if is_nvfp4(self.args) else self.find_range(self._weight)

    def extremes(self) -> Range:
        """The smallest and the largest value seen, float32, of no dimension; not finite where one is not.

        Of what is averaged or searched at once, those of the ranges. Raises ValueError when nothing was seen.
        """
        if self._weight is not None and not self._has_range:
            return extremes_of(self._weight)
        low, high = self._statistics()
        return low.amin(), high.amax()

    def global_scale(self) -> torch.Tensor | None:
        """The global scale that fused observers share, float32 (1,); None for strategies without one."""
        if self.strategy != "tensor_group":
            return None
        if self._shared is None:
            return global_scale_of(*self._statistics())
        return global_scale_of(*self._union(self._shared)) * self.factor

    @torch.no_grad()
    def get_qparams(self) -> QParamsDict:
        """Scale, zero point and global scale of what was observed; ValueError when nothing was."""
        global_scale = self.global_scale()
        scale, zero_point = self._scales(global_scale)
        return QParamsDict(scale=scale, zero_point=zero_point, global_scale=global_scale)

    def weight_scales(
        self, tiles: Tiles, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale (float32) and zero point (int32) of each group of a weight, given the stored global scale.

        NVFP4 scales hold e4m3 values.
        """
        return scales_of_rows(ranges_of_rows(tiles), tiles, self.args, global_scale)

    def reset(self) -> None:
        """Drop all observations, the token count and the fused observers."""
        if self._has_range:
            del self.min_vals, self.max_vals
        self._weight = None
        self.tokens = 0
        if self._shared is not None:
            self._shared.pop(self._seat, None)
        self._shared = None

    def attach(self, module: torch.nn.Module) -> None:  # noqa: B027
        """Start gathering from the module what this observer needs besides the observed tensors."""

    def detach(self, module: torch.nn.Module) -> None:  # noqa: B027
        """Stop gathering; the observer keeps the statistics."""

    def sync_activation_stats(self) -> list[distributed.Work]:
        """Reduce statistics and token counts over ranks, once, after the last observation.

        Every rank must call it, also one that saw nothing. The reduction is complete when this returns, so
        the list of works to wait for is empty. Without a process group nothing happens.
        """
        if rank_and_size()[1] > 1:
            self.reduce_over_ranks()
        return []

    def reduce_over_ranks(self) -> None:
        """The reductions of `sync_activation_stats`."""
        self.tokens = sum(gather(self.tokens))
        if self.reduction is None or self.base_name == WEIGHT:
            return
        local = torch.stack((self.min_vals, self.max_vals)).cpu() if self._has_range else None
        of_ranks = [ends for ends in gather(local) if ends is not None]
        if of_ranks:
            ends = torch.stack(of_ranks)
            mean = ends.to(torch.float32).mean(0).to(ends.dtype)
            extremes = ends[:, 0].amin(0), ends[:, 1].amax(0)
            self._keep(*(mean if self.reduction == "average" else extremes))

    @staticmethod
    def fuse(observers: "Iterable[Observer]") -> None:
        """Share the scales that a fused parameter has only once.

        Strategy tensor_group shares the global scale of the largest value seen, strategy tensor the
        union of the ranges; other strategies share nothing. Observers may be fused before or after they
        observe; qparams are asked when all have observed.
        """
        members = list(observers)
        for strategy in ("tensor_group", "tensor"):
            sharing = [observer for observer in members if observer.strategy == strategy]
            shared: dict[int, Range | None] = dict.fromkeys(range(len(sharing)))
            for seat, observer in enumerate(sharing):
                observer._shared, observer._seat, observer.factor = shared, seat, 1.0
                observer._deposit()

    def _statistics(self) -> Range:
        if not self._has_range:
            raise ValueError(
                f"{self.base_name} observer: got no observation, need one before its range is asked"
            )
        return self.min_vals, self.max_vals

    def _scales(self, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if self._weight is not None and self._finds_ranges_last:
            return scale_and_zero_point(*self.find_range(self._weight), self.args, global_scale)
        if self._weight is not None:
            return self.weight_scales(self._weight, global_scale)
        low, high = self._statistics()
        if self.strategy == "tensor" and self._shared is not None:
            low, high = (end.expand(low.shape) for end in self._union(self._shared))
        return scale_and_zero_point(low, high, self.args, global_scale)

    def _update(self, tiles: Tiles) -> None:
        self.prepare(tiles)
        many = self.strategy in ("channel", "group", "block") or is_nvfp4(self.args)
        if self.base_name != WEIGHT or not many:
            new = self.find_range(tiles)
            combines = self._has_range and self.base_name != WEIGHT
            self._keep(*(self.combine(self._statistics(), new) if combines else new))
            return
        self._weight = tiles
        if is_nvfp4(self.args):
            self._keep(*extremes_of(tiles))

    def _keep(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.min_vals, self.max_vals = low, high
        self._deposit()

    def _deposit(self) -> None:
        if self._shared is not None and self._has_range:
            self._shared[self._seat] = self.min_vals.amin(), self.max_vals.amax()

    def _union(self, shared: dict[int, Range | None]) -> Range:
        """The extremes of all fused observers, of no dimension; ValueError where one saw nothing yet."""
        observed = [extremes for extremes in shared.values() if extremes is not None]
        if len(observed) < len(shared):
            raise ValueError(
                f"fused observers: got observations of {len(observed)} of {len(shared)}, "
                "need all before a shared scale is asked"
            )
        lows, highs = zip(*observed, strict=True)
        return reduce(torch.minimum, lows), reduce(torch.maximum, highs)
