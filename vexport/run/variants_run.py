"""Run `vexport compare --serve`: one checkpoint in several settings and versions of vLLM."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vexport.checkpoint.source import not_served_here, resolve_source
from vexport.engine.session import require_vllm
from vexport.errors import EnvironmentFault
from vexport.inference.options import BASELINE, CANDIDATE, EngineOptions
from vexport.names import Server, SourceRef
from vexport.outputs.replaceable import NamedPath, require_separate
from vexport.reports.run_record import Report
from vexport.run.checks import require_servable, require_tasks_and_models
from vexport.run.directory import KIND, RUN_DIR, opened
from vexport.run.run import Run
from vexport.run.side import local_side
from vexport.run.stages.concluding import conclude, report
from vexport.run.stages.serving import SESSION
from vexport.run.stages.variants import REFUSAL
from vexport.run.stages.variants import compare_variants as compare
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
    downloads = overwrite or not any(_sessions(folder))
    _require_usable(checkpoint, settings, options, outputs, downloads=downloads)
    for python in dict.fromkeys(variant.vllm_python for variant in matrix):
        require_vllm(python)
    root = resolve_source(checkpoint, options.on_progress)
    require_servable(root, [Serve()])
    require_separate(outputs, [NamedPath(label="CHECKPOINT", path=root)])
    side = local_side(
        CANDIDATE, root, options, name=str(checkpoint), label=CANDIDATE, folder=CANDIDATE
    )
    with opened(folder, overwrite=overwrite) as directory:
        run = Run(
            directory,
            options,
            [side],
            name=checkpoint.title,
            evaluate=settings,
            variants=matrix,
        )
        run.do(compare, conclude, report)
    return ComparedVariants(report=run.result(report), faults=run.result(compare).faults)


def _sessions(folder: Path) -> Iterator[Path]:
    """Yield the files of finished and of refused sessions of an earlier call.

    If there is one, the tasks are already downloaded.
    """
    for role in (BASELINE, CANDIDATE):
        for name in (SESSION, REFUSAL):
            yield from (folder / role).rglob(name)


def _require_usable(
    checkpoint: SourceRef,
    settings: Evaluate,
    options: EngineOptions,
    outputs: list[NamedPath],
    *,
    downloads: bool,
) -> None:
    if isinstance(checkpoint, Server):
        raise not_served_here(checkpoint)
    inputs = [NamedPath(label="CHECKPOINT", path=checkpoint.path)]
    require_separate(outputs, [*inputs, *evaluation_inputs(settings, "--task")])
    KIND.require_own(outputs[0].path)
    require_tasks_and_models(settings, options, [checkpoint], [Serve()], downloads=downloads)
