"""The groups of a decoder layer rounded one after another, in the order in which text comes to them.

Rows of text wait in front of a module until its weights are rounded: the forward of each runs in a greenlet,
all in one thread, one at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from greenlet import getcurrent, greenlet

from vexport.calibration.inputs import GroupInputs, Noted, Value
from vexport.calibration.statistics import Statistics
from vexport.formats.packing.base import Array
from vexport.numerics.ranks import gather
from vexport.quantize.model import QuantizedModel
from vexport.quantize.round_sites import SiteSums
from vexport.quantize.stream import Stored
from vexport.records import FusionGroup, LinearPlan
from vexport.records.calibration import GroupRounding, LayerRounding

# The name of the module that a row waits in front of, and what enters it.
Stop = tuple[str, Value]


class WaitingRows:
    """The rows of one stream in a decoder layer; each of `runs` is the forward of one."""

    def __init__(self, runs: Sequence[Callable[[], None]]) -> None:
        self._rows = [greenlet(run) for run in runs]
        self._stops: list[Stop | None] = [None] * len(runs)
        self._passed: set[str] = set()

    @contextmanager
    def stopping(self, inputs: GroupInputs) -> Iterator[None]:
        """Within the block rows stop in front of the modules of these inputs; they run to the first one."""
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
        """Let the rows that wait in front of a module go on, and all that come to it later."""
        self._passed.add(name)
        for position, stop in enumerate(self._stops):
            if stop is not None and stop[0] == name:
                self._go_on(position)


class NotedRows:
    """Rows that run to the last of some inputs and no further: what is rounded there changes none of them."""

    def __init__(self, runs: Sequence[Callable[[], None]]) -> None:
        self._runs = runs
        self._seen: list[dict[str, Value]] = []

    @contextmanager
    def stopping(self, inputs: GroupInputs) -> Iterator[None]:
        """Note what enters the modules of these inputs."""
        for run in self._runs:
            with inputs.noted(only=True) as seen:
                run()
            self._seen.append(seen)
        yield

    @property
    def names(self) -> set[str]:
        """The modules that rows come to."""
        return set[str]().union(*self._seen)

    def noted(self, position: int, name: str) -> Noted:
        """The input of this module, of a row."""
        seen = self._seen[position]
        return {name: seen[name]} if name in seen else {}

    def let_through(self, name: str) -> None:
        """Forget what entered a module."""
        for seen in self._seen:
            seen.pop(name, None)


Rows = WaitingRows | NotedRows


class InOrder:
    """Groups of one layer, and the inputs of those that text decides about.

    Rows that wait in front of a module decide static scales and importance, then its weights, and go on
    through it as rounded. `text` is the number of tokens of all rows.
    """

    def __init__(
        self,
        model: QuantizedModel,
        groups: Sequence[FusionGroup],
        inputs: GroupInputs,
        statistics: Statistics,
        text: int,
    ) -> None:
        self._model, self._groups, self._inputs, self._statistics = model, groups, inputs, statistics
        self._text = text
        self._stored, self._how = dict[str, Array](), dict[str, GroupRounding]()
        self._learnt = LayerRounding(groups=(), state_error=0.0)
        self._weights = dict[LinearPlan, torch.Tensor]()

    def round(self, rows: Rows, exact: Sequence[dict[str, Value]]) -> tuple[Stored, LayerRounding]:
        """The bytes that replace the weights, and how each group was rounded. All ranks call.

        `exact` has what enters the source's layer of each row, where a refit asks for it; what was used is
        taken out. In the end all waiting rows have gone through the layer as it was rounded.
        """
        inputs, reached = self._inputs, {group.name for site in self._inputs.sites for group in site.groups}
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
            name: GroupRounding(name=name, fallback=reason) for name, reason in inputs.unreachable.items()
        }
        order = [*fallbacks, *(group.name for site in inputs.sites for group in site.rounded)]
        how = fallbacks | self._how
        return self._stored, replace(self._learnt, groups=tuple(how[name] for name in order))

    def _sums(self, inputs: GroupInputs) -> SiteSums:
        return SiteSums(self._model, inputs, text=self._text)

    def _observe(self, here: GroupInputs, name: str, rows: Rows, number: int) -> None:
        """Take in what static scales and importance need of an input; the ranks', too."""
        groups = [group for site in here.sites for group in site.groups]
        seen = self._statistics.only(groups)
        for position in range(number):
            for at, value in rows.noted(position, name).items():
                seen.take(here, at, value)
        seen.sync()
        learnt = self._learnt
        self._learnt = replace(
            learnt,
            ranges={**learnt.ranges, **seen.ranges()},
            importance={**learnt.importance, **seen.importances()},
            routed={**learnt.routed, **seen.routing()},
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
        whole = {one: weight for one, weight in self._weights.items() if parameter_of(one) in changed}
        block.enter_context(self._model.with_weights(whole))
