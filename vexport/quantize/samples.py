"""What calibration text decides of a plan: samples, what they show, weights rounded by them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.architectures.text_config import text_config
from vexport.checkpoint.data_name import require_data
from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.errors.extras import require_extra
from vexport.formats.packing.base import Array
from vexport.plan.needs import calibration_need, needs_rounding
from vexport.plan.smoothing import SMOOTHING_ROWS, WEIGHING_ROWS, smoothed_groups
from vexport.scenario import Calibration as CalibrationSettings
from vexport.types import Calibration, FusionGroup, OnProgress, Plan, Smoothing
from vexport.types.rounding import RoundingReport

if TYPE_CHECKING:
    from vexport.calibration import Samples


def require_calibration(plan: Plan, settings: CalibrationSettings | None) -> None:
    """InputError where a plan needs samples and none are given, and where the file given is missing."""
    need = calibration_need(plan)
    if need and settings is None:
        raise need.missing()
    if settings is not None:
        require_data(settings.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanText:
    """The calibration samples of a plan, and how they are run."""

    index: SourceIndex
    plan: Plan
    settings: CalibrationSettings
    samples: "Samples"
    on_progress: OnProgress
    trust_remote_code: bool

    @property
    def digest(self) -> str:
        """Of all of it that written bytes depend on."""
        return f"{self.samples.digest} {self._device} {self.settings.all_experts}"

    @property
    def _device(self) -> str:
        from vexport.calibration import default_device

        return self.settings.device or default_device()

    def calibrate(self, candidates: Sequence[FusionGroup] = ()) -> Calibration:
        """What the samples show before weights are rounded.

        Statistics of a plan that rounds by text come with the rounding, unless they are for `candidates`,
        which smoothing serves, too.
        """
        from vexport.calibration import calibrate

        plan = self.plan
        smoothing, token_weights = self._look_back(candidates)
        return calibrate(
            self.index,
            plan if candidates or not needs_rounding(plan) else replace(plan, groups=(), kv_cache=None),
            self.samples,
            on_layer=partial(self.on_progress, "calibrate (layers)"),
            trust_remote_code=self.trust_remote_code,
            all_experts=self.settings.all_experts,
            device=self._device,
            smoothing=smoothing,
            token_weights=token_weights,
        )

    def _look_back(
        self, candidates: Sequence[FusionGroup]
    ) -> tuple[Mapping[str, Smoothing], Mapping[str, tuple[float, ...]]]:
        from vexport.calibration.forward import look_back
        from vexport.rounding.settings import weighs_tokens

        smoothed = smoothed_groups(candidates or self.plan.groups) if self.plan.smoothing else ()
        weighs = weighs_tokens(self.plan.groups)
        if not smoothed and not weighs:
            return {}, {}
        return look_back(
            self.index,
            self.samples.spread(SMOOTHING_ROWS if smoothed else WEIGHING_ROWS),
            smoothed=smoothed,
            strength=self.plan.smoothing or 0.0,
            weighs_tokens=weighs,
            on_layer=partial(self.on_progress, "look back (layers)"),
            trust_remote_code=self.trust_remote_code,
            device=self._device,
        )

    def round(self, calibration: Calibration, folder: Path) -> tuple[Mapping[str, Array], RoundingReport]:
        """The bytes of the weights, kept in `folder` until they are asked for, and how they were rounded."""
        from vexport.quantize.rounding import round_weights

        return round_weights(
            self.index,
            self.plan,
            calibration,
            self.samples,
            folder,
            on_progress=self.on_progress,
            trust_remote_code=self.trust_remote_code,
            device=self._device,
            all_experts=self.settings.all_experts,
        )


def read_text(
    index: SourceIndex,
    plan: Plan,
    settings: CalibrationSettings | None,
    *,
    on_progress: OnProgress,
    trust_remote_code: bool,
) -> PlanText | None:
    """The samples that a plan needs; None where it needs none.

    Raises as `require_calibration` and `calibration_samples`, and InputError where so much text cannot wait
    in memory while weights are rounded by it.
    """
    require_calibration(plan, settings)
    if settings is None or calibration_need(plan) is None:
        return None
    require_extra("torch", "calibrating")
    from vexport.rounding.settings import require_room

    samples = calibration_samples(index, settings, settings.samples, trust_remote_code=trust_remote_code)
    if needs_rounding(plan):
        require_room(plan.groups, sum(len(ids) for ids in samples.token_ids), len(samples.rows))
    return PlanText(
        index=index,
        plan=plan,
        settings=settings,
        samples=samples,
        on_progress=on_progress,
        trust_remote_code=trust_remote_code,
    )


def calibration_samples(
    index: SourceIndex, settings: CalibrationSettings, number: int, *, trust_remote_code: bool
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
