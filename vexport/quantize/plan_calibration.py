"""Run the calibration text of a plan: measure gradients, collect statistics, and round weights."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.checkpoint.index import SourceIndex
from vexport.errors.extras import require_extra
from vexport.files import from_json, to_json, write_text
from vexport.formats.packing.base import Array
from vexport.formats.plan import FusionGroup, Plan
from vexport.numerics.ranks import on_first, rank_and_size
from vexport.outputs.manifest import record as record_file
from vexport.plan.duration import duration_line, tower_operations
from vexport.plan.rules import (
    SMOOTHING_ROWS,
    TOKEN_WEIGHT_ROWS,
    only_tower,
    rounds_with_text,
    smoothed_groups,
    without_tower,
)
from vexport.quantize.samples import (
    calibration_samples,
    require_calibration,
    require_pictures,
)
from vexport.quantize.warnings import little_text_of_plan
from vexport.records import CalibrationRecord, OnProgress, Smoothing
from vexport.records.calibration import RoundingReport
from vexport.rules.quantize import NEAREST_TOWER
from vexport.scenario import Calibration

if TYPE_CHECKING:
    from vexport.calibration import Samples
    from vexport.calibration.walk import LayerWalk

LOG = logging.getLogger(__name__)


class PlanCalibration:
    """Calibration samples of a plan, and the steps that run them through the model.

    Raises the errors of `require_calibration`, `calibration_samples` and `require_pictures`. Raises
    InputError if the samples need too much memory while weights are rounded.
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
        from vexport.quantize.waiting_rows import require_memory

        self._index = index
        self.plan = plan
        self._settings = settings
        self.on_progress = on_progress
        self._trust = trust_remote_code
        self._device = settings.device or default_device()
        self.samples = calibration_samples(
            index, settings, settings.samples, trust_remote_code=trust_remote_code
        )
        require_pictures(plan, self.samples)
        short = little_text_of_plan(plan, self.samples.counted_tokens)
        tower = [
            f"{note.where}: {note.got}" for note in plan.notes if note.rule == NEAREST_TOWER.id
        ]
        for note in (*self.samples.notes, *tower, short) if rank_and_size()[0] == 0 else ():
            if note is not None:
                LOG.warning("note: %s", note)
        if rounds_with_text(plan):
            require_memory(plan.groups, self.samples.tokens, len(self.samples.rows), self._device)

    @property
    def digest(self) -> str:
        """Return a text that changes if the samples change, or settings that change the output."""
        samples = f"{self.samples.digest}{self.samples.counted_digest}"
        return f"{samples} {self._device} {self._settings.all_experts}"

    @cached_property
    def walk(self) -> "LayerWalk":
        """Return the walk. Its model is built at the first use."""
        from vexport.calibration.walk import LayerWalk

        return LayerWalk(self._index, trust_remote_code=self._trust, device=self._device)

    def note_duration(self) -> None:
        """Print a note with the expected time, if calibrating on the CPU will take long."""
        if rank_and_size() == (0, 1) and self._device.startswith("cpu"):
            samples = len(self.samples.rows)
            mean_len = -(-self.samples.tokens // samples)
            pictures = tower_operations(self._index, self.samples.picture_values)
            line = duration_line(self.plan, samples=samples, seq_len=mean_len, pictures=pictures)
            if line is not None:
                LOG.info("note: %s", line)

    def calibrated(self, folder: Path) -> CalibrationRecord:
        """Return the statistics before rounding. Read them from `folder` if an earlier call stored
        them.
        """
        file = folder / "statistics.json"
        if not on_first(file.is_file):
            record = self.calibrate()
            if rank_and_size()[0] == 0:
                record_file(file)
                write_text(file, to_json(record))
        return on_first(lambda: from_json(CalibrationRecord, file))

    def calibrate(self, candidates: Sequence[FusionGroup] = ()) -> CalibrationRecord:
        """Return the statistics of the samples before weights are rounded.

        If the plan rounds weights by text, this method computes only smoothing, token weights and
        the statistics of a tower. The other statistics are collected while rounding. With
        `candidates` the statistics of the whole plan are collected, and the inputs of the
        candidates are smoothed.
        """
        from vexport.calibration import calibrate

        plan = self.plan
        if rounds_with_text(plan) and not candidates:
            plan = only_tower(plan)
        smoothing, token_weights = self._find_smoothing(candidates)
        return calibrate(
            self.walk,
            plan,
            self.samples,
            on_progress=self.on_progress,
            all_experts=self._settings.all_experts,
            smoothing=smoothing,
            token_weights=token_weights,
        )

    def _find_smoothing(
        self, candidates: Sequence[FusionGroup]
    ) -> tuple[Mapping[str, Smoothing], Mapping[str, tuple[float, ...]]]:
        from vexport.calibration.smoothing import find_smoothing

        smoothed = self._smoothed_groups(candidates)
        if not smoothed and not self._weighs_tokens:
            return {}, {}
        return find_smoothing(
            self.walk,
            self._gradient_samples,
            smoothed=smoothed,
            strength=self.plan.smoothing or 0.0,
            weighs_tokens=self._weighs_tokens,
            on_progress=self.on_progress,
        )

    def _smoothed_groups(self, candidates: Sequence[FusionGroup]) -> Sequence[FusionGroup]:
        return smoothed_groups(candidates or self.plan.groups) if self.plan.smoothing else ()

    @property
    def _weighs_tokens(self) -> bool:
        from vexport.quantize.gptq import weighs_tokens

        return weighs_tokens(self.plan.groups)

    @property
    def _gradient_samples(self) -> "Samples":
        """Return the samples from whose gradients smoothing and the token weights are computed.

        They are evenly spread over all samples.
        """
        return self.samples.evenly_spaced(
            SMOOTHING_ROWS if self.plan.smoothing else TOKEN_WEIGHT_ROWS
        )

    def round(
        self, calibration: CalibrationRecord, folder: Path
    ) -> tuple[Mapping[str, Array], RoundingReport]:
        """Return the bytes of the weights, and how they were rounded.

        The bytes stay in files in `folder` until they are read.
        """
        from vexport.quantize.rounding_walk import round_weights

        return round_weights(
            self.walk,
            without_tower(self.plan),
            calibration,
            self.samples,
            folder,
            on_progress=self.on_progress,
            all_experts=self._settings.all_experts,
        )
