"""`python -m vexport.engine.dry.worker REQUEST.json RESULT.json`: every cell in a fork of one process.

vLLM is imported once. Each cell forks, because a process can have only one set of groups, one capability
that is remembered here and there, and one crash.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

from vexport.engine.dry.messages import Cell, CellResult, DryRequest, DryResult
from vexport.engine.worker import Report, end_with_parent, reporter
from vexport.files import from_json, to_json, write_text


def main(arguments: list[str]) -> int:
    """Read the request, try every cell, write the result; 0 whenever there is a result to read."""
    request_file, result_file = (Path(argument) for argument in arguments)
    request = from_json(DryRequest, request_file)
    end_with_parent()
    write_text(result_file, to_json(_run(request, reporter())))
    return 0


def _run(request: DryRequest, report: Report) -> DryResult:
    from vexport.engine.dry.pretend import pretend_cuda

    report("dry load", 0, total := len(request.checkpoints) * len(request.cells))
    pretend_cuda()
    _import_models(request)
    results: list[CellResult] = []
    for checkpoint in request.checkpoints:
        for cell in request.cells:
            results.append(_fork(checkpoint, cell, request))
            report("dry load", len(results), total)
    from vllm import __version__ as vllm_version

    size = len(request.cells)
    rows = tuple(tuple(results[at : at + size]) for at in range(0, len(results), size))
    return DryResult(vllm=vllm_version, checkpoints=rows)


def _import_models(request: DryRequest) -> None:
    """Import what the forks need; vLLM looks at a model class in a process of its own, but need not here."""
    from vllm.model_executor.models import registry

    from vexport.engine.dry.cell import configure

    registry._run_in_subprocess = lambda function: function()
    for checkpoint in request.checkpoints:
        try:
            config = configure(checkpoint, tp=1, trust_remote_code=request.trust_remote_code)
            registry.ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)
        except Exception as error:  # the cells will say it
            traceback.print_exception(error)


def _fork(checkpoint: Path, cell: Cell, request: DryRequest) -> CellResult:
    """Try a cell in a child; a child that dies is a cell that nothing is known of."""
    file = request.folder / "cell.json"
    file.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _child(checkpoint, cell, request, file)
    _, status = os.waitpid(child, 0)
    if file.is_file():
        return from_json(CellResult, file)
    code = os.waitstatus_to_exitcode(status)
    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return CellResult(cell=cell, outcome="refused", reason=f"the process ended with {ending}")


def _child(checkpoint: Path, cell: Cell, request: DryRequest, file: Path) -> None:
    """The life of a forked process; it does not return."""
    from vexport.engine.dry.cell import try_cell

    code = 1
    try:
        result = try_cell(checkpoint, cell, trust_remote_code=request.trust_remote_code)
        write_text(file, to_json(result))
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
