"""One quantization: what is asked for, and its steps plan, calibrate, write."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vexport.checkpoint.index import SourceIndex, unchanged
from vexport.checkpoint.writer import DEFAULT_SHARD_BYTES
from vexport.errors import CheckpointFailed, InputError
from vexport.files import digest_bytes
from vexport.numerics.jit import telling_compilation
from vexport.numerics.ranks import gather, on_first, process_group, rank_and_size
from vexport.outputs import (
    NamedPath,
    aside_folder,
    refuse_existing,
    require_separate,
    resumable_directory,
    working_folder,
)
from vexport.plan.build import PlanSettings, require_accepted
from vexport.plan.needs import calibration_need, needs_rounding
from vexport.plan.source import DEFAULTS, plan_source
from vexport.quantize.estimate import Step, estimated_steps, numbered
from vexport.quantize.finishing import finish
from vexport.quantize.samples import PlanText, require_calibration
from vexport.quantize.stream import dealt, input_digest, planned_shards, write_shards
from vexport.records import CalibrationRecord, OnProgress, Plan, silent
from vexport.records.rounding import RoundingReport
from vexport.scenario import Calibration, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeJob:
    """A request to quantize `source`, a folder or a hub id as it was asked for, into the folder `out`."""

    source: str
    out: Path
    rules: tuple[Rule, ...]
    planning: PlanSettings = DEFAULTS
    calibration: Calibration | None = None
    overwrite: bool = False
    trust_remote_code: bool = False
    shard_bytes: int = DEFAULT_SHARD_BYTES
    # Judges the finished folder before it becomes `out`; what it returns is raised.
    prove: Callable[[Path, Plan], CheckpointFailed | None] = lambda folder, plan: None
    on_progress: OnProgress = silent
    # Told what the text will take before it is run, where that is worth measuring.
    on_estimate: Callable[[tuple[Step, ...]], None] | None = None


def quantize_source(
    job: QuantizeJob, on_plan: Callable[[Plan], None] = lambda plan: None
) -> tuple[Plan, CalibrationRecord | None, RoundingReport | None]:
    """Quantize a checkpoint; `on_plan` sees the plan before anything else is done.

    The answer is what was done, what the samples showed where they were run, and how the weights were rounded
    by them. Torchrun's ranks calibrate, round and write together, in a folder that all of them see.
    """
    _require_separate(job, Path(job.source).expanduser())
    with process_group():
        if rank_and_size()[0] == 0:
            refuse_existing(job.out, overwrite=job.overwrite)
        index, plan = plan_source(job.source, job.rules, job.planning, on_progress=job.on_progress)
        _require_separate(job, index.root)
        require_accepted(plan)
        require_calibration(plan, job.calibration)
        on_plan(plan)
        _require_same_on_all_ranks(plan)
        calibration, rounding = write_checkpoint(job, index, plan)
    return plan, calibration, rounding


def _require_same_on_all_ranks(plan: Plan) -> None:
    """InputError where this rank has another plan than the first: they would wait without end."""
    rank, size = rank_and_size()
    own = digest_bytes(repr((plan.groups, plan.attention)).encode()) if size > 1 else ""
    if on_first(lambda: own) != own:
        got, fix = "its plan is not that of rank 0", "give all of them the same source and arguments"
        raise InputError(f"rank {rank} of {size}", got=got, need="", fix=fix)


def write_checkpoint(
    job: QuantizeJob, index: SourceIndex, plan: Plan, known: CalibrationRecord | None = None
) -> tuple[CalibrationRecord | None, RoundingReport | None]:
    """Calibrate, round and write: the quantized checkpoint with its recipe appears whole or not at all.

    A call that was broken off is continued by the next one with the same arguments. The answer is what the
    samples showed where they were run (`known` where that was done before), and how weights were rounded by
    them. InputError where a file of the source has changed since `index` was read; CheckpointFailed, with
    OUT.failed in the place of OUT, by `job.prove`.
    """
    text, finished, rounding, shards = None, None, None, planned_shards(index, plan, job.shard_bytes)
    with telling_compilation(job.on_progress) as on_progress:
        if calibration_need(plan) and (known is None or needs_rounding(plan)):
            trust = job.trust_remote_code
            text = PlanText(index, plan, job.calibration, on_progress=on_progress, trust_remote_code=trust)
        inputs = input_digest(index, plan, known, text.digest if text else "", shard_bytes=job.shard_bytes)
        working = resumable_directory(
            job.out,
            input_digest=inputs,
            overwrite=job.overwrite,
            note=lambda text: job.on_progress(f"quantize {text}", 1, 1),
        )
        with working as folder, unchanged(index):
            calibration, aside = known, aside_folder(folder)
            if text is not None:
                if job.on_estimate is not None and (steps := estimated_steps(text)):
                    job.on_estimate(steps)
                    text.on_progress = numbered(steps, on_progress)
                calibration = known or text.calibrated(aside)
                if needs_rounding(plan):
                    finished, rounding = text.round(calibration, aside)
                    calibration = rounding.completed(calibration)
            write_shards(
                index, plan, calibration, folder, dealt(shards), finished=finished, on_progress=on_progress
            )
            gather(None)  # all files are written
            if rank_and_size()[0] == 0:
                finish(job, index, plan, calibration, folder, shards)
    return calibration, rounding


def _require_separate(job: QuantizeJob, source: Path) -> None:
    """InputError where `out`, or its working folder, overlaps what is read."""
    inputs = [NamedPath(label="SOURCE", path=source)]
    if job.calibration and job.calibration.path:
        inputs.append(NamedPath(label="--calibration", path=job.calibration.path))
    outputs = [NamedPath(label="OUT", path=path) for path in (job.out, working_folder(job.out))]
    require_separate(outputs, inputs)
