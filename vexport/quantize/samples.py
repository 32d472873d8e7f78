"""Calibration text of a plan: its samples, their statistics, weights rounded by them."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.architectures.text_config import text_config
from vexport.checkpoint.data_name import require_data
from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.errors.extras import require_extra
from vexport.files import from_json, to_json, write_text
from vexport.formats.packing.base import Array
from vexport.numerics.ranks import on_first, rank_and_size
from vexport.plan.needs import calibration_need, needs_rounding
from vexport.plan.smoothing import SMOOTHING_ROWS, WEIGHING_ROWS, smoothed_groups
from vexport.records import CalibrationRecord, FusionGroup, OnProgress, Plan, Smoothing
from vexport.records.rounding import RoundingReport
from vexport.scenario import Calibration

if TYPE_CHECKING:
    from vexport.calibration import Samples
    from vexport.calibration.walk import LayerWalk


def require_calibration(plan: Plan, settings: Calibration | None) -> None:
    """InputError where a plan needs samples and none are given, and where the file given is missing."""
    need = calibration_need(plan)
    if need and settings is None:
        raise need.missing()
    if settings is not None:
        require_data(settings.data)


class PlanText:
    """The calibration samples of a plan, and the walk on which they go through its model.

    Raises as `require_calibration` and `calibration_samples`, and InputError where so much text cannot wait
    in memory while weights are rounded by it.
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
        from vexport.rounding.settings import require_room

        self._index, self.plan, self._settings = index, plan, settings
        self.on_progress, self._trust = on_progress, trust_remote_code
        self._device = settings.device or default_device()
        self.samples = calibration_samples(
            index, settings, settings.samples, trust_remote_code=trust_remote_code
        )
        if needs_rounding(plan):
            tokens = sum(len(ids) for ids in self.samples.token_ids)
            require_room(plan.groups, tokens, len(self.samples.rows), self._device)

    @property
    def digest(self) -> str:
        """Of all of it that written bytes depend on."""
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
            found = self.calibrate()
            if rank_and_size()[0] == 0:
                write_text(file, to_json(found))
        return on_first(lambda: from_json(CalibrationRecord, file))

    def calibrate(self, candidates: Sequence[FusionGroup] = ()) -> CalibrationRecord:
        """The statistics of the samples before weights are rounded.

        Statistics of a plan that rounds by text come with the rounding, unless they are for `candidates`,
        which smoothing serves, too.
        """
        from vexport.calibration import calibrate

        plan = self.plan
        smoothing, token_weights = self._look_back(candidates)
        return calibrate(
            self.walk,
            plan if candidates or not needs_rounding(plan) else replace(plan, groups=(), kv_cache=None),
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
        from vexport.rounding.settings import weighs_tokens

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
        """The bytes of the weights, kept in `folder` until they are asked for, and how they were rounded."""
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
    """The first rows of calibration data as token ids of the checkpoint; InputError for bad ones."""
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
    path = str(index.root / "config.json")
    raise InputError(
        path, got="no vocab_size", need="the number of tokens", fix="restore the model's config.json"
    )
