"""The time that calibration text will take, measured on a few rows and layers of the model itself.

A trial runs all steps of a plan on two layers of the most common kind and one of each other. The first layer
of a trial warms up; the others show how long a layer takes. Two trials, of few rows and of more, tell what a
layer takes by itself (to be read, to be rounded) from what each token adds.
"""

import time
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vexport.errors import CheckpointFailed, InputError
from vexport.numerics.ranks import on_first, rank_and_size
from vexport.plan.needs import needs_rounding
from vexport.quantize.samples import PlanText
from vexport.records import PROGRESS_DETAIL, FusionGroup, OnProgress, Plan
from vexport.records.calibration import LOOK_BACK

if TYPE_CHECKING:
    from vexport.calibration import Samples
    from vexport.calibration.walk import LayerWalk

# Products of a weight and a token of the text below which measuring would take about as long as the work.
SMALL_WORK = 1e11
# The tokens of the larger trial, at least, and its rows; a model with more kinds of layers is not measured.
TRIAL_TOKENS, TRIAL_ROWS, MOST_KINDS = 1024, 3, 6
MEASURE = "measure how long a layer takes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of calibration, by the name of its progress, and the seconds that it will take."""

    name: str
    seconds: float


def estimated_steps(text: PlanText) -> tuple[Step, ...]:
    """The steps that the text of a plan will take; none for little work, or where it cannot be measured.

    All ranks call it. What stops a trial will stop the calibration, which says it better.
    """
    weights = sum(
        member.in_features * member.out_features for group in text.plan.groups for member in group.members
    )
    if weights * _tokens(text.samples) < SMALL_WORK:
        return ()
    steps: tuple[Step, ...] = ()
    text.on_progress(MEASURE, 0, 1)
    with suppress(CheckpointFailed, InputError):
        steps = _Trials(text).steps()
    text.on_progress(MEASURE, 1, 1)
    return on_first(lambda: steps)


def numbered(steps: Sequence[Step], on_progress: OnProgress) -> OnProgress:
    """Progress in which several steps are one stage, in estimated seconds: the time left is that of all."""
    if len(steps) < 2:
        return on_progress
    total = max(2, round(sum(step.seconds for step in steps)))
    numbers = {step.name: number for number, step in enumerate(steps)}

    def report(stage: str, done: int, of: int) -> None:
        if stage not in numbers:
            on_progress(stage, done, of)
            return
        number = numbers[stage]
        seconds = sum(step.seconds for step in steps[:number]) + steps[number].seconds * done / of
        is_end = number == len(steps) - 1 and done == of
        name = f"calibrate (seconds as estimated){PROGRESS_DETAIL}step {number + 1} of {len(steps)}, {stage}"
        on_progress(name, total if is_end else min(round(seconds), total - 1), total)

    report(steps[0].name, 0, 1)
    return report


@dataclass(slots=True)
class _Clock:
    """When each layer of each step was done."""

    marks: dict[str, list[float]] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.perf_counter()
        self.marks.setdefault(stage, [self.last]).append(now)
        self.last = now


@dataclass(frozen=True, slots=True)
class _Taken:
    """The seconds that a step of a trial took: of all layers, if all were run, and of what is around them."""

    layers: float
    around: float


class _Trials:
    """Runs the steps of a plan's text for some rows and layers."""

    def __init__(self, text: PlanText) -> None:
        self._text, self._walk = text, text.walk
        self._groups = _groups_of_layers(self._walk, text.plan)
        kinds = [_kind(self._walk, number, self._groups) for number in range(len(self._walk.layers))]
        self._kinds, self._counts = kinds, Counter(kinds)
        order = [kind for kind, _ in self._counts.most_common()]
        firsts = [kinds.index(kind) for kind in order]
        second = [number for number, kind in enumerate(kinds) if kind == order[0]][1:2]
        self._numbers = [*firsts, *second]

    def steps(self) -> tuple[Step, ...]:
        """The steps of the text."""
        text, size = self._text, rank_and_size()[1]
        if len(self._numbers) < 2 or len(self._counts) > MOST_KINDS:
            return ()
        mean = _tokens(text.samples) / len(text.samples.rows)
        few = text.samples.spread(size)
        more = text.samples.spread(size * max(TRIAL_ROWS, round(TRIAL_TOKENS / mean)))
        short, long = self._trial(few), self._trial(more)
        found = list[Step]()
        for name in short:
            here, there, all_of_it = (
                _tokens(one.spread(text.look_back_rows) if name == LOOK_BACK else one)
                for one in (few, more, text.samples)
            )
            each = max(0.0, long[name].layers - short[name].layers) / max(1, there - here)
            around = long[name].around * all_of_it / there
            seconds = short[name].layers + each * (all_of_it - here) + around
            found.append(Step(name=name, seconds=seconds))
        return tuple(found)

    def _trial(self, samples: "Samples") -> dict[str, _Taken]:
        plan, clock = self._text.plan, _Clock()
        groups = tuple(group for number in self._numbers for group in self._groups[number])
        trial = self._text.trial(replace(plan, groups=groups), samples, clock)
        self._walk.numbers = self._numbers
        try:
            seen = trial.calibrate()
            if needs_rounding(plan):
                with TemporaryDirectory() as folder:
                    trial.round(seen, Path(folder))
        finally:
            self._walk.numbers = range(len(self._walk.layers))
        return {name: self._taken(marks) for name, marks in clock.marks.items()}

    def _taken(self, marks: Sequence[float]) -> _Taken:
        """The time of a step that went through the layers once, or up and back."""
        seconds = [end - start for start, end in pairwise(marks)]
        layers = around = 0.0
        for number, start in enumerate(range(0, len(seconds), len(self._numbers))):
            way = self._numbers[:: -1 if number else 1]
            first, *rest = seconds[start : start + len(way)]
            mean = sum(rest) / len(rest)
            of_kind = {self._kinds[layer]: taken for layer, taken in zip(way[1:], rest, strict=True)}
            layers += sum(count * of_kind.get(kind, mean) for kind, count in self._counts.items())
            around += max(0.0, first - of_kind.get(self._kinds[way[0]], mean))
        return _Taken(layers, around)


def _tokens(samples: "Samples") -> int:
    return sum(map(len, samples.token_ids))


def _groups_of_layers(walk: "LayerWalk", plan: Plan) -> list[list[FusionGroup]]:
    """The groups of each decoder layer."""
    from vexport.calibration.inputs import Places

    places, found = Places(walk.model, walk.weights), [list[FusionGroup]() for _ in walk.layers]
    for group in plan.groups:
        inside = places.parameter_of(group.members[0]).removeprefix(f"{walk.name}.")
        number = inside.partition(".")[0]
        if number.isdecimal():
            found[int(number)].append(group)
    return found


def _kind(walk: "LayerWalk", number: int, groups: Sequence[Sequence[FusionGroup]]) -> Hashable:
    """The causes of a layer's time: the shapes of its parameters, and their quantization."""
    shapes = tuple((name, *one.shape) for name, one in walk.layers[number].named_parameters())
    return shapes, tuple((one.scheme, one.rounding, one.observer) for one in groups[number])
