"""The weights of a plan rounded while calibration text walks through the model, in two streams.

One stream goes through the source's layers, one through those rounded so far: a layer is rounded for what
the quantized layers before it make of the text (`vexport.quantize.in_order`), and its output, inputs rounded
as its scheme says, is the next layer's input.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from vexport.calibration.attention import CachedStates, watching_attention
from vexport.calibration.capture import HiddenStates, hidden_states
from vexport.calibration.data import Samples
from vexport.calibration.forward import require_cache
from vexport.calibration.inputs import GroupInputs, Value
from vexport.calibration.statistics import Statistics
from vexport.calibration.walk import Layer, LayerWalk, OnLayer, is_finite, quiet
from vexport.files import atomic_path, from_json, to_json, write_text
from vexport.formats.packing.base import Array
from vexport.numerics.ranks import add_up, gather, on_first, rank_and_size
from vexport.quantize.in_order import InOrder, NotedRows, WaitingRows
from vexport.quantize.model import QuantizedModel
from vexport.quantize.stream import Stored
from vexport.rounding.settings import strength_of
from vexport.types import Calibration, FusionGroup, Plan
from vexport.types.rounding import LayerRounding, RoundingReport

REPORT = "rounding.json"
# Rows of the source's stream that are followed where only the report asks for them.
COMPARED_ROWS = 4


class StoredTensors(Stored):
    """Tensors of several files by name, each read when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Array:
        with safe_open(self._files[name], framework="np") as opened:
            value: Array = opened.get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class RoundedLayers:
    """The bytes that replace the weights of each rounded decoder layer, in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, number: int) -> tuple[Stored, LayerRounding] | None:
        """The bytes of a finished layer by tensor name, and how; None where it is not finished."""
        file, told = self._files(number)
        if not told.is_file():
            return None
        with safe_open(file, framework="np") as opened:
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return stored, from_json(LayerRounding, told)

    def how(self) -> tuple[LayerRounding, ...]:
        """How the finished layers were rounded, in order."""
        return tuple(from_json(LayerRounding, file) for file in sorted(self._folder.glob("layer-*.json")))

    def put(self, number: int, stored: Stored, how: LayerRounding) -> None:
        """Keep a finished layer."""
        file, told = self._files(number)
        with atomic_path(file) as temporary:
            save_file({name: np.ascontiguousarray(value) for name, value in stored.items()}, temporary)
        write_text(told, to_json(how))

    def tensors(self) -> StoredTensors:
        """The bytes of all finished layers."""
        where = dict[str, Path]()
        for file in sorted(self._folder.glob("layer-*.safetensors")):
            with safe_open(file, framework="np") as opened:
                where |= dict.fromkeys(opened.keys(), file)
        return StoredTensors(where)

    def _files(self, number: int) -> tuple[Path, Path]:
        name = f"layer-{number:04d}"
        return self._folder / f"{name}.safetensors", self._folder / f"{name}.json"


def round_weights(
    walk: LayerWalk,
    plan: Plan,
    calibration: Calibration,
    samples: Samples,
    folder: Path,
    *,
    on_layer: OnLayer = quiet,
    all_experts: bool = True,
) -> tuple[Mapping[str, Array], RoundingReport]:
    """The bytes that replace the weights, by tensor name, read as they are asked for; how they were rounded.

    Finished layers lie in `folder`: a call that was broken off is continued by the next one. Torchrun's ranks
    call it together; each runs its own rows, all see the `folder`, and the first one writes there. With
    `all_experts` static scales of experts are those of all tokens, else of those routed to them.

    Raises CheckpointFailed where a hidden state is not finite or a static scale's input saw no token,
    InputError for a model that cannot run layer by layer and a weight that is not finite.
    """
    done, told = RoundedLayers(folder), folder / REPORT
    if not on_first(told.is_file):
        rank, size = rank_and_size()
        statistics = Statistics.needed_by(plan, all_experts=all_experts)
        own = samples.taken(range(rank, len(samples.rows), size))
        with walk.text(own, calibration.smoothing) as source, hidden_states() as quantized:
            tokens = sum(map(len, samples.token_ids))
            rounding = RoundingWalk(walk, plan, calibration, statistics, done, source, quantized, tokens)
            rounding.run(on_layer)
        if rank == 0:
            report = RoundingReport(layers=done.how())
            if plan.attention:
                require_cache(walk.index, report.cached)
            write_text(told, to_json(report))
    return done.tensors(), on_first(lambda: from_json(RoundingReport, told))


class RoundingWalk:
    """Rounds the groups of a plan, layer by layer, for text of so many `tokens` on all ranks."""

    def __init__(
        self,
        walk: LayerWalk,
        plan: Plan,
        calibration: Calibration,
        statistics: Statistics,
        done: RoundedLayers,
        source: HiddenStates,
        quantized: HiddenStates,
        tokens: int,
    ) -> None:
        self._walk, self._plan, self._statistics, self._done = walk, plan, statistics, done
        self._source, self._quantized, self._tokens = source, quantized, tokens
        # What static scales and searches need of inputs is filled in as text comes to each layer.
        self._ranges, self._importance = dict(calibration.ranges), dict(calibration.importance)
        calibration = replace(calibration, ranges=self._ranges, importance=self._importance)
        self._model = QuantizedModel(walk, calibration)
        self._refits = any(strength_of(group).strength > 0 for group in plan.groups)
        # The source's rows that are followed, by their positions among this rank's.
        (rank, size), rows = rank_and_size(), range(len(source))
        self._followed = [one for one in rows if self._refits or rank + one * size < COMPARED_ROWS]

    def run(self, on_layer: OnLayer) -> None:
        """Round everything."""
        for position in range(len(self._source)):
            self._quantized.append(self._source[position])
        self._walk.forward(self._layer, on_layer)
        self._behind()

    def _layer(self, layer: Layer) -> None:
        groups = self._model.places.below(f"{layer.name}.", self._plan.groups)
        inputs = self._inputs(groups)
        exact = self._follow(inputs, partial(self._run_source, layer))
        known = on_first(lambda: self._done.get(layer.number))
        if known is not None:
            stored, learnt = known
            self._learn(learnt)
            rounded = [one for group in groups for one in self._model.layers_of(group, stored)]
            with self._model.applied(rounded):
                for position in range(len(self._quantized)):
                    self._run(layer, position)
            return
        cached = dict[str, CachedStates]()
        watching = watching_attention(layer.module, layer.name, self._walk.weights.stored_name, cached)
        runs = [partial(self._run, layer, position) for position in range(len(self._quantized))]
        with watching if self._plan.attention else nullcontext():
            stored, learnt = self._in_order(groups, inputs).round(WaitingRows(runs), exact)
        add_up(cached)
        error, ranges = self._state_error(), {name: states.ranges() for name, states in cached.items()}
        self._put(layer.number, stored, replace(learnt, state_error=error, cached=ranges))

    def _behind(self) -> None:
        """Round what is not in a decoder layer, an output head say."""
        number, inside = len(self._walk.layers), f"{self._walk.name}."
        within = {group.name for group in self._model.places.below(inside, self._plan.groups)}
        groups = [group for group in self._plan.groups if group.name not in within]
        if not groups or on_first(lambda: self._done.get(number)) is not None:
            return
        inputs = self._inputs(groups)
        exact = self._follow(inputs, self._source_logits) if inputs.sites else []
        runs = [partial(self._logits, position) for position in range(len(self._quantized))]
        rows = NotedRows(runs if inputs.sites else [])
        self._put(number, *self._in_order(groups, inputs).round(rows, exact))

    def _in_order(self, groups: Sequence[FusionGroup], inputs: GroupInputs) -> InOrder:
        model, seen = self._model, self._statistics
        return InOrder(model, groups, inputs, seen, learn=self._learn, text=self._tokens)

    def _learn(self, learnt: LayerRounding) -> None:
        """Make what inputs showed known to all that asks for static scales or importance."""
        self._ranges.update(learnt.ranges)
        self._importance.update(learnt.importance)

    def _inputs(self, groups: Sequence[FusionGroup]) -> GroupInputs:
        """What enters those of the groups that text decides about."""
        wanted = [one for one in groups if one.rounding != "nearest" or self._statistics.wants(one)]
        return GroupInputs(self._model.places, wanted)

    def _follow(self, inputs: GroupInputs, run: Callable[[int], None]) -> list[dict[str, Value]]:
        """Run rows of the source's stream: what entered of each, where a refit asks for it."""
        if not self._refits:
            for position in self._followed:
                run(position)
            return [{} for _ in range(len(self._source))]
        exact = list[dict[str, Value]]()
        for position in self._followed:
            with inputs.noted() as noted:
                run(position)
            exact.append(noted)
        return exact

    def _run_source(self, layer: Layer, position: int) -> None:
        self._source[position] = layer.run(position, self._source[position].to(self._walk.device))

    def _run(self, layer: Layer, position: int) -> None:
        """Run one row of the quantized stream."""

        def run() -> torch.Tensor:
            return layer.run(position, self._quantized[position].to(self._walk.device))

        made = run()
        if not is_finite(made):
            raise self._walk.not_finite(layer.module, layer.name, position, run)
        self._quantized[position] = made

    def _source_logits(self, position: int) -> None:
        self._walk.logits(position, self._source[position])

    def _logits(self, position: int) -> None:
        self._walk.logits(position, self._quantized[position])

    def _state_error(self) -> float:
        """|h~ - h|^2 / |h|^2 behind a layer, over the rows that are followed. All ranks call."""
        signal = noise = 0.0
        for position in self._followed:
            exact = self._source[position].to(torch.float32)
            signal += float(exact.square().sum())
            noise += float((self._quantized[position].to(torch.float32) - exact).square().sum())
        signals, noises = zip(*gather((signal, noise)), strict=True)
        return sum(noises) / sum(signals) if sum(signals) else 0.0

    def _put(self, number: int, stored: Stored, how: LayerRounding) -> None:
        """Keep a finished layer: on the first rank."""
        if rank_and_size()[0] == 0:
            self._done.put(number, stored, how)
