"""The calibration that a plan needs: its samples, and what they show."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vexport.architectures.text_config import text_config
from vexport.checkpoint.data_name import require_data
from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.errors.extras import require_extra
from vexport.plan.needs import calibration_need
from vexport.plan.smoothing import smoothed_groups
from vexport.scenario import Calibration as CalibrationSettings
from vexport.types import Calibration, FusionGroup, OnProgress, Plan, Smoothing

if TYPE_CHECKING:
    from vexport.calibration import Samples


def require_calibration(plan: Plan, settings: CalibrationSettings | None) -> None:
    """InputError where a plan needs samples and none are given, and where the file given is missing."""
    need = calibration_need(plan)
    if need and settings is None:
        raise need.missing()
    if settings is not None:
        require_data(settings.data)


def calibrate_plan(
    index: SourceIndex,
    plan: Plan,
    settings: CalibrationSettings | None,
    *,
    candidates: Sequence[FusionGroup] = (),
    on_progress: OnProgress,
    trust_remote_code: bool,
) -> Calibration | None:
    """What the samples show; None where the plan needs none. Raises as `require_calibration`.

    Smoothing serves all `candidates` for the plan's layers, if there are some, else the plan's own groups.
    """
    require_calibration(plan, settings)
    if settings is None or calibration_need(plan) is None:
        return None
    require_extra("torch", "calibrating")
    from vexport.calibration import calibrate, default_device
    from vexport.calibration.smoothing import find_smoothing

    device = settings.device or default_device()
    samples = calibration_samples(index, settings, settings.samples, trust_remote_code=trust_remote_code)
    smoothing: Mapping[str, Smoothing] = {}
    if plan.smoothing:
        smoothing = find_smoothing(
            index,
            smoothed_groups(candidates or plan.groups),
            plan.smoothing,
            samples,
            on_layer=partial(on_progress, "smooth (layers)"),
            trust_remote_code=trust_remote_code,
            device=device,
        )
    return calibrate(
        index,
        plan,
        samples,
        on_layer=partial(on_progress, "calibrate (layers)"),
        trust_remote_code=trust_remote_code,
        all_experts=settings.all_experts,
        device=device,
        smoothing=smoothing,
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
