"""Repairs a checkpoint of any producer without calibration, and says what each repair costs.

Adding a family of repairs is a function and a line in `families.FAMILIES`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.checkpoint.index import read_index, require_checkpoint, unchanged
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.smoothed import reader_of, smoothing_of
from vexport.checks import findings_of, findings_on
from vexport.checks.config import NAME, other_method
from vexport.checks.vllm.quant_methods import METHODS
from vexport.checks.vllm.view import CheckpointView, error
from vexport.errors import InputError
from vexport.errors.extras import MissingPackage, is_installed, require_extra
from vexport.outputs.directory import new_directory, working_folder
from vexport.outputs.replaceable import NamedPath, refuse_existing, require_separate
from vexport.records import Finding, Repair, RepairReport, Smoothing
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
    Raises InputError for folders that are no checkpoints, and where `out` may not be written. Without torch
    only config.json is repaired: MissingPackage where that is not enough.
    """
    require_checkpoint(checkpoint)
    inputs = {"CHECKPOINT": checkpoint} | ({"--source": source} if source else {})
    require_separate(
        [NamedPath(label="OUT", path=path) for path in (out, working_folder(out))],
        [NamedPath(label=label, path=path) for label, path in inputs.items()],
    )
    refuse_existing(out, overwrite=overwrite)
    smoothing = _smoothing(checkpoint, source)
    with Reader() as reader, reader_of(smoothing) as original:
        origin = _source(source, original) if source else None
        read_from = unchanged(origin.index) if origin else nullcontext()
        repairs: tuple[Repair, ...] = ()
        try:
            view = CheckpointView(read_index(checkpoint), reader)
            if (method := other_method(view)) is not None:
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
            if origin is not None and smoothing and repairs:
                from vexport.fidelity.smoothing import disagreements

                findings += disagreements(view, origin, original, smoothing)
        except InputError as problem:
            return _report(checkpoint, out, repairs, findings_of(problem))
        report = _report(checkpoint, out, repairs, findings)
        if not report.ok and not is_installed("torch"):
            raise MissingPackage("torch", f"{checkpoint}: repairing {report.refusals[0].where}")
        if report.ok:
            with new_directory(out, overwrite=overwrite) as folder, read_from:
                write_repaired(view, folder, on_progress=on_progress)
    return report


def _unknown(view: CheckpointView, method: str) -> Finding:
    expected, fix = f"compressed-tensors, or one of {', '.join(METHODS)}", "quantize from the source"
    return error(NAME, view.quantization_place, expected=expected, got=repr(method), fix=fix)


def _smoothing(checkpoint: Path, source: Path | None) -> Mapping[str, Smoothing]:
    """The source's smoothing; InputError where the file that has it is not to be believed."""
    if source is None:
        return smoothing_of(checkpoint)
    require_extra("torch", "--source")
    from vexport.fidelity.smoothing import proven_smoothing

    return proven_smoothing(checkpoint, read_index(source))


def _source(root: Path, reader: Reader) -> "ComparedSource":
    from vexport.fidelity.source import ComparedSource

    return ComparedSource(root, reader)


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
