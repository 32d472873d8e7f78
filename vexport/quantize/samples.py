"""What calibration text decides of a plan: samples, what they show, weights rounded by them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
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


def calibrate_plan(
    index: SourceIndex,
    plan: Plan,
    settings: CalibrationSettings | None,
    *,
    candidates: Sequence[FusionGroup] = (),
    on_progress: OnProgress,
    trust_remote_code: bool,
) -> Calibration | None:
    """What the samples show before weights are rounded; None where the plan needs none.

    Statistics of a plan that rounds by text come with the rounding, unless they are for `candidates`, which
    smoothing serves, too. Raises as `require_calibration`, and InputError where the text does not fit.
    """
    require_calibration(plan, settings)
    if settings is None or calibration_need(plan) is None:
        return None
    require_extra("torch", "calibrating")
    from vexport.calibration import calibrate, default_device
    from vexport.calibration.forward import look_back
    from vexport.rounding.settings import require_room, weighs_tokens

    device = settings.device or default_device()
    samples = calibration_samples(index, settings, settings.samples, trust_remote_code=trust_remote_code)
    tokens = sum(len(ids) for ids in samples.token_ids)
    if needs_rounding(plan):
        require_room(plan.groups, tokens, len(samples.rows))
    smoothed = smoothed_groups(candidates or plan.groups) if plan.smoothing else ()
    smoothing: Mapping[str, Smoothing] = {}
    token_weights: Mapping[str, tuple[float, ...]] = {}
    if smoothed or weighs_tokens(plan.groups):
        smoothing, token_weights = look_back(
            index,
            samples.spread(SMOOTHING_ROWS if smoothed else WEIGHING_ROWS),
            smoothed=smoothed,
            strength=plan.smoothing or 0.0,
            weighs_tokens=weighs_tokens(plan.groups),
            on_layer=partial(on_progress, "look back (layers)"),
            trust_remote_code=trust_remote_code,
            device=device,
        )
    return calibrate(
        index,
        plan if candidates or not needs_rounding(plan) else replace(plan, groups=(), kv_cache=None),
        samples,
        on_layer=partial(on_progress, "calibrate (layers)"),
        trust_remote_code=trust_remote_code,
        all_experts=settings.all_experts,
        device=device,
        smoothing=smoothing,
        token_weights=token_weights,
    )


def round_plan(
    index: SourceIndex,
    plan: Plan,
    calibration: Calibration | None,
    settings: CalibrationSettings | None,
    folder: Path,
    *,
    on_progress: OnProgress,
    trust_remote_code: bool,
) -> tuple[Mapping[str, Array], RoundingReport | None]:
    """The bytes of the weights that the samples round, kept in `folder` until then, and how; none without."""
    if not needs_rounding(plan):
        return {}, None
    assert calibration is not None
    assert settings is not None
    from vexport.calibration import default_device
    from vexport.quantize.rounding import round_weights

    return round_weights(
        index,
        plan,
        calibration,
        calibration_samples(index, settings, settings.samples, trust_remote_code=trust_remote_code),
        folder,
        on_progress=on_progress,
        trust_remote_code=trust_remote_code,
        device=settings.device or default_device(),
        all_experts=settings.all_experts,
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
