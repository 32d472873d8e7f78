"""What calibration text shows of a source that it walks through."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from vexport.calibration.attention import watching_attention
from vexport.calibration.capture import HiddenStates, base_of
from vexport.calibration.data import Samples
from vexport.calibration.gradients import GradientWatcher, TokenWeigher, TokenWeights, walk_back
from vexport.calibration.inputs import GroupInputs, Places
from vexport.calibration.smoothing import Smoother
from vexport.calibration.statistics import Statistics
from vexport.calibration.walk import Layer, LayerWalk, is_finite
from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.numerics.ranks import add_up, on_first, process_group, rank_and_size
from vexport.types import Calibration, FusionGroup, KeyValueRanges, OnProgress, Plan, Smoothing, silent
from vexport.types.calibration import CALIBRATE


def calibrate(
    walk: LayerWalk,
    plan: Plan,
    samples: Samples,
    *,
    on_progress: OnProgress = silent,
    all_experts: bool = True,
    smoothing: Mapping[str, Smoothing] | None = None,
    token_weights: TokenWeights | None = None,
) -> Calibration:
    """Run the samples through the source and record what static scales, importance and the KV cache need.

    With `all_experts` the statistics of every expert see all tokens, else those routed to it; what the model
    computes is the same. The source is read as smoothed. Under torchrun, or in a process group, the samples
    are dealt to the ranks and every rank ends with the statistics of all.

    Raises CheckpointFailed where an activation is not finite or a layer saw no token, InputError for a model
    that cannot run layer by layer.
    """
    seen, cached = Statistics.needed_by(plan, all_experts=all_experts), dict[str, KeyValueRanges]()
    if seen.inputs or seen.importance or plan.kv_cache:
        with process_group():
            rank, size = rank_and_size()
            own = samples.taken(range(rank, len(samples.rows), size))
            text = walk.text(own, smoothing, stage=CALIBRATE, on_progress=on_progress)
            with text as hidden:
                watch = _Watch(walk, plan, seen, cached, hidden)
                for layer in walk.forward():
                    watch.layer(layer)
                watch.behind()
            seen.sync()
            add_up(cached)
            if plan.kv_cache:
                require_cache(walk.index, cached)
    return Calibration(
        rows=samples.rows,
        digest=samples.digest,
        tokens=sum(len(ids) for ids in samples.token_ids),
        ranges=seen.ranges(),
        importance=seen.importances(),
        kv_ranges=cached,
        data=samples.data,
        smoothing=smoothing or {},
        token_weights=token_weights or {},
        routed=seen.routing(),
    )


def look_back(
    walk: LayerWalk,
    samples: Samples,
    *,
    smoothed: Sequence[FusionGroup],
    strength: float,
    weighs_tokens: bool,
    on_progress: OnProgress = silent,
) -> tuple[Mapping[str, Smoothing], TokenWeights]:
    """By how much the inputs of the groups `smoothed` are scaled, and how much tokens count where asked.

    Both come from the same gradients, of all `samples`; the first rank finds them for all. Raises as
    `calibrate`.
    """

    def find() -> tuple[Mapping[str, Smoothing], TokenWeights]:
        smoother = Smoother(smoothed, strength, walk.weights)
        weigher = TokenWeigher([len(ids) for ids in samples.token_ids])
        watchers: list[GradientWatcher] = [weigher] if weighs_tokens else []
        walk_back(walk, samples, [*watchers, smoother] if smoothed else watchers, on_progress)
        return smoother.found, weigher.found()

    return on_first(find)


class _Watch:
    """Runs all samples of this rank through the source, and takes in statistics."""

    def __init__(
        self,
        walk: LayerWalk,
        plan: Plan,
        seen: Statistics,
        cached: dict[str, KeyValueRanges],
        hidden: HiddenStates,
    ) -> None:
        self._walk, self._seen, self._cached, self._hidden = walk, seen, cached, hidden
        self._places = Places(walk.model, walk.weights)
        self._groups = [group for group in plan.groups if seen.wants(group)]
        self._watches_cache = bool(plan.kv_cache)

    def layer(self, layer: Layer) -> None:
        """Run all samples through a decoder layer."""
        inputs = self._inputs(self._places.below(f"{layer.name}.", self._groups))
        watching = watching_attention(layer.module, layer.name, self._walk.weights.stored_name, self._cached)
        with watching if self._watches_cache else nullcontext():
            for position in range(len(self._hidden)):
                run = partial(layer.run, position, self._hidden[position].to(self._walk.device))
                made = self._take(inputs, layer.module, layer.name, position, run)
                assert made is not None
                self._hidden[position] = made

    def behind(self) -> None:
        """Run what is outside the layers, where something there is watched."""
        inside = {one.name for one in self._places.below(f"{self._walk.name}.", self._groups)}
        outside = [group for group in self._groups if group.name not in inside]
        if not outside:
            return
        # An output head is behind the model's base, which alone need not run it.
        model, base = self._walk.model, base_of(self._walk.model)
        name = next(name for name, module in model.named_modules() if module is base)
        in_base = self._places.below(f"{name}." if name else "", outside) == outside
        inputs = self._inputs(outside)
        for position in range(len(self._hidden)):
            part = base if in_base else model
            run = partial(self._walk.run_behind, part, position, self._hidden[position])
            self._take(inputs, model, "", position, run)

    def _inputs(self, groups: Sequence[FusionGroup]) -> GroupInputs:
        """What enters groups; InputError where that of one cannot be seen."""
        inputs = GroupInputs(self._places, groups)
        for name, reason in inputs.unreachable.items():
            need, fix = "a layer whose input can be seen", "use a weight-only or dynamic scheme for it"
            raise InputError(name, got=reason, need=need, fix=fix)
        return inputs

    def _take(
        self,
        inputs: GroupInputs,
        module: torch.nn.Module,
        name: str,
        position: int,
        run: Callable[[], torch.Tensor | None],
    ) -> torch.Tensor | None:
        """Run a sample through a module and take in what enters the groups; what comes out must be finite."""
        not_finite = list[str]()
        with inputs.shown(lambda at, value: not_finite.extend(self._seen.take(inputs, at, value)), once=True):
            made = run()
        if not_finite or (made is not None and not is_finite(made)):
            raise self._walk.not_finite(module, name, position, run, next(iter(not_finite), None))
        return made


def require_cache(index: SourceIndex, seen: Mapping[str, object]) -> None:
    """InputError where no keys and values were seen."""
    if not seen:
        raise InputError(
            f"{index.root}: KV cache",
            got="no attention layer that calls transformers' attention interface",
            need="one, to see keys and values",
            fix="leave the KV cache unquantized",
        )
