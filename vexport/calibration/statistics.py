"""Collect statistics of layers' inputs: ranges for static scales, and the importance of channels.

Searches for weight scales use the importance of the input channels.

For speed, observers of ranges receive only two rows for each activation: the minimum and the
maximum of each channel. The range of any group of channels follows from these rows.
`channel_extremes` compares 16-bit floats as integers, because torch reduces integers several times
faster over tokens. Reducing the floats over groups of 16 channels would take fifty times as long.
"""

import base64
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from vexport.architectures.fusion import moe_layer
from vexport.calibration.capture import watch_attention
from vexport.calibration.data import Samples
from vexport.calibration.gradients import GradientSquares
from vexport.calibration.inputs import (
    Counted,
    GroupInputs,
    RoutedTokens,
    Site,
    Value,
    counted_value,
)
from vexport.calibration.walk import Layer, LayerWalk
from vexport.checkpoint.index import SourceIndex
from vexport.errors import CheckpointFailed, InputError
from vexport.formats.plan import FusionGroup, Plan
from vexport.numerics.ranks import add_up, process_group, rank_and_size
from vexport.observers import Importance, RangeObserver, load_observer
from vexport.observers.flatten import channel_extremes
from vexport.observers.minmax import MemorylessMinMax, MinMax, StaticMinMax
from vexport.records import (
    CalibrationRecord,
    InputRange,
    KeyValueRanges,
    OnProgress,
    Smoothing,
    observer_names,
    silent,
)
from vexport.records.calibration import CALIBRATE
from vexport.rules import calibration as rules

DEFAULT_INPUT_OBSERVER = "static_minmax"
# Observers that need only the minimum and the maximum of each observed tensor.
RANGE_OBSERVERS = (MemorylessMinMax, MinMax, StaticMinMax)
# Strategies that group channels.
CHANNEL_STRATEGIES = ("tensor", "group", "tensor_group")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of inputs so far.

    `inputs` and `importance` are by the name of the linear layer that reads the input. `routed` has
    the number of tokens of each expert, by module of experts. With `all_experts` the statistics of
    every expert are computed from all tokens.

    If only some tokens count, the importance and the numbers of tokens are of these tokens. Ranges
    are of all tokens: a static scale also rounds the tokens that do not count.
    """

    inputs: Mapping[str, RangeObserver]
    importance: Mapping[str, Importance]
    all_experts: bool = True
    routed: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def for_plan(cls, plan: Plan, *, all_experts: bool) -> "Statistics":
        """Return empty statistics for the layers of a plan that need a range or importance."""
        return cls(
            inputs=input_observers(plan),
            importance={
                member.name: Importance.zeros(member.in_features)
                for group in plan.groups
                if group.observer in observer_names.BY_IMPORTANCE and group.rounding == "nearest"
                for member in group.members
            },
            all_experts=all_experts,
        )

    @property
    def allows_batches(self) -> bool:
        """Return True if several rows may be observed at once.

        Other observers than those of the largest range depend on the number of observations.
        """
        return all(observer.reduction == "extremes" for observer in self.inputs.values())

    def needs(self, group: FusionGroup) -> bool:
        """Return True if statistics of a group's input are needed."""
        return any(
            member.name in self.inputs or member.name in self.importance for member in group.members
        )

    def for_groups(self, groups: Sequence[FusionGroup]) -> "Statistics":
        """Return the statistics of these groups' inputs, without counts of routed tokens."""
        names: Collection[str] = {member.name for group in groups for member in group.members}
        inputs = {name: observer for name, observer in self.inputs.items() if name in names}
        importance = {name: sums for name, sums in self.importance.items() if name in names}
        return Statistics(
            inputs=inputs,
            importance=importance,
            all_experts=self.all_experts,
        )

    def add(
        self, inputs: GroupInputs, module: str, value: Value, counted: Counted = None
    ) -> list[tuple[str, torch.Tensor]]:
        """Add the inputs of a module. If `counted` is given, only these tokens of the row count.

        Returns pairs for the inputs: the name of a linear layer that reads the input, and a Boolean
        tensor that is True if the input is finite. The host does not wait for a GPU.
        """
        sites = [site for site in inputs.sites if site.module == module]
        of_counted = value
        if counted is not None:
            sites[0].require_order(counted)
            of_counted = counted_value(value, counted, sites[0].name)
        if isinstance(of_counted, RoutedTokens) and (
            name := moe_layer(sites[0].groups[0].members[0].name)
        ):
            counts = torch.tensor([len(route) for route in of_counted.routes])
            self.routed[name] = self.routed[name] + counts if name in self.routed else counts
        finite = list[tuple[str, torch.Tensor]]()
        last: torch.Tensor | None = None
        squares: Importance | None = None
        for site in sites if self.inputs or self.importance else ():
            for layer, activation in inputs.values(site, value, all_experts=self.all_experts):
                if not activation.numel():
                    continue
                if activation is not last:  # q, k and v share an input
                    last, squares = activation, None
                    rows = channel_extremes(activation)
                    finite.append((layer, torch.isfinite(rows).all()))
                if layer in self.inputs:
                    observe_activation(self.inputs[layer], activation, rows)
                if layer in self.importance and counted is None:
                    squares = squares or Importance.of(activation)
                    self.importance[layer].add(squares)
            if counted is not None:
                self._add_importance(inputs, site, of_counted)
        return finite

    def _add_importance(self, inputs: GroupInputs, site: Site, value: Value) -> None:
        if not any(
            member.name in self.importance for each in site.groups for member in each.members
        ):
            return
        for layer, activation in inputs.values(site, value, all_experts=self.all_experts):
            if layer in self.importance:
                self.importance[layer].add(Importance.of(activation))

    def sync(self) -> None:
        """Reduce the statistics over all ranks. Every rank must call this, also without tokens."""
        for observer in self.inputs.values():
            observer.sync()
        for gathered in self.importance.values():
            gathered.all_reduce()
        add_up(self.routed)

    def ranges(self) -> dict[str, InputRange]:
        """Return the ranges of the input observers, by layer.

        Raises CheckpointFailed if an observer saw no token.
        """
        ranges = dict[str, InputRange]()
        for name, observer in self.inputs.items():
            _require_tokens(
                name,
                observer.tokens,
                purpose="its static input scale",
                alternative="a dynamic scheme",
            )
            low, high = observer.extremes_for_scales()
            ranges[name] = InputRange(low=float(low), high=float(high), tokens=observer.tokens)
        return ranges

    def importances(self) -> dict[str, str]:
        """Return the importance of the channels of inputs, by layer.

        Raises CheckpointFailed if a layer saw no token.
        """
        for name, gathered in self.importance.items():
            _require_tokens(
                name,
                gathered.tokens,
                purpose="the importance of its input channels",
                alternative=f"the observer {observer_names.UNWEIGHTED}",
            )
        return {
            name: encode_channels(gathered.mean()) for name, gathered in self.importance.items()
        }

    def routing(self) -> dict[str, tuple[int, ...]]:
        """Return the numbers of tokens routed to each expert, by module of experts."""
        return {name: tuple(counts.tolist()) for name, counts in self.routed.items()}


def input_observers(plan: Plan) -> dict[str, RangeObserver]:
    """Return an observer for the input of each layer with a static input scale, by layer name."""
    observers = {}
    for group in plan.groups:
        inputs = group.scheme.args.input_activations
        if inputs is not None and inputs.dynamic is not True:
            for member in group.members:
                name = group.input_observer or inputs.observer or DEFAULT_INPUT_OBSERVER
                observers[member.name] = load_observer(
                    name, "input", inputs, group.input_observer_kwargs
                )
    return observers


def observe_activation(observer: RangeObserver, value: torch.Tensor, rows: torch.Tensor) -> None:
    """Pass an activation to an observer, or its extremes `rows` if they give the same range."""
    if type(observer) in RANGE_OBSERVERS and observer.strategy in CHANNEL_STRATEGIES:
        observer.observe(rows)
        observer.tokens += value.numel() // value.shape[-1] - len(rows)
    else:
        observer.observe(value)


def encode_channels(values: torch.Tensor) -> str:
    """Return a vector as text for JSON: base64 of its little-endian float32 bytes."""
    return base64.b64encode(values.cpu().numpy().astype("<f4").tobytes()).decode("ascii")


def _require_tokens(name: str, tokens: int, *, purpose: str, alternative: str) -> None:
    if not tokens:
        raise CheckpointFailed.of(rules.NO_TOKENS, name, purpose=purpose, alternative=alternative)


def calibrate(
    walk: LayerWalk,
    plan: Plan,
    samples: Samples,
    *,
    on_progress: OnProgress = silent,
    all_experts: bool = True,
    smoothing: Mapping[str, Smoothing] | None = None,
    token_weights: GradientSquares | None = None,
) -> CalibrationRecord:
    """Run the samples through the smoothed source, and record ranges, importance and the KV cache.

    With `all_experts` the statistics of every expert are computed from all tokens, otherwise from
    the tokens routed to the expert. If samples have `counted`, the importance of channels is of
    these tokens, and ranges are of all tokens. Each rank runs a part of the samples, and all ranks
    return the statistics of all samples.

    Raises CheckpointFailed if an activation is not finite or a layer saw no token. Raises
    InputError for a model that cannot run layer by layer.
    """
    statistics = Statistics.for_plan(plan, all_experts=all_experts)
    cached = dict[str, KeyValueRanges]()
    if statistics.inputs or statistics.importance or plan.kv_cache:
        with process_group():
            rank, size = rank_and_size()
            rows_of_rank = samples.select(range(rank, len(samples.rows), size))
            text = walk.start(
                rows_of_rank,
                smoothing,
                in_batches=statistics.allows_batches,
                stage=CALIBRATE,
                on_progress=on_progress,
            )
            with watched_tower(walk, plan, statistics), text as hidden:
                watcher = StatisticsWatcher(walk, plan, statistics, cached)
                walk.expect_steps(len(walk.layers) + watcher.watches_head)
                if watcher.watches_layers:
                    walk.forward(hidden, watcher)
                if watcher.watches_head:
                    walk.run_head(hidden, watcher)
            statistics.sync()
            add_up(cached)
            if plan.kv_cache:
                require_observed_cache(walk.index, cached)
    return CalibrationRecord(
        rows=samples.rows,
        digest=samples.digest,
        tokens=samples.counted_tokens,
        ranges=statistics.ranges(),
        importance=statistics.importances(),
        kv_ranges=cached,
        data=samples.data,
        smoothing=smoothing or {},
        token_weights=token_weights or {},
        routed=statistics.routing(),
        files=samples.files,
    )


@contextmanager
def watched_tower(walk: LayerWalk, plan: Plan, statistics: Statistics) -> Iterator[None]:
    """Add the inputs of a plan's groups in a tower to `statistics` inside the block.

    All inputs count: a tower reads pictures, not tokens of the row. Raises CheckpointFailed for an
    input that is not finite, and InputError if an input cannot be observed.
    """
    wanted = [group for group in plan.groups if group.in_tower and statistics.needs(group)]
    inputs = GroupInputs(walk.places, wanted)
    _require_reachable(inputs)

    def take(module: str, value: Value) -> None:
        for name, is_finite in statistics.add(inputs, module, value):
            walk.check(is_finite, walk.not_finite_input(name))

    with inputs.hooked(take, first_only=True):
        yield


class StatisticsWatcher:
    """Adds the inputs of a plan's layers to `statistics`, and keys and values to `cached`."""

    def __init__(
        self,
        walk: LayerWalk,
        plan: Plan,
        statistics: Statistics,
        cached: dict[str, KeyValueRanges],
    ) -> None:
        self._walk = walk
        self._statistics = statistics
        self._cached = cached
        self._watches_cache = bool(plan.kv_cache)
        self._watches_queries = plan.kv_cache == "fp8_attention"
        wanted = [group for group in plan.groups if statistics.needs(group) and not group.in_tower]
        self._groups = walk.places.by_layer(wanted)
        # Names of linear layers that the current row has reached, with Boolean tensors that are
        # True if the layer's input is finite. Tensors let the host continue without waiting for a
        # GPU.
        self._finite: list[tuple[str, torch.Tensor]] = []

    @property
    def watches_layers(self) -> bool:
        """Return True if rows must run through the decoder layers."""
        return self._watches_cache or any(self._groups)

    @property
    def watches_head(self) -> bool:
        """Return True if layers outside the decoder layers are watched."""
        return bool(self._groups[-1])

    def enter(self, layer: Layer) -> None:
        """Watch the inputs of a layer's groups, and its attention."""
        self._layer = layer
        inputs = GroupInputs(self._walk.places, self._groups[layer.number])
        _require_reachable(inputs)

        def take(module: str, value: Value) -> None:
            counted = self._walk.counted_now()
            self._finite.extend(self._statistics.add(inputs, module, value, counted))

        layer.watching.enter_context(inputs.hooked(take, first_only=True))
        if self._watches_cache and not layer.is_head:
            stored_name = self._walk.weights.stored_name
            attention = watch_attention(
                layer.module, layer.name, stored_name, self._cached, queries=self._watches_queries
            )
            layer.watching.enter_context(attention)

    def row(self, index: int, hidden: torch.Tensor) -> None:
        """Let the walk check that all inputs of a row are finite."""
        run = partial(self._layer.run_again, index)
        for name, is_finite in self._finite:
            error = partial(self._walk.not_finite_error, self._layer, index, run, name)
            self._walk.check(is_finite, error)
        self._finite.clear()

    def leave(self, layer: Layer) -> None:
        """Do nothing: a layer needs no further work."""


def _require_reachable(inputs: GroupInputs) -> None:
    """Raise InputError if the input of a group cannot be observed."""
    for name, reason in inputs.unreachable.items():
        raise InputError.of(rules.UNREACHABLE, name, reason=reason)


def require_observed_cache(index: SourceIndex, ranges: Mapping[str, object]) -> None:
    """Raise InputError if no keys and values were observed."""
    if not ranges:
        raise InputError.of(rules.KV_CACHE, f"{index.root}: KV cache")
