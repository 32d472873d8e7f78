"""Run `vexport compare --serve`: one checkpoint in several settings and versions of vLLM."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vexport.checkpoint.source import resolve_source
from vexport.engine.session import require_vllm
from vexport.errors import EnvironmentFault, InputError
from vexport.errors.extras import attempt_all
from vexport.inference.options import BASELINE, CANDIDATE, EngineOptions
from vexport.inference.requested_tasks import fetch_tasks, require_tasks
from vexport.judge.task_settings import require_valid_settings
from vexport.names import Server, SourceRef
from vexport.outputs.replaceable import NamedPath, locked_folder, require_separate
from vexport.reports.run_record import Report
from vexport.run.directory import RUN_DIR, RunDirectory, logged_to, require_run_folder
from vexport.run.given import RunModel
from vexport.run.load_run import require_available, require_servable
from vexport.run.stages.concluding import variants_report, write_report
from vexport.run.stages.serving import SESSION
from vexport.run.stages.variants import REFUSAL, VariantComparison, serve_variants
from vexport.scenario import Evaluate, Serve, Variants
from vexport.scores.inputs import evaluation_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedVariants:
    """The report on all variants, and the faults of the environment."""

    report: Report
    faults: tuple[EnvironmentFault, ...]


def compare_variants(
    checkpoint: SourceRef,
    variants: Variants,
    settings: Evaluate,
    folder: Path,
    options: EngineOptions,
    *,
    overwrite: bool = False,
) -> ComparedVariants:
    """Serve a checkpoint in each variant, and compare each variant with the first.

    `options.serve` has the settings that all variants share. `options.vllm_python` is the first
    interpreter. Responses and the report are in the run directory `folder`. A second call serves
    only the variants without responses.

    Raises InputError for an unusable checkpoint, task, text or setting, and if `folder` overlaps an
    input. Raises EnvironmentFault if an interpreter has no vLLM, or if the first variant cannot be
    served. A variant that vLLM refuses is a row of the report.
    """
    matrix = variants.matrix(options.serve, options.vllm_python)
    outputs = [NamedPath(label=RUN_DIR, path=folder)]
    _require_usable(checkpoint, settings, options, outputs)
    for python in dict.fromkeys(variant.vllm_python for variant in matrix):
        require_vllm(python)
    root = resolve_source(checkpoint, options.on_progress)
    require_servable(root, [Serve()])
    require_separate(outputs, [NamedPath(label="CHECKPOINT", path=root)])
    if overwrite or not any(_sessions(folder)):
        require_valid_settings(settings, fetch_tasks(settings, options))
    with locked_folder(folder, RUN_DIR):
        directory = RunDirectory(folder)
        directory.begin(overwrite=overwrite)
        comparing = VariantComparison(
            ref=checkpoint,
            root=root,
            variants=matrix,
            settings=settings.model_copy(update={"baseline": None}),
            options=options,
            directory=directory,
        )
        with logged_to(folder):
            results = serve_variants(comparing)
            model = RunModel(ref=checkpoint, role=CANDIDATE, checkpoint=root)
            report = variants_report(model, results.rows, directory.seconds)
            write_report(report, folder)
    return ComparedVariants(report=report, faults=results.faults)


def _sessions(folder: Path) -> Iterator[Path]:
    """Yield the files of finished and of refused sessions of an earlier call.

    If there is one, the tasks are already downloaded.
    """
    for role in (BASELINE, CANDIDATE):
        for name in (SESSION, REFUSAL):
            yield from (folder / role).rglob(name)


def _require_usable(
    checkpoint: SourceRef, settings: Evaluate, options: EngineOptions, outputs: list[NamedPath]
) -> None:
    """Raise errors for problems that can be found without a download or an engine."""
    if isinstance(checkpoint, Server):
        raise InputError(
            str(checkpoint),
            got="the address of a server, whose settings cannot be changed from here",
            need="a checkpoint that vLLM serves on this machine",
            fix="give a folder or ORG/NAME, or compare two servers with `vexport eval`",
        )
    inputs = [NamedPath(label="CHECKPOINT", path=checkpoint.path)]
    require_separate(outputs, [*inputs, *evaluation_inputs(settings, "--task")])
    require_run_folder(outputs[0].path)
    attempt_all(
        [
            ("tasks", partial(_require_tasks, settings, options)),
            (str(checkpoint), partial(require_available, checkpoint, [Serve()])),
        ]
    )


def _require_tasks(settings: Evaluate, options: EngineOptions) -> None:
    """Raise InputError if a task cannot be used, or if a margin or gate does not fit the tasks."""
    require_valid_settings(settings, require_tasks(settings, options))
