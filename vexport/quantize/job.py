"""One quantization: what is asked for, and its steps plan, calibrate, write."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vexport.checkpoint.index import SourceIndex, unchanged
from vexport.checkpoint.writer import DEFAULT_SHARD_BYTES
from vexport.errors import CheckpointFailed, InputError
from vexport.files import digest_bytes, from_json, to_json, write_text
from vexport.numerics.compiling import watch_compilation
from vexport.numerics.ranks import gather, on_first, process_group, rank_and_size
from vexport.outputs import (
    NamedPath,
    aside_folder,
    kept_as_failed,
    refuse_existing,
    require_separate,
    resumable_directory,
    working_folder,
)
from vexport.plan import Settings as PlanSettings
from vexport.plan import require_accepted
from vexport.plan.needs import calibration_need, needs_rounding
from vexport.plan.source import DEFAULTS, plan_source
from vexport.quantize.estimate import Step, estimated_steps, numbered
from vexport.quantize.finishing import finish, forget_progress
from vexport.quantize.samples import PlanText, require_calibration
from vexport.quantize.stream import dealt, input_digest, planned_shards, write_shards
from vexport.scenario import Calibration as CalibrationSettings
from vexport.scenario import Rule
from vexport.types import Calibration, OnProgress, Plan, silent
from vexport.types.rounding import RoundingReport

# What calibration text showed, for a call that goes on.
STATISTICS = "statistics.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeJob:
    """What is asked for. `source` is a folder or a hub id as it was asked for, `out` the folder written."""

    source: str
    out: Path
    rules: tuple[Rule, ...]
    planning: PlanSettings = DEFAULTS
    calibration: CalibrationSettings | None = None
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
) -> tuple[Plan, Calibration | None, RoundingReport | None]:
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
        need, fix = "the same on all ranks", "give all of them the same source and arguments"
        raise InputError(f"rank {rank} of {size}", got="another plan than rank 0", need=need, fix=fix)


def write_checkpoint(
    job: QuantizeJob, index: SourceIndex, plan: Plan, known: Calibration | None = None
) -> tuple[Calibration | None, RoundingReport | None]:
    """Calibrate, round and write: the quantized checkpoint with its recipe appears whole or not at all.

    A call that was broken off is continued by the next one with the same arguments. The answer is what the
    samples showed where they were run (`known` where that was done before), and how weights were rounded by
    them. InputError where a file of the source has changed since `index` was read; CheckpointFailed, with
    OUT.failed in the place of OUT, by `job.prove`.
    """
    rounding, shards = None, planned_shards(index, plan, shard_bytes=job.shard_bytes)
    with watch_compilation(partial(job.on_progress, "compile kernels, once")) as compilation:

        def on_progress(stage: str, done: int, total: int) -> None:
            compilation.end()
            job.on_progress(stage, done, total)

        text = None
        if calibration_need(plan) and (known is None or needs_rounding(plan)):
            trust = job.trust_remote_code
            text = PlanText(index, plan, job.calibration, on_progress=on_progress, trust_remote_code=trust)
        inputs = input_digest(index, plan, known, text.digest if text else "", shard_bytes=job.shard_bytes)
        with _working_folder(job, inputs) as folder, unchanged(index):
            calibration = known
            if text is not None:
                if job.on_estimate is not None and (steps := estimated_steps(text)):
                    job.on_estimate(steps)
                    text.on_progress = numbered(steps, on_progress)
                calibration = known or _calibrated(text, aside_folder(folder) / STATISTICS)
                if needs_rounding(plan):
                    finished, rounding = text.round(calibration, aside_folder(folder))
                    calibration = rounding.completed(calibration)
            write_shards(
                index,
                plan,
                calibration,
                folder,
                dealt(shards),
                finished=finished if rounding else None,
                on_progress=on_progress,
            )
            gather(None)  # all files are written
            if rank_and_size()[0] == 0:
                finish(job, index, plan, calibration, folder, shards)
                failure = job.prove(folder, plan)
                forget_progress(folder, shards)
                if failure is not None:
                    raise kept_as_failed(folder, job.out, failure)
    return calibration, rounding


def _calibrated(text: PlanText, file: Path) -> Calibration:
    """What the text shows, from `file` where an earlier call left it there."""
    if not on_first(file.is_file):
        found = text.calibrate()
        if rank_and_size()[0] == 0:
            write_text(file, to_json(found))
    return on_first(lambda: from_json(Calibration, file))


@contextmanager
def _working_folder(job: QuantizeJob, inputs: str) -> Iterator[Path]:
    """Where OUT is made: the first rank's, which publishes it at the end of the block."""
    if rank_and_size()[0] > 0:
        yield on_first(Path)
        return

    def note(text: str) -> None:
        job.on_progress(f"quantize {text}", 1, 1)

    with resumable_directory(job.out, input_digest=inputs, overwrite=job.overwrite, note=note) as folder:
        yield on_first(lambda: folder)


def _require_separate(job: QuantizeJob, source: Path) -> None:
    """InputError where `out`, or its working folder, overlaps what is read."""
    inputs = [NamedPath(label="SOURCE", path=source)]
    if job.calibration and job.calibration.path:
        inputs.append(NamedPath(label="--calibration", path=job.calibration.path))
    outputs = [NamedPath(label="OUT", path=path) for path in (job.out, working_folder(job.out))]
    require_separate(outputs, inputs)
