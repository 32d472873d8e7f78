"""`python -m vexport.engine.dry.worker REQUEST.json RESULT.json`: try every cell in a fork.

vLLM is imported once, and each try forks this process. Each fork has a single set of distributed
process groups and a single capability, because vLLM caches both. A crash ends only the fork. Memory
and time of a try are limited, because a checkpoint is not trusted.
"""

import gc
import importlib
import multiprocessing
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from vexport.checkpoint.index import read_index
from vexport.engine.dry.controls import control_kind, same_refusal
from vexport.engine.messages import (
    Cell,
    CellResult,
    Control,
    ControlKind,
    DryRequest,
    DryResult,
    DryTry,
    Outcome,
)
from vexport.engine.worker import progress_reporter, run_worker
from vexport.errors import VexportError
from vexport.errors.extras import is_memory
from vexport.files import from_json, to_json, write_text
from vexport.records import OnProgress

_STAGE = "dry load"
_GIB = 2**30
# Limit of a try's memory, in addition to the memory of vLLM's modules.
MEMORY_BYTES = 4 * _GIB
_TOO_LARGE = f"building the model takes more than {MEMORY_BYTES // _GIB} GiB of memory"
_TOO_SLOW = "building and loading the model takes more than {} s"
# Modules that vLLM imports for every model: compilation, which asks for a CUDA toolkit when it is
# imported, the simplest model class, and the attention backends.
_EVERY_CELL = (
    "vllm.compilation.backends",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flashinfer",
    "vllm.v1.attention.backends.flex_attention",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.turboquant_attn",
)


@cache
def preload() -> None:
    """Import vLLM for a fake CUDA device, in a process that forks dry loads."""
    from vexport.engine.dry.fake_platform import fake_cuda

    fake_cuda()
    from vexport.engine.dry import cell  # noqa: F401

    for module in _EVERY_CELL:
        with suppress(Exception):  # another version of vLLM: a cell that needs the module fails
            importlib.import_module(module)


def main(arguments: list[str]) -> int:
    """Read the request, try every cell, and write the result. Return 0 if there is a result."""
    return run_worker(arguments, DryRequest, _results_of)


def _results_of(request: DryRequest) -> DryResult:
    report = progress_reporter()
    tries = [
        [
            _ranks(DryTry(request=request, number=number, cell=cell, rank=0))
            for cell in request.cells
        ]
        for number in range(len(request.checkpoints))
    ]
    all_tries = [rank for cells in tries for ranks in cells for rank in ranks]
    report(_STAGE, 0, len(all_tries))
    version = _import_vllm()
    for number in range(len(request.checkpoints)):
        limit_memory(MEMORY_BYTES)
        if (reason := _import_class(request, number)) is not None:
            _skip_tries(tries[number], reason)
    limit_memory(MEMORY_BYTES)
    gc.freeze()
    first = [attempt for attempt in all_tries if attempt.cell.toolkit]
    _run(first, lambda stage, done, _: report(stage, done, len(all_tries)))
    for attempt in all_tries:
        _copy_if_same(attempt)
    rest = [attempt for attempt in all_tries if not attempt.cell.toolkit]
    done_before = len(first)
    _run(rest, lambda stage, done, _: report(stage, done_before + done, len(all_tries)))
    results = [[_merge_attempts(ranks) for ranks in cells] for cells in tries]
    if request.controlled:
        results = _with_controls(request, results)
    from vexport.engine.dry.fake_platform import is_cuda_build

    return DryResult(vllm=version, cuda=is_cuda_build(), checkpoints=tuple(map(tuple, results)))


def _ranks(attempt: DryTry) -> list[DryTry]:
    """Return the tries of a cell's first and last rank.

    Tensors that are too small fail at the last rank.
    """
    return [replace(attempt, rank=rank) for rank in dict.fromkeys((0, attempt.cell.tp - 1))]


def _copy_if_same(attempt: DryTry) -> None:
    """Copy the result with a CUDA toolkit to the try without it, if vLLM did not ask for it."""
    like = replace(attempt, cell=replace(attempt.cell, toolkit=True))
    if like.file.is_file() and not attempt.file.is_file():
        result = from_json(CellResult, like.file)
        if not result.asks_toolkit:
            write_text(attempt.file, to_json(replace(result, cell=attempt.cell)))


def _merge_attempts(ranks: Sequence[DryTry]) -> CellResult:
    return merge_ranks([from_json(CellResult, rank.file) for rank in ranks])


def merge_ranks(results: Sequence[CellResult]) -> CellResult:
    """Merge the results of a cell's ranks into one result.

    Return the first result that did not load. If all ranks loaded, the result has the faults of
    all ranks.
    """
    failed = [result for result in results if result.outcome != "loaded"]
    if failed:
        return failed[0]
    faults = {
        (fault.kind, fault.where): fault for result in reversed(results) for fault in result.faults
    }
    return replace(results[0], faults=tuple(faults.values()))


def _skip_tries(cells: Sequence[Sequence[DryTry]], reason: str) -> None:
    """Write results for skipped tries, after an earlier try took too much memory or time."""
    for rank in (rank for ranks in cells for rank in ranks):
        if not rank.file.is_file():
            write_text(
                rank.file, to_json(CellResult(cell=rank.cell, outcome="unknown", reason=reason))
            )


def _with_controls(request: DryRequest, results: list[list[CellResult]]) -> list[list[CellResult]]:
    by_cell = {(number, each.cell): each for number, cells in enumerate(results) for each in cells}
    has_source = request.source is not None
    kinds = {key: control_kind(result, has_source=has_source) for key, result in by_cell.items()}
    wanted = {key: kind for key, kind in kinds.items() if kind is not None}
    controls = _try_controls(request, by_cell, wanted)
    doubtful = _with_doubtful_config(request, by_cell, controls)
    for key in doubtful:
        del controls[key]
    controls |= _try_controls(request, by_cell, dict.fromkeys(doubtful, "default config"))
    plain: dict[tuple[int, Cell], ControlKind] = {
        (number, cell): control.kind
        for (number, _), control in controls.items()
        for cell in request.plain_cells
        if control.is_same
    }
    plain_results = _try_control_cells(request, plain)
    loading = {number for (number, _), each in plain_results.items() if each.outcome == "loaded"}
    return [
        [
            replace(result, control=replace(controls[key], loads_elsewhere=number in loading))
            if (key := (number, result.cell)) in controls
            else result
            for result in cells
        ]
        for number, cells in enumerate(results)
    ]


def _stored_names(folder: Path) -> frozenset[str]:
    """Return the tensors of an unquantized model. It has no tensors if its config was made."""
    with suppress(VexportError):
        return frozenset(read_index(folder).tensors)
    return frozenset()


def _with_doubtful_config(
    request: DryRequest,
    results: Mapping[tuple[int, Cell], CellResult],
    controls: Mapping[tuple[int, Cell], Control],
) -> list[tuple[int, Cell]]:
    """Return the cells in which a wrong value in config.json may be the cause of the refusal.

    In these cells, vLLM also refuses the same config without its quantization.
    """
    refusing = [
        key for key, each in controls.items() if each.is_same and each.kind == "config alone"
    ]
    numbers = {number for number, cell in refusing if results[number, cell].in_class}
    sound = {number for number in numbers if _is_sound(request, number)}
    return [key for key in refusing if key[0] not in sound or not results[key].in_class]


def _try_controls(
    request: DryRequest,
    results: Mapping[tuple[int, Cell], CellResult],
    kinds: Mapping[tuple[int, Cell], ControlKind],
) -> dict[tuple[int, Cell], Control]:
    """Make the unquantized models that can be made, try them, and compare them with the results."""
    models = {(number, kind) for (number, _), kind in kinds.items()}
    stored = {
        (number, kind): _stored_names(_control_folder(request, number, kind))
        for number, kind in models
        if _write_control(request, number, kind)
    }
    made = {key: kind for key, kind in kinds.items() if (key[0], kind) in stored}
    return {
        key: Control(
            kind=made[key],
            is_same=same_refusal(results[key], tried, stored[key[0], made[key]]),
            faults=tried.faults,
        )
        for key, tried in _try_control_cells(request, made).items()
    }


def _write_control(request: DryRequest, number: int, kind: ControlKind) -> bool:
    """Write the unquantized model for a checkpoint in a fork, and return True if there is one.

    The source already exists.
    """
    if kind == "source":
        return True
    folder = _control_folder(request, number, kind)

    def write() -> bool:
        from vexport.engine.dry.unquantized import (
            write_control,
        )  # fails in some transformers versions

        return write_control(kind, request.checkpoints[number], folder)

    return _in_fork(request, write)


def _is_sound(request: DryRequest, number: int) -> bool:
    """Return True if transformers finds no wrong value in the config.json of a checkpoint."""
    folder = _control_folder(request, number, "config alone")

    def judge() -> bool:
        from vexport.engine.dry.unquantized import is_sound  # fails in some transformers versions

        return is_sound(request.checkpoints[number], folder)

    return _in_fork(request, judge)


def _control_folder(request: DryRequest, number: int, kind: ControlKind) -> Path:
    return DryTry(
        request=request, number=number, cell=request.cells[0], rank=0, control=kind
    ).checkpoint


def _in_fork(request: DryRequest, work: Callable[[], bool]) -> bool:
    """Return the result of `work` in a fork, or False if the fork dies or takes too long."""

    def run() -> None:
        gc.disable()
        signal.alarm(request.try_seconds)
        sys.exit(not work())

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    return child.exitcode == 0


def _try_control_cells(
    request: DryRequest, kinds: Mapping[tuple[int, Cell], ControlKind]
) -> dict[tuple[int, Cell], CellResult]:
    tries = {
        (number, cell): _ranks(
            DryTry(request=request, number=number, cell=cell, rank=0, control=kind)
        )
        for (number, cell), kind in kinds.items()
    }
    _run([rank for ranks in tries.values() for rank in ranks], lambda stage, done, total: None)
    return {key: _merge_attempts(ranks) for key, ranks in tries.items()}


def _package_that_raised(error: Exception) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    name = str(frame.tb_frame.f_globals.get("__name__", "")) if frame is not None else ""
    return name.partition(".")[0]


def _import_vllm() -> str:
    """Import the modules that the forks need, and return vLLM's version.

    vLLM inspects a model class in a separate process to keep CUDA uninitialized. There is no CUDA
    here, so the inspection runs in this process.
    """
    try:
        preload()
    except Exception as error:
        package = _package_that_raised(error)
        if package == __name__.partition(".")[0]:
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ImportError(f"the package {package} cannot be imported: {reason}") from error
    from vllm import __version__ as version
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()
    return str(version)


def _import_class(request: DryRequest, number: int) -> str | None:
    """Import the model class of a checkpoint before its tries fork, so that the tries share it.

    Return the reason if the import takes too much memory or time, because each try would take as
    much. Otherwise return None.
    """
    from vllm.model_executor.models import registry

    from vexport.engine.dry.cell import configure

    checkpoint, trust = request.checkpoints[number], request.trust_remote_code
    arguments = request.arguments
    largest = max(cell.tp for cell in request.cells)
    for tp in dict.fromkeys((largest, 1)):  # vLLM imports more modules if ranks communicate
        try:
            with _time_limit(request.try_seconds):
                config = configure(checkpoint, arguments, tp=tp, trust_remote_code=trust)
                model = config.model_config
                registry.ModelRegistry.resolve_model_cls(model.architectures, model)
            break
        except MemoryError:
            return _TOO_LARGE
        except TimeoutError:
            return _TOO_SLOW.format(request.try_seconds)
        except Exception as error:  # each cell reports this error
            traceback.print_exception(error)
    return None


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def expire(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def limit_memory(more: int) -> None:
    """Limit this process and its forks to `more` bytes above their current memory.

    Allocations beyond the limit raise MemoryError. The limit is RLIMIT_DATA, which counts private
    writable memory. Mapped files and reserved addresses (torch has many) do not count.
    """
    used = re.search(r"^VmData:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if used is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = int(used[1]) * 1024 + more
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _run(tries: Sequence[DryTry], report: OnProgress) -> None:
    """Fork a child for each try, as many at a time as there are cores. Each try leaves a file.

    Tries are sorted by capability, so that later tries can reuse files of earlier tries. If a child
    takes too much memory or time, the remaining tries of its checkpoint are skipped.
    """
    fork, running = multiprocessing.get_context("fork"), dict[BaseProcess, DryTry]()
    waiting = sorted(
        (attempt for attempt in tries if not attempt.file.is_file()),
        key=lambda attempt: attempt.cell.sm,
    )
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            attempt = waiting.pop(0)
            child = fork.Process(target=_try, args=(attempt,))
            child.start()
            running[child] = attempt
        connection.wait([child.sentinel for child in running])
        for ended in [child for child in running if not child.is_alive()]:
            attempt = running.pop(ended)
            _write_missing_result(attempt, ended.exitcode or 0)
            reason = from_json(CellResult, attempt.file).reason
            if reason in (_TOO_LARGE, _TOO_SLOW.format(attempt.request.try_seconds)):
                same = [each for each in waiting if each.checkpoint == attempt.checkpoint]
                _skip_tries([same], reason)
                waiting = [each for each in waiting if each not in same]
        report(_STAGE, len(tries) - len(waiting) - len(running), len(tries))


def _try(attempt: DryTry) -> None:
    from vexport.engine.dry.cell import try_cell

    gc.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(attempt.request.try_seconds)
    result = try_cell(attempt)
    if result.outcome == "unknown" and is_memory(result.reason):
        result = replace(result, reason=_TOO_LARGE)
    write_text(attempt.file, to_json(result))


def _write_missing_result(attempt: DryTry, code: int) -> None:
    """Write a result for a child that died without writing its own result.

    The outcome is "refused", or "unknown" if the system or the time limit killed the child.
    """
    if attempt.file.is_file():
        return
    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    # The system kills a process if memory runs out. Every other death is vLLM's fault.
    outcome: Outcome = "unknown" if code in (-signal.SIGKILL, -signal.SIGALRM) else "refused"
    reason = f"vLLM's process ended with {ending}"
    if code == -signal.SIGALRM:
        reason = _TOO_SLOW.format(attempt.request.try_seconds)
    write_text(attempt.file, to_json(CellResult(cell=attempt.cell, outcome=outcome, reason=reason)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
