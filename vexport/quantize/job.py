"""One quantization: what is asked for, and its steps plan, calibrate, write."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vexport.checkpoint.index import SourceIndex, unchanged
from vexport.checkpoint.writer import DEFAULT_SHARD_BYTES
from vexport.errors import CheckpointFailed, InputError
from vexport.errors.extras import require_extra
from vexport.files import digest_bytes
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
from vexport.plan.needs import needs_search
from vexport.plan.source import DEFAULTS, plan_source
from vexport.quantize.finishing import finish, forget_progress, recipe, write_recipe
from vexport.quantize.samples import calibrate_plan, require_calibration, round_plan
from vexport.quantize.stream import Search, dealt, input_digest, planned_shards, write_shards
from vexport.scenario import Calibration as CalibrationSettings
from vexport.scenario import Rule
from vexport.types import Calibration, OnProgress, Plan, silent
from vexport.types.rounding import RoundingReport


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

    def calibrate(self, index: SourceIndex, plan: Plan) -> Calibration | None:
        """What the samples show; None where the plan needs none."""
        return calibrate_plan(
            index,
            plan,
            self.calibration,
            on_progress=self.on_progress,
            trust_remote_code=self.trust_remote_code,
        )


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
        calibration = job.calibrate(index, plan)
        rounding = write_checkpoint(job, index, plan, calibration)
    if calibration is not None and rounding is not None:
        calibration = rounding.completed(calibration)
    return plan, calibration, rounding


def _require_same_on_all_ranks(plan: Plan) -> None:
    """InputError where this rank has another plan than the first: they would wait without end."""
    rank, size = rank_and_size()
    own = digest_bytes(repr((plan.groups, plan.attention)).encode()) if size > 1 else ""
    if on_first(lambda: own) != own:
        need, fix = "the same on all ranks", "give all of them the same source and arguments"
        raise InputError(f"rank {rank} of {size}", got="another plan than rank 0", need=need, fix=fix)


def write_checkpoint(
    job: QuantizeJob, index: SourceIndex, plan: Plan, calibration: Calibration | None
) -> RoundingReport | None:
    """Write the quantized checkpoint with its recipe, which appears whole or not at all.

    A call that was broken off is continued by the next one with the same arguments. The answer is how the
    weights were rounded, where calibration text decided it. InputError where a file of the source has
    changed since `index` was read; CheckpointFailed, with OUT.failed in the place of OUT, by `job.prove`.
    """
    shards = planned_shards(index, plan, shard_bytes=job.shard_bytes)
    with (
        _working_folder(job, index, plan, calibration) as folder,
        watch_compilation(partial(job.on_progress, "compile kernels, once")) as compilation,
    ):

        def on_progress(stage: str, done: int, total: int) -> None:
            compilation.end()
            job.on_progress(stage, done, total)

        with unchanged(index):
            finished, rounding = round_plan(
                index,
                plan,
                calibration,
                job.calibration,
                aside_folder(folder),
                on_progress=on_progress,
                trust_remote_code=job.trust_remote_code,
            )
            if rounding is not None and calibration is not None:
                calibration = rounding.completed(calibration)
            write_shards(
                index,
                plan,
                calibration,
                folder,
                dealt(shards),
                search=_search() if needs_search(plan) else None,
                finished=finished,
                on_progress=on_progress,
            )
        gather(None)  # all files are written
        if rank_and_size()[0] == 0:
            with unchanged(index):
                finish(index, plan, calibration, folder, shards)
            failure = job.prove(folder, plan)
            forget_progress(folder, shards)
            if failure is not None:
                raise kept_as_failed(folder, job.out, failure)
    return rounding


@contextmanager
def _working_folder(
    job: QuantizeJob, index: SourceIndex, plan: Plan, calibration: Calibration | None
) -> Iterator[Path]:
    """Where OUT is made, with its recipe: the first rank's, which publishes it at the end of the block."""
    if rank_and_size()[0] > 0:
        yield on_first(Path)
        return
    all_experts = job.calibration is None or job.calibration.all_experts
    digest = input_digest(index, plan, calibration, all_experts, shard_bytes=job.shard_bytes)
    text = recipe(
        index,
        plan,
        job.rules,
        job.calibration,
        calibration,
        job.out,
        planning=job.planning,
        source=job.source,
    )

    def note(text: str) -> None:
        job.on_progress(f"quantize {text}", 1, 1)

    with resumable_directory(job.out, input_digest=digest, overwrite=job.overwrite, note=note) as folder:
        write_recipe(text, folder)
        yield on_first(lambda: folder)


def _search() -> Search:
    require_extra("torch", "an observer that searches for scales")
    from vexport.quantize.weight_scales import search_scales

    return search_scales


def _require_separate(job: QuantizeJob, source: Path) -> None:
    """InputError where `out`, or its working folder, overlaps what is read."""
    inputs = [NamedPath(label="SOURCE", path=source)]
    if job.calibration and job.calibration.path:
        inputs.append(NamedPath(label="--calibration", path=job.calibration.path))
    outputs = [NamedPath(label="OUT", path=path) for path in (job.out, working_folder(job.out))]
    require_separate(outputs, inputs)
