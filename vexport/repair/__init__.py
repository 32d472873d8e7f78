"""Repairs a checkpoint of any producer without calibration, and says what each repair costs.

Adding a family of repairs is a function and a line in `families.FAMILIES`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.checkpoint.index import read_index, require_checkpoint, unchanged
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.smoothed import SMOOTHING, smoothing_of
from vexport.checks import findings_of, findings_on
from vexport.checks.config import NAME
from vexport.checks.vllm.quant_methods import METHOD, method_name
from vexport.checks.vllm.view import CheckpointView, error
from vexport.errors import InputError
from vexport.errors.extras import MissingPackage, is_installed, require_extra
from vexport.outputs.directory import new_directory, working_folder
from vexport.outputs.replaceable import NamedPath, refuse_existing, require_separate
from vexport.records import Finding, Repair, RepairReport
from vexport.repair import config
from vexport.repair.write import Changes, apply, write_repaired

if TYPE_CHECKING:
    from vexport.fidelity.source import ComparedSource

Family = Callable[[CheckpointView, "ComparedSource | None"], Changes]
OnProgress = Callable[[str, int, int], None]
# Families that repair only config.json and need no torch; `families.FAMILIES` has all.
CONFIG_ONLY: Sequence[Family] = (config.keys, config.targets)


def repair_checkpoint(
    checkpoint: Path, out: Path, source: Path | None, *, overwrite: bool, on_progress: OnProgress
) -> RepairReport:
    """Repair what can be repaired and write the result to the folder `out`, whole or not at all.

    Nothing is written where an error remains that no repair removes, a file that cannot be read among them.
    Raises InputError for folders that are no checkpoints, where `out` may not be written, and for the source
    of a smoothed checkpoint. Without torch only config.json is repaired: MissingPackage where that is not
    enough.
    """
    require_checkpoint(checkpoint)
    inputs = {"CHECKPOINT": checkpoint} | ({"--source": source} if source else {})
    require_separate(
        [NamedPath(label="OUT", path=path) for path in (out, working_folder(out))],
        [NamedPath(label=label, path=path) for label, path in inputs.items()],
    )
    refuse_existing(out, overwrite=overwrite)
    with Reader() as reader, Reader() as original:
        origin = _source(checkpoint, source, original) if source else None
        read_from = unchanged(origin.index) if origin else nullcontext()
        repairs: tuple[Repair, ...] = ()
        try:
            view = CheckpointView(read_index(checkpoint), reader)
            if (method := method_name(view.quantization or {})) is not None:
                return _report(checkpoint, out, repairs, [_unknown(view, method)])
            families = CONFIG_ONLY
            if is_installed("torch"):
                from vexport.repair.families import FAMILIES

                families = FAMILIES
            for number, family in enumerate(families):
                on_progress("repair (families)", number, len(families))
                changes = family(view, origin)
                if changes.repairs:
                    before, view = view, apply(view, changes)
                    repairs += tuple(_priced(repair, before, view, origin) for repair in changes.repairs)
            on_progress("repair (families)", len(families), len(families))
            findings = list(findings_on(view))
        except InputError as problem:
            return _report(checkpoint, out, repairs, findings_of(problem))
        report = _report(checkpoint, out, repairs, findings)
        if not report.ok and not is_installed("torch"):
            raise MissingPackage("torch", f"{checkpoint}: repairing {report.refusals[0].where}")
        if report.ok:
            with new_directory(out, overwrite=overwrite) as folder, read_from, unchanged(view.index):
                write_repaired(view, folder, on_progress=on_progress)
    return report


def _unknown(view: CheckpointView, method: str) -> Finding:
    fix = "quantize from the source"
    return error(NAME, view.quantization_place, expected=METHOD, got=repr(method), fix=fix)


def _source(checkpoint: Path, source: Path, reader: Reader) -> "ComparedSource":
    require_extra("torch", "--source")
    from vexport.fidelity.source import ComparedSource

    if smoothing_of(checkpoint):
        got = "a smoothed checkpoint, whose weights are not the source's"
        raise InputError(str(checkpoint / SMOOTHING), got=got, need="", fix="leave out --source")
    return ComparedSource(read_index(source), reader)


def _report(
    checkpoint: Path, out: Path, repairs: tuple[Repair, ...], findings: Sequence[Finding]
) -> RepairReport:
    refusals = tuple(finding for finding in findings if finding.severity == "error")
    return RepairReport(
        checkpoint=str(checkpoint),
        out=str(out),
        ok=not refusals,
        repairs=repairs,
        refusals=refusals,
        warnings=tuple(finding for finding in findings if finding.severity != "error"),
    )


def _priced(
    repair: Repair, before: CheckpointView, after: CheckpointView, source: "ComparedSource | None"
) -> Repair:
    """The repair with its cost for the weight of its layer."""
    if repair.layer is None:
        return repair
    from vexport.repair.families import weight_change

    return replace(repair, change=weight_change(before, after, repair.layer, source))
