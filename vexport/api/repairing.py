"""The function that repairs a checkpoint. Repairs of config.json need neither torch nor numba."""

from pathlib import Path

from vexport.api.common import Name, named
from vexport.records import OnProgress, RepairReport, silent
from vexport.repair import repair_checkpoint


def repair(
    checkpoint: Name,
    out: Name,
    *,
    source: Name | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = silent,
) -> RepairReport:
    """Repair a checkpoint into the folder `out`, as `vexport repair` does.

    If something cannot be repaired, the report has refusals, and nothing is written.
    """
    folder = Path(named("repair: checkpoint", checkpoint))
    origin = None if source is None else Path(named("repair: source", source))
    return repair_checkpoint(
        folder,
        Path(named("repair: out", out)),
        origin,
        overwrite=overwrite,
        on_progress=on_progress,
    )
