"""Round the weights of a plan while two streams of calibration text run through the model.

The first stream goes through the source's layers, the second through the layers rounded so far. A
layer is rounded for its input in the quantized stream. The output of the rounded layer, with inputs
rounded by their schemes, is the next layer's input.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from vexport.calibration.attention import causal_attention
from vexport.calibration.capture import watch_attention
from vexport.calibration.data import Samples
from vexport.calibration.inputs import GroupInputs, Value, counted_rows
from vexport.calibration.model import HiddenStates
from vexport.calibration.statistics import Statistics, require_observed_cache
from vexport.calibration.walk import Layer, LayerWalk
from vexport.files import from_json, to_json, write_text
from vexport.formats.packing.base import Array
from vexport.formats.plan import FusionGroup, Plan
from vexport.numerics.ranks import add_up, gather, on_first, rank_and_size
from vexport.outputs.manifest import record
from vexport.quantize.gptq import strength_of
from vexport.quantize.group_rounding import round_groups
from vexport.quantize.input_moments import InputMoments
from vexport.quantize.quantized_model import QuantizedModel
from vexport.quantize.rounded_layers import RoundedLayers
from vexport.quantize.stream import Stored
from vexport.quantize.waiting_rows import RecordedRows, Rows, WaitingRows
from vexport.records import (
    CalibrationRecord,
    KeyValueRanges,
    LinearPlan,
    OnProgress,
    silent,
)
from vexport.records.calibration import ROUND, GroupRounding, LayerRounding, RoundingReport

LOG = logging.getLogger(__name__)
REPORT = "rounding.json"
# Number of rows of the source's stream that run if only the report of errors needs the stream.
COMPARED_ROWS = 4


def round_weights(
    walk: LayerWalk,
    plan: Plan,
    calibration: CalibrationRecord,
    samples: Samples,
    folder: Path,
    *,
    on_progress: OnProgress = silent,
    all_experts: bool = True,
) -> tuple[Stored, RoundingReport]:
    """Return the bytes that replace the weights, by tensor name, and how they were rounded.

    The bytes are read from `folder` when they are needed. All ranks need access to the folder, and
    the first rank writes it. If the call is interrupted, the next call resumes after the layers in
    the folder. If `all_experts` is set, static scales of experts are computed from all tokens.
    Otherwise, each expert's scales are computed from its routed tokens.

    Raises CheckpointFailed if a hidden state is not finite or no token reached the input of a
    static scale. Raises InputError for a model that cannot run layer by layer and for a weight that
    is not finite.
    """
    report_file = folder / REPORT
    if not on_first(report_file.is_file):
        rank, size = rank_and_size()
        done = RoundedLayers(folder)
        statistics = Statistics.for_plan(plan, all_experts=all_experts)
        rows_of_rank = samples.select(range(rank, len(samples.rows), size))
        text = walk.start(
            rows_of_rank,
            calibration.smoothing,
            in_batches=statistics.allows_batches,
            stage=ROUND,
            on_progress=on_progress,
        )
        with causal_attention(walk.device), text as source:
            watcher = RoundingWatcher(
                walk, plan, calibration, statistics, done, source, samples.counted_tokens
            )
            rounds_head = watcher.rounds_head
            walk.expect_steps(len(walk.layers) + rounds_head)
            if rank == 0:
                _note_rounded_layers(done, len(walk.layers))
            walk.forward(source, watcher, rows=watcher.followed_rows)
            if rounds_head:
                walk.run_head(source, watcher, rows=watcher.rows_to_head)
        if rank == 0:
            _write_report(report_file, walk, plan, done)
    report = on_first(lambda: from_json(RoundingReport, report_file))
    return RoundedLayers(folder), report


def _note_rounded_layers(done: RoundedLayers, layers: int) -> None:
    """Print a note if an earlier call has rounded some layers, because progress begins at 1."""
    rounded = sum(done.report_of(number) is not None for number in range(layers))
    if rounded:
        LOG.info(
            "note: %d of %d layers are already rounded; the text only runs through them again",
            rounded,
            layers,
        )


def _write_report(file: Path, walk: LayerWalk, plan: Plan, done: RoundedLayers) -> None:
    layers = map(done.report_of, range(len(walk.layers) + 1))
    report = RoundingReport(layers=tuple(layer for layer in layers if layer is not None))
    if plan.attention:
        require_observed_cache(walk.index, report.cached)
    record(file)
    write_text(file, to_json(report))


class RoundingWatcher:
    """Watches the source's stream, and rounds a layer when all rows have run through it.

    The watcher itself runs the stream of the quantized model. `tokens` is the number of counted
    tokens on all ranks.
    """

    def __init__(
        self,
        walk: LayerWalk,
        plan: Plan,
        calibration: CalibrationRecord,
        statistics: Statistics,
        done: RoundedLayers,
        source: HiddenStates,
        tokens: int,
    ) -> None:
        self._walk = walk
        self._plan = plan
        self._statistics = statistics
        self._done = done
        self._source = source
        self._tokens = tokens
        self._model = QuantizedModel(walk, calibration)
        self._groups = walk.places.by_layer(plan.groups)
        self._refits = _is_refit(plan.groups)
        self._quantized = HiddenStates()
        for index in range(len(source)):
            self._quantized.append(source[index])
        # `GroupInputs.recorded_source` of each row, for a refit.
        self._exact: list[dict[str, Value]] = []

    @property
    def followed_rows(self) -> Sequence[int]:
        """Return the rows of the source's stream to run: all rows for a refit, otherwise a
        few to compare.
        """
        rank, size = rank_and_size()
        return [
            index
            for index, rows in enumerate(self._walk.batches)
            if self._refits or rank + rows[0] * size < COMPARED_ROWS
        ]

    @property
    def rows_to_head(self) -> Sequence[int]:
        """Return the rows of the source's stream to run through the head: all rows if a
        refit rounds it.
        """
        return self.followed_rows if _is_refit(self._groups[-1]) else ()

    @property
    def rounds_head(self) -> bool:
        """Return True if groups outside the decoder layers must be rounded.

        Every rank must call this.
        """
        return bool(self._groups[-1]) and self._report_of(len(self._walk.layers)) is None

    def enter(self, layer: Layer) -> None:
        """Record the inputs and outputs of the source's layer, if a refit needs them."""
        self._inputs = self._inputs_of(self._groups[layer.number])
        self._exact = [{} for _ in range(len(self._source))]
        self._recorded: dict[str, Value] = {}
        if self._refits:
            self._recorded = layer.watching.enter_context(self._inputs.recorded_source())

    def row(self, index: int, hidden: torch.Tensor) -> None:
        """Keep the recorded values of a row."""
        self._exact[index] = dict(self._recorded)
        self._recorded.clear()

    def leave(self, layer: Layer) -> None:
        """Round a layer and run the quantized stream through it."""
        known = None if layer.is_head else self._report_of(layer.number)
        if layer.is_head:
            self._round_head(layer)
        elif known is None:
            self._round(layer)
        else:
            self._repeat(layer, known)
        self._exact.clear()

    def _report_of(self, number: int) -> LayerRounding | None:
        """Return how an earlier call rounded a layer, or None. Every rank must call this."""
        return on_first(lambda: self._done.report_of(number))

    def _repeat(self, layer: Layer, known: LayerRounding) -> None:
        self._model.record_statistics(known)
        groups = self._groups[layer.number]
        rounded = dict[LinearPlan, torch.Tensor]()
        for group in groups:
            rounded |= self._model.weights_of(group, self._done)
        with self._model.apply_groups(groups, rounded):
            for index in range(len(self._quantized)):
                self._run(layer, index)
            self._walk.settle()

    def _round(self, layer: Layer) -> None:
        rows = WaitingRows(self._runs(partial(self._run, layer)))
        cached = dict[str, KeyValueRanges]()
        stored_name = self._walk.weights.stored_name
        queries = self._plan.kv_cache == "fp8_attention"
        watching = watch_attention(layer.module, layer.name, stored_name, cached, queries=queries)
        with watching if self._plan.attention else nullcontext():
            stored, report = self._rounder(layer).round(rows, self._exact)
        add_up(cached)
        report = replace(report, state_error=self._state_error(), cached=cached)
        self._store_layer(layer.number, stored, report)

    def _round_head(self, layer: Layer) -> None:
        runs = self._runs(lambda index: layer.run(index, self._quantized[index]))
        rows = RecordedRows(runs if self._inputs.sites else [])
        exact = self._exact if self._inputs.sites else []
        stored, report = self._rounder(layer).round(rows, exact)
        self._store_layer(layer.number, stored, report)

    def _rounder(self, layer: Layer) -> "LayerRounder":
        groups = self._groups[layer.number]
        return LayerRounder(
            self._walk, self._model, groups, self._inputs, self._statistics, self._tokens
        )

    def _inputs_of(self, groups: Sequence[FusionGroup]) -> GroupInputs:
        wanted = [
            group
            for group in groups
            if group.rounding != "nearest" or self._statistics.needs(group)
        ]
        return GroupInputs(self._walk.places, wanted)

    def _runs(self, run: Callable[[int], object]) -> list[Callable[[], object]]:
        return [partial(run, index) for index in range(len(self._quantized))]

    def _run(self, layer: Layer, index: int) -> None:
        output = self._walk.run_row(layer, index, self._quantized[index])
        self._walk.replace(self._quantized, index, output)

    def _state_error(self) -> float:
        """Return the relative error |h~ - h|^2 / |h|^2 of a layer's output, over the counted tokens
        of the followed rows.

        h are the hidden states of the source, and h~ those of the quantized model. Every rank must
        call this.
        """
        powers = list[torch.Tensor]()
        for index in self.followed_rows:
            counted = self._walk.counted_of(index)
            source, quantized = map(
                self._walk.on_device, (self._source[index], self._quantized[index])
            )
            exact = counted_rows(source, counted, "").to(torch.float32)
            made = counted_rows(quantized, counted, "").to(torch.float32)
            powers.append(torch.stack((exact.square().sum(), (made - exact).square().sum())))
        signal = noise = 0.0
        # The host waits for a GPU only once.
        for signal_of_row, noise_of_row in torch.stack(powers).tolist() if powers else ():
            signal += signal_of_row
            noise += noise_of_row
        signals, noises = zip(*gather((signal, noise)), strict=True)
        return sum(noises) / sum(signals) if sum(signals) else 0.0

    def _store_layer(self, number: int, stored: Stored, report: LayerRounding) -> None:
        if rank_and_size()[0] == 0:
            self._done.store_layer(number, stored, report)


def _is_refit(groups: Sequence[FusionGroup]) -> bool:
    return any(strength_of(group).strength > 0 for group in groups)


class LayerRounder:
    """Rounds the groups of a layer in the order in which rows reach them.

    All rows stop in front of a module. From their inputs, static scales and importance are
    computed, and then the rounded weights. The rows continue through the rounded module to the next
    module. `total_tokens` is the number of counted tokens on all ranks.
    """

    def __init__(
        self,
        walk: LayerWalk,
        model: QuantizedModel,
        groups: Sequence[FusionGroup],
        inputs: GroupInputs,
        statistics: Statistics,
        total_tokens: int,
    ) -> None:
        self._walk = walk
        self._model = model
        self._groups = groups
        self._inputs = inputs
        self._statistics = statistics
        self._total_tokens = total_tokens
        self._stored = dict[str, Array]()
        self._how = dict[str, GroupRounding]()
        self._report = LayerRounding(groups=(), state_error=0.0)
        self._weights = dict[LinearPlan, torch.Tensor]()

    def round(self, rows: Rows, exact: Sequence[dict[str, Value]]) -> tuple[Stored, LayerRounding]:
        """Return the bytes that replace the weights, and how each group was rounded. Every rank
        must call this.

        `exact` has `GroupInputs.recorded_source` of each row, which a refit needs. Values are
        removed from it after their use. When this returns, all rows have run through the
        rounded layer.
        """
        sites = self._inputs.sites
        reached = {group.name for site in sites for group in site.groups}
        with ExitStack() as block:
            block.enter_context(self._model.rounding_inputs(self._groups))
            others = [group for group in self._groups if group.name not in reached]
            self._round(others, self._moments(self._inputs.of_module(None)), block)
            block.enter_context(rows.stopped_at(self._inputs))
            left = list(self._inputs.modules)
            while left:
                waiting = set[str]().union(*gather(rows.names))
                name = next((name for name in left if name in waiting), left[0])
                left.remove(name)
                self._round_module(name, rows, exact, block)
                rows.release(name)
            self._walk.settle()
        fallbacks = {
            name: GroupRounding(name=name, fallback=reason)
            for name, reason in self._inputs.unreachable.items()
        }
        rounded = [group.name for site in sites for group in site.groups_rounded_by_text]
        how = fallbacks | self._how
        groups = tuple(how[name] for name in (*fallbacks, *rounded))
        return self._stored, replace(self._report, groups=groups)

    def _round_module(
        self, name: str, rows: Rows, exact: Sequence[dict[str, Value]], block: ExitStack
    ) -> None:
        inputs = self._inputs.of_module(name)
        groups = [group for site in inputs.sites for group in site.groups]
        self._observe(inputs, groups, name, rows, len(exact))
        moments = self._moments(inputs)
        for index, row in enumerate(exact):
            counted, number = self._walk.counted_of(index), len(self._walk.batches[index])
            moments.add(rows.recorded_input(index, name), row, counted, rows=number)
            row.pop(name, None)
        self._round(groups, moments, block)

    def _moments(self, inputs: GroupInputs) -> InputMoments:
        return InputMoments(self._model, inputs, total_tokens=self._total_tokens)

    def _observe(
        self,
        inputs: GroupInputs,
        groups: Sequence[FusionGroup],
        name: str,
        rows: Rows,
        number: int,
    ) -> None:
        statistics = self._statistics.for_groups(groups)
        for index in range(number):
            for module, value in rows.recorded_input(index, name).items():
                statistics.add(inputs, module, value, self._walk.counted_of(index))
        statistics.sync()
        report = self._report
        self._report = replace(
            report,
            ranges={**report.ranges, **statistics.ranges()},
            importance={**report.importance, **statistics.importances()},
            routed={**report.routed, **statistics.routing()},
        )
        self._model.record_statistics(self._report)

    def _round(
        self, groups: Sequence[FusionGroup], moments: InputMoments, block: ExitStack
    ) -> None:
        stored, how = round_groups(self._model, moments, groups)
        self._stored |= stored
        self._how |= how
        for group in groups:
            self._weights |= self._model.weights_of(group, stored)
        # One parameter can hold weights of several groups that are not all rounded at once.
        parameter_of = self._model.places.parameter_of
        changed = {parameter_of(member) for group in groups for member in group.members}
        whole = {
            member: weight
            for member, weight in self._weights.items()
            if parameter_of(member) in changed
        }
        block.enter_context(self._model.with_weights(whole))
