"""What quantizing each group of layers costs, measured on the scenario's calibration."""

from collections.abc import Sequence
from pathlib import Path

from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.errors.extras import require_extra
from vexport.quantize.samples import calibration_samples
from vexport.scenario import Scenario
from vexport.scenario import Sensitivity as SensitivitySettings
from vexport.sensitivity.layer_groups import LayerGroup
from vexport.types import Calibration, OnProgress, Sensitivity


def unit_losses(
    index: SourceIndex,
    units: Sequence[LayerGroup],
    calibration: Calibration | None,
    scenario: Scenario,
    *,
    file: Path,
    on_progress: OnProgress,
    trust_remote_code: bool,
) -> Sensitivity:
    """The loss of every unit in each of its schemes; see `vexport.sensitivity.measure`."""
    require_extra("torch", "measuring what each scheme costs")
    from vexport.calibration import default_device
    from vexport.sensitivity.measure import measure

    settings, how = scenario.calibration, scenario.sensitivity or SensitivitySettings()
    if settings is None:
        raise InputError(
            scenario.name,
            got="no calibration data",
            need="samples that show what each group of layers costs",
            fix="add `calibration:` to the scenario",
        )
    return measure(
        index,
        units,
        calibration or Calibration(rows=(), digest="", tokens=0, ranges={}),
        calibration_samples(index, settings, how.samples, trust_remote_code=trust_remote_code),
        method=how.method,
        file=file,
        on_progress=on_progress,
        trust_remote_code=trust_remote_code,
        device=settings.device or default_device(),
    )
