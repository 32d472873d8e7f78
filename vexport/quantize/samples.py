"""Check whether a plan needs calibration samples, and read them."""

from typing import TYPE_CHECKING

from vexport.architectures.config import vocab_size
from vexport.calibration.data import require_rows
from vexport.calibration.pictures import sees_pictures
from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.errors.extras import require_extra
from vexport.formats.plan import Plan
from vexport.plan.rules import calibration_need, only_tower, statistics_need
from vexport.rules.quantize import NO_PICTURES
from vexport.scenario import Calibration

if TYPE_CHECKING:
    from vexport.calibration import Samples


def require_calibration(plan: Plan, settings: Calibration | None) -> None:
    """Raise InputError if a plan needs samples and there are none, or if `require_rows` fails."""
    need = calibration_need(plan)
    if need and settings is None:
        raise need.missing()
    for data in settings.sources() if settings is not None else ():
        require_rows(data)


def require_pictures(plan: Plan, samples: "Samples") -> None:
    """Raise InputError if statistics of a tower are needed and no sample has pictures."""
    need = statistics_need(only_tower(plan))
    if need and not any(samples.pictures):
        tower = next(group for group in plan.groups if group.in_tower)
        raise InputError.of(NO_PICTURES, tower.name, reason=need.where)


def calibration_samples(
    index: SourceIndex, settings: Calibration, number: int, *, trust_remote_code: bool
) -> "Samples":
    """Read at most `number` samples of calibration data as token ids of the checkpoint.

    They are the first rows, or random rows if the settings contain a seed. Rows with pictures are
    read if the model takes pictures. Raises InputError for rows that cannot be read.
    """
    require_extra("transformers", "calibrating")
    from vexport.calibration import read_samples

    return read_samples(
        settings.sources(number),
        index.root,
        vocab_size=vocab_size(index.config, str(index.root / "config.json")),
        trust_remote_code=trust_remote_code,
        with_pictures=sees_pictures(index.config),
    )
