"""The weights of a plan rounded while calibration text walks through the model, in two streams.

One stream goes through the source's layers, one through those rounded so far: a layer is rounded
for what the quantized layers before it make of the text, and its output, inputs rounded as its
scheme says, is the next layer's input. Rows of text wait in front of a module until its weights are
rounded: the forward of each runs in a greenlet, all in one thread, one at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from greenlet import getcurrent, greenlet
from safetensors import safe_open
from safetensors.numpy import save_file

from vexport.bus_errors import install_bus_error_handler
from vexport.calibration.capture import watching_attention
from vexport.calibration.data import Samples
from vexport.calibration.inputs import GroupInputs, Noted, Value
from vexport.calibration.model import HiddenStates
from vexport.calibration.statistics import Statistics, require_cache
from vexport.calibration.walk import Layer, LayerWalk
from vexport.files import atomic_path, from_json, to_json, write_text
from vexport.formats.packing.base import Array
from vexport.formats.plan import FusionGroup, Plan
from vexport.numerics.ranks import add_up, gather, on_first, rank_and_size
from vexport.outputs.manifest import record
from vexport.quantize.gptq import strength_of
from vexport.quantize.group_rounding import SiteSums
from vexport.quantize.quantized_model import QuantizedModel
from vexport.quantize.stream import Stored
from vexport.records import CalibrationRecord, KeyValueRanges, LinearPlan, OnProgress, silent
from vexport.records.calibration import ROUND, GroupRounding, LayerRounding, RoundingReport

REPORT = "rounding.json"
# Rows of the source's stream to run when only the report needs them.
COMPARED_ROWS = 4
# The module that a row waits for, and its input.
Stop = tuple[str, Value]


class WaitingRows:
    """The rows of one stream in a decoder layer; each of `runs` is the forward of one."""

    def __init__(self, runs: Sequence[Callable[[], None]]) -> None:
        self._rows = [greenlet(run) for run in runs]
        self._stops: list[Stop | None] = [None] * len(runs)
        self._passed: set[str] = set()

    @contextmanager
    def stopping(self, inputs: GroupInputs) -> Iterator[None]:
        """Stop rows in front of the modules of these inputs inside the block; they run to the first
        one.
        """
        with inputs.shown(self._stop):
            for position in range(len(self._rows)):
                self._go_on(position)
            yield

    def _stop(self, name: str, value: Value) -> None:
        row = getcurrent()
        if name not in self._passed:
            assert row.parent is not None
            row.parent.switch((name, value))

    def _go_on(self, position: int) -> None:
        self._stops[position] = None
        self._stops[position] = self._rows[position].switch()

    @property
    def names(self) -> set[str]:
        """The modules that rows wait in front of; none when all are through the layer."""
        return {stop[0] for stop in self._stops if stop is not None}

    def noted(self, position: int, name: str) -> Noted:
        """The input of this module, of a row that waits there."""
        stop = self._stops[position]
        return {name: stop[1]} if stop is not None and stop[0] == name else {}

    def let_through(self, name: str) -> None:
        """Release the rows that wait in front of a module, and all that reach it later."""
        self._passed.add(name)
        for position, stop in enumerate(self._stops):
            if stop is not None and stop[0] == name:
                self._go_on(position)


class NotedRows:
    """Rows that run to the last of some inputs and no further: what is rounded there changes none
    of them.
    """

    def __init__(self, runs: Sequence[Callable[[], None]]) -> None:
        self._runs = runs
        self._seen: list[dict[str, Value]] = []

    @contextmanager
    def stopping(self, inputs: GroupInputs) -> Iterator[None]:
        """Record the inputs of these modules."""
        for run in self._runs:
            with inputs.noted(only=True) as inputs_of_row:
                run()
            self._seen.append(inputs_of_row)
        yield

    @property
    def names(self) -> set[str]:
        """The modules that rows come to."""
        return set[str]().union(*self._seen)

    def noted(self, position: int, name: str) -> Noted:
        """The input of this module, of a row."""
        inputs_of_row = self._seen[position]
        return {name: inputs_of_row[name]} if name in inputs_of_row else {}

    def let_through(self, name: str) -> None:
        """Drop the recorded inputs of a module."""
        for inputs_of_row in self._seen:
            inputs_of_row.pop(name, None)


Rows = WaitingRows | NotedRows


class InOrder:
    """The groups of one layer, and the inputs of those that text decides.

    Rows that wait in front of a module decide static scales and importance, then its weights, and
    go on through it as rounded. `text` is the number of tokens of all rows.
    """

    def __init__(
        self,
        model: QuantizedModel,
        groups: Sequence[FusionGroup],
        inputs: GroupInputs,
        statistics: Statistics,
        text: int,
    ) -> None:
        self._model, self._groups, self._inputs, self._statistics = (
            model,
            groups,
            inputs,
            statistics,
        )
        self._text = text
        self._stored, self._how = dict[str, Array](), dict[str, GroupRounding]()
        self._learnt = LayerRounding(groups=(), state_error=0.0)
        self._weights = dict[LinearPlan, torch.Tensor]()

    def round(self, rows: Rows, exact: Sequence[dict[str, Value]]) -> tuple[Stored, LayerRounding]:
        """The bytes that replace the weights, and how each group was rounded. All ranks call.

        `exact` has what enters the source's layer of each row, where a refit asks for it; what was
        used is taken out. In the end all waiting rows have gone through the layer as it was
        rounded.
        """
        inputs, reached = (
            self._inputs,
            {group.name for site in self._inputs.sites for group in site.groups},
        )
        with ExitStack() as block:
            block.enter_context(self._model.rounding_inputs(self._groups))
            others = [group for group in self._groups if group.name not in reached]
            self._round(others, self._sums(inputs.only(None)), block)
            block.enter_context(rows.stopping(inputs))
            left = list(inputs.modules)
            while left:
                waiting = set[str]().union(*gather(rows.names))
                name = next((name for name in left if name in waiting), left[0])
                left.remove(name)
                here = inputs.only(name)
                self._observe(here, name, rows, len(exact))
                sums = self._sums(here)
                for position, row in enumerate(exact):
                    sums.add(rows.noted(position, name), row)
                    row.pop(name, None)
                self._round([group for site in here.sites for group in site.groups], sums, block)
                rows.let_through(name)
        fallbacks = {
            name: GroupRounding(name=name, fallback=reason)
            for name, reason in inputs.unreachable.items()
        }
        order = [*fallbacks, *(group.name for site in inputs.sites for group in site.rounded)]
        how = fallbacks | self._how
        return self._stored, replace(self._learnt, groups=tuple(how[name] for name in order))

    def _sums(self, inputs: GroupInputs) -> SiteSums:
        return SiteSums(self._model, inputs, text=self._text)

    def _observe(self, here: GroupInputs, name: str, rows: Rows, number: int) -> None:
        """Update static scales and importance from an input, and reduce them over the ranks."""
        groups = [group for site in here.sites for group in site.groups]
        statistics = self._statistics.only(groups)
        for position in range(number):
            for at, value in rows.noted(position, name).items():
                statistics.take(here, at, value)
        statistics.sync()
        learnt = self._learnt
        self._learnt = replace(
            learnt,
            ranges={**learnt.ranges, **statistics.ranges()},
            importance={**learnt.importance, **statistics.importances()},
            routed={**learnt.routed, **statistics.routing()},
        )
        self._model.learn(self._learnt)

    def _round(self, groups: Sequence[FusionGroup], sums: SiteSums, block: ExitStack) -> None:
        """Round some groups, and put them into the model until the end of `block`."""
        stored, how = sums.round(groups)
        self._stored |= stored
        self._how |= how
        for group in groups:
            self._weights |= self._model.weights_of(group, stored)
        # One parameter can hold weights of several groups, not all rounded at once.
        parameter_of = self._model.places.parameter_of
        changed = {parameter_of(member) for group in groups for member in group.members}
        whole = {
            name: weight for name, weight in self._weights.items() if parameter_of(name) in changed
        }
        block.enter_context(self._model.with_weights(whole))


class RoundedLayers(Stored):
    """The bytes that replace the weights of rounded decoder layers, by tensor name, in files of a
    folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = dict[str, Path]()
        install_bus_error_handler()
        for report in folder.glob("layer-*.json"):
            file = report.with_suffix(".safetensors")
            with safe_open(file, framework="np") as opened:
                self._files |= dict.fromkeys(opened.keys(), file)

    def __getitem__(self, name: str) -> Array:
        with safe_open(self._files[name], framework="np") as opened:
            value: Array = opened.get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def how(self, number: int) -> LayerRounding | None:
        """The report of a rounded layer; None where it is not finished."""
        report = self._folder / f"layer-{number:04d}.json"
        return from_json(LayerRounding, report) if report.is_file() else None

    def put(self, number: int, stored: Stored, how: LayerRounding) -> None:
        """Store a finished layer, visible to everyone who reads the folder."""
        report = self._folder / f"layer-{number:04d}.json"
        record(report)
        record(report.with_suffix(".safetensors"))
        with atomic_path(report.with_suffix(".safetensors")) as temporary:
            save_file(
                {name: np.ascontiguousarray(value) for name, value in stored.items()}, temporary
            )
        write_text(report, to_json(how))


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
    """The bytes that replace the weights, by tensor name, read as they are asked for; how they were
    rounded.

    Finished layers lie in `folder`, which all ranks see and the first writes: the next call goes on
    there. With `all_experts` static scales of experts are those of all tokens, else of those routed
    to them. Raises CheckpointFailed where a hidden state is not finite or a static scale's input
    saw no token, InputError for a model that cannot run layer by layer and a weight that is not
    finite.
    """
    report_file = folder / REPORT
    if not on_first(report_file.is_file):
        (rank, size), done = rank_and_size(), RoundedLayers(folder)
        statistics = Statistics.needed_by(plan, all_experts=all_experts)
        rows_of_rank = samples.taken(range(rank, len(samples.rows), size))
        text = walk.text(rows_of_rank, calibration.smoothing, stage=ROUND, on_progress=on_progress)
        with text as source:
            tokens = samples.tokens
            rounding = RoundingWalk(walk, plan, calibration, statistics, done, source, tokens)
            for layer in walk.forward():
                rounding.layer(layer)
            rounding.behind()
        if rank == 0:
            layers = map(done.how, range(len(walk.layers) + 1))
            report = RoundingReport(layers=tuple(layer for layer in layers if layer is not None))
            if plan.attention:
                require_cache(walk.index, report.cached)
            record(report_file)
            write_text(report_file, to_json(report))
    report = on_first(lambda: from_json(RoundingReport, report_file))
    return RoundedLayers(folder), report


class RoundingWalk:
    """Rounds the groups of a plan, layer by layer, for text of so many `tokens` on all ranks."""

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
        self._walk, self._plan, self._statistics, self._done = walk, plan, statistics, done
        self._source, self._quantized, self._tokens = source, HiddenStates(), tokens
        self._model = QuantizedModel(walk, calibration)
        self._refits = any(strength_of(group).strength > 0 for group in plan.groups)
        # The source rows to run, by position among this rank's rows.
        (rank, size), rows = rank_and_size(), range(len(source))
        self._followed = [row for row in rows if self._refits or rank + row * size < COMPARED_ROWS]
        for position in rows:
            self._quantized.append(source[position])

    def layer(self, layer: Layer) -> None:
        """Round the groups of a decoder layer, and run both streams through it."""
        groups = self._model.places.below(f"{layer.name}.", self._plan.groups)
        inputs = self._inputs(groups)
        exact = self._follow(inputs, partial(self._run, self._source, layer))
        runs = [
            partial(self._run, self._quantized, layer, row) for row in range(len(self._quantized))
        ]
        learnt = on_first(lambda: self._done.how(layer.number))
        if learnt is not None:
            self._model.learn(learnt)
            rounded = dict[LinearPlan, torch.Tensor]()
            for group in groups:
                rounded |= self._model.weights_of(group, self._done)
            with self._model.applied(groups, rounded):
                for run in runs:
                    run()
            return
        cached = dict[str, KeyValueRanges]()
        watching = watching_attention(
            layer.module, layer.name, self._walk.weights.stored_name, cached
        )
        with watching if self._plan.attention else nullcontext():
            stored, learnt = self._in_order(groups, inputs).round(WaitingRows(runs), exact)
        add_up(cached)
        learnt = replace(learnt, state_error=self._state_error(), cached=cached)
        self._put(layer.number, stored, learnt)

    def behind(self) -> None:
        """Round the groups outside the decoder layers, such as an output head."""
        number, inside = len(self._walk.layers), f"{self._walk.name}."
        within = {group.name for group in self._model.places.below(inside, self._plan.groups)}
        groups = [group for group in self._plan.groups if group.name not in within]
        if not groups or on_first(lambda: self._done.how(number)) is not None:
            return
        inputs = self._inputs(groups)
        exact = self._follow(inputs, partial(self._run_head, self._source)) if inputs.sites else []
        runs = [
            partial(self._run_head, self._quantized, row) for row in range(len(self._quantized))
        ]
        rows = NotedRows(runs if inputs.sites else [])
        self._put(number, *self._in_order(groups, inputs).round(rows, exact))

    def _in_order(self, groups: Sequence[FusionGroup], inputs: GroupInputs) -> InOrder:
        return InOrder(self._model, groups, inputs, self._statistics, self._tokens)

    def _inputs(self, groups: Sequence[FusionGroup]) -> GroupInputs:
        """The inputs of the groups that text decides."""
        wanted = [
            group
            for group in groups
            if group.rounding != "nearest" or self._statistics.wants(group)
        ]
        return GroupInputs(self._model.places, wanted)

    def _follow(self, inputs: GroupInputs, run: Callable[[int], None]) -> list[dict[str, Value]]:
        """Run rows of the source's stream, and return the inputs that a refit needs."""
        exact = [dict[str, Value]() for _ in range(len(self._source))]
        for position in self._followed:
            with inputs.noted() as noted:
                run(position)
            if self._refits:
                exact[position] = noted
        return exact

    def _run(self, stream: HiddenStates, layer: Layer, position: int) -> None:
        """Run one row of a stream through a layer."""
        stream[position] = self._walk.through(layer, position, stream[position])

    def _run_head(self, stream: HiddenStates, position: int) -> None:
        self._walk.logits(position, stream[position])

    def _state_error(self) -> float:
        """|h~ - h|^2 / |h|^2 behind a layer, over the rows that are followed. All ranks call."""
        signal = noise = 0.0
        for position in self._followed:
            exact, made = (
                self._walk.on_device(states[position]).to(torch.float32)
                for states in (self._source, self._quantized)
            )
            signal += float(exact.square().sum())
            noise += float((made - exact).square().sum())
        signals, noises = zip(*gather((signal, noise)), strict=True)
        return sum(noises) / sum(signals) if sum(signals) else 0.0

    def _put(self, number: int, stored: Stored, how: LayerRounding) -> None:
        """Store a finished layer, on the first rank."""
        if rank_and_size()[0] == 0:
            self._done.put(number, stored, how)
