"""Calibration text of a plan: its samples, their statistics, weights rounded by them, and the time
it takes.

The time is measured on a few rows and layers of the model itself. A trial runs all steps of a plan
on two layers of the most common kind and one of each other. The first layer of a trial warms up;
the others show how long a layer takes. Two trials, of few rows and of more, tell what a layer takes
by itself (to be read, to be rounded) from what each token adds.
"""

import logging
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vexport.architectures.config import text_config
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.source import require_data
from vexport.errors import CheckpointFailed, InputError
from vexport.errors.extras import require_extra
from vexport.files import from_json, to_json, write_text
from vexport.formats.packing.base import Array
from vexport.numerics.ranks import on_first, rank_and_size
from vexport.outputs.manifest import record as record_file
from vexport.plan.rules import (
    SMOOTHING_ROWS,
    WEIGHING_ROWS,
    calibration_need,
    needs_rounding,
    smoothed_groups,
)
from vexport.records import (
    PROGRESS_DETAIL,
    CalibrationRecord,
    FusionGroup,
    OnProgress,
    Plan,
    Smoothing,
)
from vexport.records.calibration import LOOK_BACK, RoundingReport
from vexport.scenario import Calibration

if TYPE_CHECKING:
    import torch

    from vexport.calibration import Samples
    from vexport.calibration.walk import LayerWalk

LOG = logging.getLogger(__name__)
# Weight-token products below which measuring the time would take about as long as the work.
SMALL_WORK = 1e11
# The tokens of the larger trial, at least, and its rows; a model with more kinds of layers is not
# measured.
TRIAL_TOKENS, TRIAL_ROWS, MOST_KINDS = 1024, 3, 6
MEASURE = "measure how long a layer takes"


def require_calibration(plan: Plan, settings: Calibration | None) -> None:
    """Raise InputError where a plan needs samples and has none, or its file is missing."""
    need = calibration_need(plan)
    if need and settings is None:
        raise need.missing()
    if settings is not None:
        require_data(settings.data)


class PlanText:
    """The calibration samples of a plan, and the walk on which they go through its model.

    Raises as `require_calibration` and `calibration_samples`, and InputError where so much text
    cannot wait in memory while weights are rounded by it.
    """

    def __init__(
        self,
        index: SourceIndex,
        plan: Plan,
        settings: Calibration | None,
        *,
        on_progress: OnProgress,
        trust_remote_code: bool,
    ) -> None:
        require_calibration(plan, settings)
        assert settings is not None
        require_extra("torch", "calibrating")
        from vexport.calibration import default_device
        from vexport.quantize.round_sites import require_room

        self._index, self.plan, self._settings = index, plan, settings
        self.on_progress, self._trust = on_progress, trust_remote_code
        self._device = settings.device or default_device()
        self.samples = calibration_samples(
            index, settings, settings.samples, trust_remote_code=trust_remote_code
        )
        for note in self.samples.notes if rank_and_size()[0] == 0 else ():
            LOG.warning("note: %s", note)
        if needs_rounding(plan):
            tokens = sum(len(ids) for ids in self.samples.token_ids)
            require_room(plan.groups, tokens, len(self.samples.rows), self._device)

    @property
    def digest(self) -> str:
        """A digest of all settings that the written bytes depend on."""
        return f"{self.samples.digest} {self._device} {self._settings.all_experts}"

    @cached_property
    def walk(self) -> "LayerWalk":
        """The model, built when it is first asked for."""
        from vexport.calibration.walk import LayerWalk

        return LayerWalk(self._index, trust_remote_code=self._trust, device=self._device)

    def trial(self, plan: Plan, samples: "Samples", on_progress: OnProgress) -> "PlanText":
        """Other samples of the same text, for a part of its plan, on the same walk."""
        trial = copy(self)
        trial.plan, trial.samples, trial.on_progress = plan, samples, on_progress
        return trial

    def calibrated(self, folder: Path) -> CalibrationRecord:
        """The same, from `folder` where an earlier call left it there."""
        file = folder / "statistics.json"
        if not on_first(file.is_file):
            record = self.calibrate()
            if rank_and_size()[0] == 0:
                record_file(file)
                write_text(file, to_json(record))
        return on_first(lambda: from_json(CalibrationRecord, file))

    def calibrate(self, candidates: Sequence[FusionGroup] = ()) -> CalibrationRecord:
        """The statistics of the samples before weights are rounded.

        Statistics of a plan that rounds by text come with the rounding, unless they are for
        `candidates`, which smoothing serves, too.
        """
        from vexport.calibration import calibrate

        plan = self.plan
        smoothing, token_weights = self._look_back(candidates)
        return calibrate(
            self.walk,
            plan
            if candidates or not needs_rounding(plan)
            else replace(plan, groups=(), kv_cache=None),
            self.samples,
            on_progress=self.on_progress,
            all_experts=self._settings.all_experts,
            smoothing=smoothing,
            token_weights=token_weights,
        )

    @property
    def look_back_rows(self) -> int:
        """The number of samples, spread over all, that are looked back from."""
        return SMOOTHING_ROWS if self.plan.smoothing else WEIGHING_ROWS

    def _look_back(
        self, candidates: Sequence[FusionGroup]
    ) -> tuple[Mapping[str, Smoothing], Mapping[str, tuple[float, ...]]]:
        from vexport.calibration.smoothing import look_back
        from vexport.quantize.gptq import weighs_tokens

        smoothed = smoothed_groups(candidates or self.plan.groups) if self.plan.smoothing else ()
        weighs = weighs_tokens(self.plan.groups)
        if not smoothed and not weighs:
            return {}, {}
        return look_back(
            self.walk,
            self.samples.spread(self.look_back_rows),
            smoothed=smoothed,
            strength=self.plan.smoothing or 0.0,
            weighs_tokens=weighs,
            on_progress=self.on_progress,
        )

    def round(
        self, calibration: CalibrationRecord, folder: Path
    ) -> tuple[Mapping[str, Array], RoundingReport]:
        """The bytes of the weights, kept in `folder` until they are asked for, and how they were
        rounded.
        """
        from vexport.quantize.rounding import round_weights

        return round_weights(
            self.walk,
            self.plan,
            calibration,
            self.samples,
            folder,
            on_progress=self.on_progress,
            all_experts=self._settings.all_experts,
        )


def calibration_samples(
    index: SourceIndex, settings: Calibration, number: int, *, trust_remote_code: bool
) -> "Samples":
    """The first rows of calibration data as token ids of the checkpoint; InputError for bad
    ones.
    """
    require_extra("transformers", "calibrating")
    from vexport.calibration import read_samples

    return read_samples(
        settings.source(number),
        index.root,
        vocab_size=vocab_size(index),
        trust_remote_code=trust_remote_code,
    )


def vocab_size(index: SourceIndex) -> int:
    """The number of token ids that the model knows, from its config."""
    size = text_config(index.config).get("vocab_size")
    if isinstance(size, int):
        return size
    path, fix = str(index.root / "config.json"), "restore the model's config.json"
    raise InputError(path, got="no vocab_size", need="the number of tokens", fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of calibration, by the name of its progress, and the seconds that it will take."""

    name: str
    seconds: float


def estimated_steps(text: PlanText) -> tuple[Step, ...]:
    """The steps that the text of a plan will take; none for little work, or where it cannot be
    measured.

    All ranks call it. What stops a trial will stop the calibration, which says it better.
    """
    weights = sum(
        member.in_features * member.out_features
        for group in text.plan.groups
        for member in group.members
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
    """Report several steps as one stage, in estimated seconds, so that the time left covers all of
    them.
    """
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
        name = (
            f"calibrate (seconds as estimated){PROGRESS_DETAIL}step {number + 1} of "
            f"{len(steps)}, {stage}"
        )
        on_progress(name, total if is_end else min(round(seconds), total - 1), total)

    report(steps[0].name, 0, 1)
    return report


@dataclass(slots=True)
class _Clock:
    """Records when each layer of each step is done."""

    marks: dict[str, list[float]] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.perf_counter()
        self.marks.setdefault(stage, [self.last]).append(now)
        self.last = now


class _Trials:
    """Runs the steps of a plan's text for some rows and layers."""

    def __init__(self, text: PlanText) -> None:
        self._text, self._walk = text, text.walk
        self._groups = _groups_of_layers(self._walk, text.plan)
        kinds = [
            _kind(layer, groups)
            for layer, groups in zip(text.walk.layers, self._groups, strict=True)
        ]
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
        short, long, steps = self._trial(few), self._trial(more), list[Step]()
        for name, (least, _) in short.items():
            here, there, all_of_it = (
                _tokens(samples.spread(text.look_back_rows) if name == LOOK_BACK else samples)
                for samples in (few, more, text.samples)
            )
            layers, around = long[name]
            each = max(0.0, layers - least) / max(1, there - here)
            seconds = least + each * (all_of_it - here) + around * all_of_it / there
            steps.append(Step(name=name, seconds=seconds))
        return tuple(steps)

    def _trial(self, samples: "Samples") -> dict[str, tuple[float, float]]:
        """The seconds of each step: of all layers, if all were run, and of what is around them."""
        plan, clock = self._text.plan, _Clock()
        groups = tuple(group for number in self._numbers for group in self._groups[number])
        trial = self._text.trial(replace(plan, groups=groups), samples, clock)
        self._walk.numbers = self._numbers
        try:
            calibration = trial.calibrate()
            if needs_rounding(plan):
                with TemporaryDirectory() as folder:
                    trial.round(calibration, Path(folder))
        finally:
            self._walk.numbers = range(len(self._walk.layers))
        return {name: self._taken(marks) for name, marks in clock.marks.items()}

    def _taken(self, marks: Sequence[float]) -> tuple[float, float]:
        """The times of a step that went through the layers once, or up and back."""
        seconds = [end - start for start, end in pairwise(marks)]
        layers = around = 0.0
        for number, start in enumerate(range(0, len(seconds), len(self._numbers))):
            way = self._numbers[:: -1 if number else 1]
            first, *rest = seconds[start : start + len(way)]
            mean = sum(rest) / len(rest)
            of_kind = {
                self._kinds[layer]: taken for layer, taken in zip(way[1:], rest, strict=True)
            }
            layers += sum(count * of_kind.get(kind, mean) for kind, count in self._counts.items())
            around += max(0.0, first - of_kind.get(self._kinds[way[0]], mean))
        return layers, around


def _tokens(samples: "Samples") -> int:
    return sum(map(len, samples.token_ids))


def _groups_of_layers(walk: "LayerWalk", plan: Plan) -> list[list[FusionGroup]]:
    """The groups of each decoder layer."""
    from vexport.calibration.inputs import Places

    places, groups = Places(walk.model, walk.weights), [list[FusionGroup]() for _ in walk.layers]
    for group in plan.groups:
        inside = places.parameter_of(group.members[0]).removeprefix(f"{walk.name}.")
        number = inside.partition(".")[0]
        if number.isdecimal():
            groups[int(number)].append(group)
    return groups


def _kind(layer: "torch.nn.Module", groups: Sequence[FusionGroup]) -> Hashable:
    """The kind of a layer for timing: the shapes of its parameters, and their quantization."""
    shapes = tuple((name, *parameter.shape) for name, parameter in layer.named_parameters())
    return shapes, tuple(
        (parameter.scheme, parameter.rounding, parameter.observer) for parameter in groups
    )
