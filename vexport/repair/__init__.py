"""Repair checkpoints of any producer without calibration, and report the cost of each repair.

To add a family of repairs, add a function and a line in `families.FAMILIES`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.checkpoint.index import read_index, require_checkpoint, require_unchanged
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.smoothed import reader_of, smoothing_of
from vexport.checks import SourceComparison, all_findings, error_findings
from vexport.checks.vllm.quant_methods import COMPRESSED_TENSORS, method_name
from vexport.checks.vllm.view import CheckpointView
from vexport.errors import InputError
from vexport.errors.extras import MissingPackage, is_installed, require_extra
from vexport.outputs.replaceable import NamedPath, refuse_existing, require_separate
from vexport.outputs.resumable import new_directory, working_folder
from vexport.records import Finding, Repair, RepairReport, merged
from vexport.repair import config
from vexport.repair.write import Changes, apply, write_repaired
from vexport.rules import config as rules

if TYPE_CHECKING:
    from vexport.fidelity.source import ComparedSource

Family = Callable[[CheckpointView, "ComparedSource | None"], Changes]
OnProgress = Callable[[str, int, int], None]
# Families that repair only config.json and need no torch. `families.FAMILIES` lists all families.
CONFIG_ONLY: Sequence[Family] = (config.keys, config.words, config.targets)


def repair_checkpoint(
    checkpoint: Path, out: Path, source: Path | None, *, overwrite: bool, on_progress: OnProgress
) -> RepairReport:
    """Repair a checkpoint and write the result to the folder `out`, completely or not at all.

    Nothing is written if errors remain that cannot be repaired. Examples are an unreadable file and
    a fault that has several explanations. With `source`, a weight that differs from the source's
    weight is such an error, too. If the checkpoint was smoothed, the source is first scaled by
    `smoothing.json`.

    Raises InputError if a folder is not a checkpoint, if `source` is quantized, or if `out` may not
    be written. Without torch only config.json is repaired, and MissingPackage is raised if that is
    not enough.
    """
    require_checkpoint(checkpoint)
    if source is not None:
        require_checkpoint(source)  # before torch is imported, which takes seconds
    inputs = {"CHECKPOINT": checkpoint} | ({"--source": source} if source else {})
    require_separate(
        [NamedPath(label="OUT", path=path) for path in (out, working_folder(out))],
        [NamedPath(label=label, path=path) for label, path in inputs.items()],
    )
    refuse_existing(out, overwrite=overwrite)
    against = _source_comparison(source, on_progress) if source else None
    with ExitStack() as open_files:
        read_from = nullcontext() if source is None else require_unchanged(read_index(source))
        repairs: tuple[Repair, ...] = ()
        refusals: tuple[Finding, ...] = ()
        try:
            origin = (
                open_files.enter_context(_compared_source(checkpoint, source)) if source else None
            )
            reader = open_files.enter_context(Reader())
            view = CheckpointView(read_index(checkpoint), reader)
            if (method := method_name(view.quantization.values or {})) is not None:
                unknown = Finding.at(
                    rules.UNREPAIRABLE_METHOD,
                    view.quantization.place,
                    method=method,
                    known=COMPRESSED_TENSORS,
                )
                return _report(checkpoint, out, source, repairs, [unknown])
            families = _families()
            for number, family in enumerate(families):
                on_progress("repair (families)", number, len(families))
                changes = family(view, origin)
                refusals += changes.refusals
                if changes.repairs:
                    before, view = view, apply(view, changes)
                    repairs += tuple(
                        _with_change(repair, before, view, origin) for repair in changes.repairs
                    )
            on_progress("repair (families)", len(families), len(families))
            explained = {refusal.where for refusal in refusals}
            others = [each for each in all_findings(view, against) if each.where not in explained]
            if against is not None:
                others = [_digest_error_as_warning(finding) for finding in others]
        except InputError as problem:
            return _report(checkpoint, out, source, repairs, error_findings(problem))
        report = _report(checkpoint, out, source, repairs, [*refusals, *others])
        if not report.ok and not is_installed("torch"):
            raise MissingPackage("torch", f"{checkpoint}: repairing {report.refusals[0].where}")
        if report.ok:
            with (
                new_directory(out, overwrite=overwrite) as folder,
                read_from,
                require_unchanged(view.index),
            ):
                write_repaired(view, folder, on_progress=on_progress)
    return report


def _digest_error_as_warning(finding: Finding) -> Finding:
    """Return the error of a wrong file digest as a warning. Return other findings unchanged.

    The file's weights are compared with the source, so the digest is not needed to trust them. The
    repaired checkpoint gets new digests. Scales of inputs and of the KV cache cannot be compared,
    because the source does not have them.
    """
    if finding.check != "digests":
        return finding
    fix = (
        "ignore this for the weights, which were compared with the source; calibrate again if "
        "someone changed scales of inputs or of the KV cache"
    )
    return replace(finding, severity="warning", fix=fix)


def _families() -> Sequence[Family]:
    if not is_installed("torch"):
        return CONFIG_ONLY
    from vexport.repair.families import FAMILIES

    return FAMILIES


def _source_comparison(source: Path, on_progress: OnProgress) -> SourceComparison:
    require_extra("torch", "--source")
    from vexport.fidelity.compare import source_comparison

    return source_comparison(
        source, on_layer=partial(on_progress, "compare with the source (layers)")
    )


@contextmanager
def _compared_source(checkpoint: Path, source: Path) -> "Iterator[ComparedSource]":
    from vexport.fidelity.source import ComparedSource

    with reader_of(smoothing_of(checkpoint)) as reader:
        yield ComparedSource(read_index(source), reader)


def _report(
    checkpoint: Path,
    out: Path,
    source: Path | None,
    repairs: tuple[Repair, ...],
    findings: Sequence[Finding],
) -> RepairReport:
    findings = merged(findings)
    refusals = tuple(finding for finding in findings if finding.severity == "error")
    return RepairReport(
        checkpoint=str(checkpoint),
        out=str(out),
        ok=not refusals,
        repairs=repairs,
        refusals=refusals,
        warnings=tuple(finding for finding in findings if finding.severity != "error"),
        source=None if source is None else str(source),
    )


def _with_change(
    repair: Repair, before: CheckpointView, after: CheckpointView, source: "ComparedSource | None"
) -> Repair:
    if repair.layer is None:
        return repair
    from vexport.repair.families import weight_change

    return replace(repair, change=weight_change(before, after, repair.layer, source))
