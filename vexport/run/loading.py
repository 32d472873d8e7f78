"""`vexport load`: checkpoints in vLLM, one engine after the other, and a report on each."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vexport.checkpoint.index import require_checkpoint
from vexport.checkpoint.source import resolve_source
from vexport.engine.arguments import require_arguments, require_heads, require_layers
from vexport.engine.session import EngineFault, log_folder, require_vllm
from vexport.errors import VexportError
from vexport.errors.extras import unforeseen
from vexport.records import ENGINE_CHECK, EngineMode, Finding, LoadReport
from vexport.run.options import EngineOptions
from vexport.run.serving import ModelUnderTest, serve_model
from vexport.scenario import Serve


def load_checkpoints(
    names: Sequence[str],
    pythons: Sequence[Path | None],
    serves: Sequence[Serve],
    modes: Sequence[EngineMode],
    options: EngineOptions,
) -> list[LoadReport]:
    """A report for each checkpoint, interpreter, engine setting and mode, in that order.

    None is our own interpreter; the settings differ in their tensor parallel size. Before the first
    engine starts, raises InputError where a checkpoint cannot be read, its heads cannot be cut or a
    vLLM does not know an argument, EnvironmentFault where an interpreter has no vLLM or there are
    too few GPUs. What stops an engine later is in its report.
    """
    for name in names:
        if Path(name).is_dir():  # before vLLM is asked, which takes longer
            require_servable(Path(name), serves)
    for python in pythons:
        require_vllm(python)
        require_arguments(serves, python)
    roots = {name: resolve_source(name, options.on_progress) for name in names}
    for root in roots.values():
        require_servable(root, serves)
    return [
        _load(name, roots[name], mode, replace(options, vllm_python=python, serve=serve))
        for name in names
        for python in pythons
        for serve in serves
        for mode in modes
    ]


def require_servable(root: Path, serves: Sequence[Serve]) -> None:
    """Raise InputError where a folder is no checkpoint that vLLM could serve with these
    settings.
    """
    require_checkpoint(root)
    require_layers(root)
    for serve in serves:
        require_heads(root, serve.ranks)


def _load(name: str, root: Path, mode: EngineMode, options: EngineOptions) -> LoadReport:
    """Load and judge one checkpoint. The log of a session that died is kept, and named."""
    serve = options.serve.model_copy(update={"enforce_eager": mode == "eager"})
    try:
        with log_folder("vexport-load-") as folder:
            model = ModelUnderTest(
                role=f"load {root.name}",
                checkpoint=root,
                folder=folder,
                options=replace(options, serve=serve),
            )
            report = serve_model(model).report()
    except EngineFault as fault:
        report = _died(fault, fault.failure.log_tail)
    except (VexportError, OSError):
        raise
    except Exception as error:
        report = _died(unforeseen(error, f"the load of {name}"), "")
    python = str(options.vllm_python or "")
    return replace(report, checkpoint=name, mode=mode, tp=serve.ranks, vllm_python=python)


def _died(fault: VexportError, log_tail: str) -> LoadReport:
    finding = Finding.of(fault, check=ENGINE_CHECK, severity="error")
    return LoadReport(checkpoint="", ok=False, findings=(finding,), log_tail=log_tail)
