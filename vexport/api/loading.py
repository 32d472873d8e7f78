"""Functions that load checkpoints in vLLM, or from headers alone.

A load from headers needs only the packages that `check` needs. Therefore the modules of a real load
are imported when they are used.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from vexport.api.common import ModelName, Name, OnProblem, parsed, source_ref
from vexport.api.engine import Engine
from vexport.checkpoint.index import require_checkpoint, require_weights_found
from vexport.checkpoint.source import require_source, resolve_source
from vexport.checks import error_findings
from vexport.engine.arguments import require_layers
from vexport.engine.dry.load import dry_load_checkpoints, loadable_folder
from vexport.engine.dry.served import ServerTest
from vexport.errors import VexportError, convert_os_error
from vexport.errors.extras import attempt, raise_problems
from vexport.formats.gpus import Names, cards, parse_capabilities, parse_sizes
from vexport.names import SourceRef
from vexport.records import (
    DryLoadReport,
    EngineMode,
    Finding,
    LoadReport,
    OnProgress,
    silent,
)
from vexport.records.serving import StartupLog
from vexport.serving.startup_log import read_startup_log


def load(
    checkpoint: ModelName,
    *,
    dry: bool = False,
    tp: Names = (1,),
    sm: Names | None = None,
    gpu: Names = (),
    speculative: str = "",
    mode: EngineMode = "eager",
    run_dir: Name | None = None,
    overwrite: bool = False,
    engine: Engine | None = None,
    on_progress: OnProgress = silent,
) -> LoadReport | DryLoadReport:
    """Load a checkpoint in vLLM, as `vexport load` does.

    With `dry`, the checkpoint is loaded from headers alone, for the devices in `tp`, `sm` and
    `gpu`, which accept the same values as in `check`. vLLM gets the arguments in `engine.serve`,
    except the number of ranks, which is `tp`. A real load uses the tensor parallel size of
    `engine.serve`. Its results are kept only if `run_dir` names a run directory. `gpu` contains GPU
    names such as "H100". Their memory is compared with the model's needs. With `speculative`
    (METHOD or METHOD=FOLDER), the drafter is loaded next to the model.

    Raises:
        ValueError: `dry` is combined with `run_dir`, or `tp`, `sm`, `gpu` or `speculative` is given
            without `dry`.
    """
    engine_settings = engine or Engine()
    if not dry and parsed("load: tp", parse_sizes, tp) != (1,):
        raise ValueError("load: got tp without dry, need dry=True, or engine.serve")
    (report_of_load,) = load_all(
        [checkpoint],
        dry=dry,
        tp=tp,
        sm=sm,
        gpu=gpu,
        speculative=speculative,
        modes=(mode,),
        engines=(engine_settings,),
        run_dir=run_dir,
        overwrite=overwrite,
        on_progress=on_progress,
    )
    return report_of_load


def load_all(
    checkpoints: Sequence[ModelName],
    *,
    dry: bool = False,
    tp: Names = (1,),
    sm: Names | None = None,
    gpu: Names = (),
    speculative: str = "",
    modes: Sequence[EngineMode] = ("eager",),
    engines: Sequence[Engine] = (Engine(),),
    run_dir: Name | None = None,
    overwrite: bool = False,
    on_problem: OnProblem | None = None,
    on_progress: OnProgress = silent,
) -> list[LoadReport] | list[DryLoadReport]:
    """Load several checkpoints, each in every engine and mode, as `vexport load` does.

    Takes the arguments of `load`. `tp` is only for dry loads. If some of several checkpoints cannot
    be read, the others are loaded. `on_problem` is called with each error, and the report of the
    unreadable checkpoint contains the error. Without `on_problem`, the first error is raised at the
    end.

    Raises:
        ValueError: `dry` is combined with `run_dir`, or `sm`, `gpu` or `speculative` is given
            without `dry`.
    """
    if dry and run_dir is not None:
        raise ValueError("load: got run_dir with dry, need one of them: no engine starts")
    if not dry and (sm is not None or gpu or speculative):
        raise ValueError("load: got sm, gpu or speculative without dry, need dry=True")
    sizes = parsed("load: tp", parse_sizes, tp)
    capabilities = None if sm is None else parsed("load: sm", parse_capabilities, sm)
    gpus = parsed("load: gpu", cards, gpu)
    refs = tuple(source_ref("load: checkpoint", checkpoint) for checkpoint in checkpoints)
    names = [str(ref) for ref in refs]
    _require_any(refs)
    problems = _unreadable(refs, on_progress)
    readable = tuple(ref for ref in refs if str(ref) not in problems)
    unread = {name: error_findings(error) for name, error in problems.items()}
    reports: list[LoadReport] | list[DryLoadReport]
    if dry:
        reports = [
            *dry_load_checkpoints(
                readable,
                tuple(dict.fromkeys(engine.vllm_python for engine in engines)),
                tp=sizes,
                sm=capabilities,
                gpus=gpus,
                speculative=speculative,
                trust_remote_code=engines[0].trust_remote_code,
                serve=engines[0].serve,
                on_progress=on_progress,
            ),
            *(_unread_dry(name, findings) for name, findings in unread.items()),
        ]
    else:
        options = [engine.options(on_progress) for engine in engines]
        from vexport.run.load_run import load_checkpoints

        folder = None if run_dir is None else Path(run_dir)
        reports = [
            *load_checkpoints(readable, options, modes, run_dir=folder, overwrite=overwrite),
            *(
                LoadReport(checkpoint=name, ok=False, findings=findings)
                for name, findings in unread.items()
            ),
        ]
    reports.sort(key=lambda report: names.index(report.checkpoint))
    for problem in problems.values():
        if on_problem is None:
            raise problem
        on_problem(problem)
    return reports


def startup_log(log: Name | BinaryIO, name: str = "") -> StartupLog:
    """Return what the start-up log of `vllm serve` states, as `vexport load --log` does.

    `log` is a file, a binary stream, or the address of a running server. `name` is the stream's
    name in reports.
    """
    if isinstance(log, str) and log.startswith(("http://", "https://")):
        from vexport.inference.endpoint.statements import server_statements

        return server_statements(log)
    if isinstance(log, str | os.PathLike):
        path = Path(log)
        try:
            with path.open("rb") as stream:
                return read_startup_log(stream, name or str(log))
        except OSError as error:
            raise convert_os_error(error) from None
    return read_startup_log(log, name or "log")


def load_with_log(
    checkpoint: ModelName,
    log: Name | BinaryIO,
    name: str = "",
    *,
    sm: Names | None = None,
    gpu: Names = (),
    engine: Engine | None = None,
    on_progress: OnProgress = silent,
) -> DryLoadReport:
    """Compare a server with a dry load of a checkpoint, as `vexport load CHECKPOINT --log` does.

    `log` and `name` are as in `startup_log`. vLLM gets the tensor parallel size and the arguments
    of the log. Arguments in `engine.serve` override them. `sm` or `gpu` name the server's GPU, if
    the log does not state it. The checkpoint is validated before the log is read.

    Raises:
        Inconclusive: the log or the dry load is not sufficient for a comparison.
        InputError: there is no log, or it is of another model.
    """
    engine = engine or Engine()
    capabilities = () if sm is None else parsed("load: sm", parse_capabilities, sm)
    gpus = parsed("load: gpu", cards, gpu)
    ref = source_ref("load: checkpoint", checkpoint)
    test = ServerTest(
        ref=ref,
        root=loadable_folder(ref, on_progress),
        sm=capabilities,
        gpus=gpus,
        serve=engine.serve,
        vllm_python=engine.vllm_python,
        trust_remote_code=engine.trust_remote_code,
    )
    return test.report(startup_log(log, name), on_progress)


def _unread_dry(name: str, findings: tuple[Finding, ...]) -> DryLoadReport:
    return DryLoadReport(
        checkpoint=name, ok=False, findings=findings, vllm="", cells=(), rows=(), blind_spots=()
    )


def _require_any(refs: Sequence[SourceRef]) -> None:
    """Raise the errors of missing checkpoints if all checkpoints are missing.

    This check comes before the import of torch for the load, which takes seconds.
    """
    outcomes = {str(ref): attempt(partial(require_source, ref), str(ref)) for ref in refs}
    problems = [outcome for outcome in outcomes.values() if outcome is not None]
    if len(problems) == len(outcomes):
        raise_problems(problems)


def _unreadable(refs: Sequence[SourceRef], on_progress: OnProgress) -> dict[str, VexportError]:
    """Return the errors of unreadable checkpoints by name.

    Raises the errors if no checkpoint can be read. A single checkpoint is not tried here, because
    the load itself raises its error.
    """
    if len(refs) == 1:
        return {}

    def read(ref: SourceRef) -> None:
        root = resolve_source(ref, on_progress)
        require_checkpoint(root)
        require_weights_found(root)
        require_layers(root)

    outcomes = {str(ref): attempt(partial(read, ref), str(ref)) for ref in refs}
    problems = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
    if problems and len(problems) == len(outcomes):
        raise_problems([*problems.values()])
    return problems
