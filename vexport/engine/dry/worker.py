"""`python -m vexport.engine.dry.worker REQUEST.json RESULT.json`: every cell in forks of one process.

vLLM is imported once. Each try forks, because a process has one set of groups, one capability that vLLM
remembers here and there, and one crash.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from vexport.engine.messages import CellResult, DryRequest, DryResult, DryTry, Outcome
from vexport.engine.worker import answer_request, reporter
from vexport.files import from_json, to_json, write_text
from vexport.records import OnProgress

_STAGE = "dry load"
# Modules that vLLM imports for every model: the plainest class, and the attention backends.
_EVERY_CELL = (
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flashinfer",
    "vllm.v1.attention.backends.flex_attention",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.turboquant_attn",
)


@cache
def preload() -> None:
    """Import vLLM for a device that is not there, for a process that forks dry loads."""
    from vexport.engine.dry.fake_platform import fake_cuda

    fake_cuda()
    from vexport.engine.dry import cell  # noqa: F401

    for module in _EVERY_CELL:
        with suppress(Exception):  # of another version of vLLM; a cell that needs it will say so
            importlib.import_module(module)


def main(arguments: list[str]) -> int:
    """Read the request, try every cell, write the result; 0 whenever there is a result to read."""
    return answer_request(arguments, DryRequest, _results_of)


def _results_of(request: DryRequest) -> DryResult:
    report = reporter()
    tries = [_tries(number, request) for number in range(len(request.checkpoints))]
    everything = [rank for cells in tries for ranks in cells for rank in ranks]
    report(_STAGE, 0, len(everything))
    version = _import_vllm(request)
    _run(everything, report)
    results = tuple(
        tuple(merge_ranks([from_json(CellResult, rank.file) for rank in ranks]) for ranks in cells)
        for cells in tries
    )
    return DryResult(vllm=version, checkpoints=results)


def merge_ranks(results: Sequence[CellResult]) -> CellResult:
    """One result for a cell from those of its ranks: the first that did not load, else all their faults."""
    failed = [result for result in results if result.outcome != "loaded"]
    if failed:
        return failed[0]
    faults = {(fault.kind, fault.where): fault for result in reversed(results) for fault in result.faults}
    return replace(results[0], faults=tuple(faults.values()))


def _tries(number: int, request: DryRequest) -> list[list[DryTry]]:
    """For each cell of a checkpoint its first and its last rank: what is too small shows at the last one."""
    return [
        [
            DryTry(request=request, number=number, cell=cell, rank=rank)
            for rank in dict.fromkeys((0, cell.tp - 1))
        ]
        for cell in request.cells
    ]


def _import_vllm(request: DryRequest) -> str:
    """Import what the children need, and say vLLM's version.

    vLLM looks at a model class in a separate process, so as not to touch a GPU; here there is none.
    """
    preload()
    from vllm import __version__ as version
    from vllm.model_executor.models import registry

    from vexport.engine.dry.cell import configure

    registry._run_in_subprocess = lambda function: function()
    largest = max(cell.tp for cell in request.cells)
    for checkpoint in request.checkpoints:
        for tp in dict.fromkeys((largest, 1)):  # vLLM imports more where it has to communicate
            try:
                model = configure(checkpoint, tp=tp, trust_remote_code=request.trust_remote_code).model_config
                registry.ModelRegistry.resolve_model_cls(model.architectures, model)
                break
            except Exception as error:  # each cell will say so
                traceback.print_exception(error)
    gc.freeze()
    return str(version)


def _run(tries: Sequence[DryTry], report: OnProgress) -> None:
    """Fork a child for each try, as many at a time as there are cores; every one leaves a file.

    Those of one capability come first, so that what they share is there for the others.
    """
    fork, running = multiprocessing.get_context("fork"), dict[BaseProcess, DryTry]()
    waiting = sorted(tries, key=lambda attempt: attempt.cell.sm)
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            attempt = waiting.pop(0)
            child = fork.Process(target=_try, args=(attempt,))
            child.start()
            running[child] = attempt
        connection.wait([child.sentinel for child in running])
        for ended in [child for child in running if not child.is_alive()]:
            _require_file(running.pop(ended), ended.exitcode or 0)
        report(_STAGE, len(tries) - len(waiting) - len(running), len(tries))


def _try(attempt: DryTry) -> None:
    from vexport.engine.dry.cell import try_cell

    gc.disable()
    write_text(attempt.file, to_json(try_cell(attempt)))


def _require_file(attempt: DryTry, code: int) -> None:
    """A child that died is a checkpoint that vLLM does not load there."""
    if attempt.file.is_file():
        return
    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    # The system kills a process that is out of memory; any other death is vLLM's fault.
    outcome: Outcome = "unknown" if code == -signal.SIGKILL else "refused"
    reason = f"the process ended with {ending}"
    write_text(attempt.file, to_json(CellResult(cell=attempt.cell, outcome=outcome, reason=reason)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
