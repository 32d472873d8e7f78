"""Run `vexport load`: runs that only load given checkpoints, each in a new engine, in sequence."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from vexport.checkpoint.source import resolve_source
from vexport.engine.arguments import require_arguments
from vexport.engine.session import EngineFault, log_folder, require_vllm
from vexport.errors import VexportError
from vexport.errors.extras import unexpected_error
from vexport.inference.options import CANDIDATE, EngineOptions
from vexport.names import Folder, SourceRef
from vexport.outputs.replaceable import NamedPath, require_separate
from vexport.records import ENGINE_CHECK, EngineMode, Finding, LoadReport
from vexport.run.checks import require_servable
from vexport.run.directory import KIND, RUN_DIR, opened
from vexport.run.run import Run
from vexport.run.side import local_side
from vexport.run.stages.concluding import STAGES, STAGES_UP_TO_LOAD
from vexport.run.stages.serving import load_candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Settings of a single load: a checkpoint and its folder, an engine, a mode."""

    ref: SourceRef
    root: Path
    engine: EngineOptions
    mode: EngineMode

    @property
    def title(self) -> str:
        """Return the checkpoint's name with the settings, as the name of a folder."""
        settings = [self.mode, f"tp{self.engine.serve.ranks}"]
        return "-".join([self.ref.file_name, *settings])


def load_checkpoints(
    refs: Sequence[SourceRef],
    engines: Sequence[EngineOptions],
    modes: Sequence[EngineMode],
    *,
    run_dir: Path | None = None,
    overwrite: bool = False,
) -> list[LoadReport]:
    """Return a report for each checkpoint, engine and mode, in that order.

    The engines differ in their interpreter or their tensor parallel size. Results are kept only if
    `run_dir` is given. A single load uses it as its run directory. Several loads have numbered run
    directories in it.

    Raises InputError if a checkpoint cannot be read, or if its heads cannot be divided. The same is
    raised if an interpreter's vLLM does not support an argument. No engine is started in these
    cases. Raises EnvironmentFault if an interpreter has no vLLM or there are too few GPUs. If an
    engine fails later, its report contains the error.
    """
    serves = [engine.serve for engine in engines]
    for ref in refs:
        if isinstance(ref, Folder):  # starting vLLM takes longer than this check
            require_servable(ref.path, serves)
    for python in dict.fromkeys(engine.vllm_python for engine in engines):
        require_vllm(python)
        in_python = [engine.serve for engine in engines if engine.vllm_python == python]
        require_arguments(in_python, python)
    on_progress = engines[0].on_progress
    roots = {ref: resolve_source(ref, on_progress) for ref in refs}
    for root in roots.values():
        require_servable(root, serves)
    loads = [
        Load(ref=ref, root=roots[ref], engine=engine, mode=mode)
        for ref in refs
        for engine in engines
        for mode in modes
    ]
    folders = run_folders(loads, run_dir)
    if run_dir is not None:
        read = [NamedPath(label="CHECKPOINT", path=root) for root in roots.values()]
        require_separate([NamedPath(label=RUN_DIR, path=run_dir)], read)
    for folder in folders:
        if folder is not None:
            KIND.require_own(folder)
    return [
        _load(load, folder, overwrite=overwrite)
        for load, folder in zip(loads, folders, strict=True)
    ]


def run_folders(loads: Sequence[Load], run_dir: Path | None) -> list[Path | None]:
    """Return the run directory of each load, or None if nothing is kept."""
    if run_dir is None or len(loads) == 1:
        return [run_dir] * len(loads)
    return [run_dir / f"{number}-{load.title}" for number, load in enumerate(loads, 1)]


def _load(load: Load, run_dir: Path | None, *, overwrite: bool) -> LoadReport:
    """Load and judge a checkpoint.

    If the session dies, its log is kept and the report names the log.
    """
    serve = load.engine.serve.model_copy(update={"enforce_eager": load.mode == "eager"})
    started = replace(load.engine, serve=serve)
    side = local_side(
        CANDIDATE,
        load.root,
        started,
        name=str(load.ref),
        label=f"load {load.root.name}",
        folder=CANDIDATE,
    )
    try:
        with ExitStack() as stack:
            folder = run_dir or stack.enter_context(log_folder("vexport-load-"))
            directory = stack.enter_context(opened(folder, overwrite=overwrite))
            run = Run(directory, started, [side], name=load.ref.title, evaluate=None)
            run.do(*(STAGES_UP_TO_LOAD if run_dir is None else STAGES))
            report = run.result(load_candidate)
    except EngineFault as fault:
        report = _crash_report(fault, fault.failure.log_tail)
    except (VexportError, OSError):
        raise
    except Exception as error:
        report = _crash_report(unexpected_error(error, f"the load of {load.ref}"), "")
    python = str(load.engine.vllm_python or "")
    return replace(
        report, checkpoint=str(load.ref), mode=load.mode, tp=serve.ranks, vllm_python=python
    )


def _crash_report(fault: VexportError, log_tail: str) -> LoadReport:
    finding = Finding.of(fault, check=ENGINE_CHECK, claim=None, severity="error")
    return LoadReport(checkpoint="", ok=False, findings=(finding,), log_tail=log_tail)
