"""Loads checkpoints dry: starts the worker, gives it the cells, judges what it saw."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vexport.checkpoint.index import require_checkpoint
from vexport.checkpoint.source import resolve_source
from vexport.engine.arguments import require_layers
from vexport.engine.dry.judge import Require, judge
from vexport.engine.dry.messages import Cell, DryRequest, DryResult
from vexport.engine.session import NO_EMULATION, log_folder, require_vllm, started_worker
from vexport.formats.gpus import Card
from vexport.types import DryLoadReport, GpuRoom, OnProgress, RankMemory, silent

# Ampere, Ada, Hopper and Blackwell in data centres: where vLLM's answers differ.
CAPABILITIES = (80, 89, 90, 100)
SECONDS = 600.0


def dry_load(
    checkpoint: Path,
    *,
    tp: Sequence[int] = (1,),
    sm: Sequence[int] = (90,),
    vllm_python: Path | None = None,
    trust_remote_code: bool = False,
) -> DryLoadReport:
    """`dry_loads` of one checkpoint, each of whose cells must load."""
    reports = dry_loads(
        [checkpoint], tp=tp, sm=sm, vllm_python=vllm_python, trust_remote_code=trust_remote_code
    )
    return reports[0]


def dry_loads(
    checkpoints: Sequence[Path],
    *,
    tp: Sequence[int] = (1,),
    sm: Sequence[int] = (90,),
    require: Require = "all",
    vllm_python: Path | None = None,
    trust_remote_code: bool = False,
    timeout: float = SECONDS,
    on_progress: OnProgress = silent,
) -> list[DryLoadReport]:
    """What vLLM's own model classes and weight loaders make of checkpoints, from their headers alone.

    As `started_dry_loads`, to whose end it waits.
    """
    with started_dry_loads(
        checkpoints,
        tp=tp,
        sm=sm,
        require=require,
        vllm_python=vllm_python,
        trust_remote_code=trust_remote_code,
        timeout=timeout,
    ) as reports:
        return reports(on_progress)


@contextmanager
def started_dry_loads(
    checkpoints: Sequence[Path],
    *,
    tp: Sequence[int],
    sm: Sequence[int],
    require: Require,
    vllm_python: Path | None,
    trust_remote_code: bool,
    timeout: float = SECONDS,
) -> Iterator[Callable[[OnProgress], list[DryLoadReport]]]:
    """Start to load checkpoints dry; what is yielded waits for the reports, in the order of `checkpoints`.

    Needs no GPU and reads no weights: about 10 s to import vLLM for the first ones, then 0.2 s for each cell
    of a small model. The cells are `tp` (tensor parallel sizes) x `sm` (90 for SM 9.0); each must load, or
    with `require` "any" one for each `tp`.
    Raises EngineFault where vLLM is missing, dies outside a cell, or takes more than `timeout` seconds.
    """
    cells = tuple(Cell(tp=size, sm=capability) for size in tp for capability in sm)
    with log_folder("vexport-dry-") as folder:
        request = DryRequest(
            checkpoints=tuple(checkpoint.absolute() for checkpoint in checkpoints),
            cells=cells,
            folder=folder,
            trust_remote_code=trust_remote_code,
        )

        def reports(on_progress: OnProgress) -> list[DryLoadReport]:
            result = worker.result(on_progress)
            return [
                judge(str(checkpoint), result.vllm, found, require)
                for checkpoint, found in zip(checkpoints, result.checkpoints, strict=True)
            ]

        with started_worker(
            "vexport.engine.dry.worker",
            request,
            DryResult,
            where="dry load in vLLM",
            log=folder / "vllm.log",
            timeout=timeout,
            vllm_python=vllm_python,
            extra=NO_EMULATION,
        ) as worker:
            yield reports


def dry_load_checkpoints(
    names: Sequence[str],
    pythons: Sequence[Path | None],
    *,
    tp: Sequence[int],
    sm: Sequence[int] | None,
    gpus: Sequence[Card] = (),
    trust_remote_code: bool,
    timeout: float,
    on_progress: OnProgress,
) -> list[DryLoadReport]:
    """A report for each checkpoint and interpreter, in that order; None is our own interpreter.

    Without `sm` the capabilities are those of `gpus`, for which the reports have the room; without both they
    are those of the GPUs in use, of which one must do for each `tp`. Raises as `dry_loads`,
    and InputError where a checkpoint cannot be read.
    """
    roots = [resolve_source(name, on_progress) for name in names]
    for root in roots:
        require_checkpoint(root)
        require_layers(root)
    for python in pythons:
        require_vllm(python)

    wanted = sm or tuple(dict.fromkeys(card.sm for card in gpus))
    per_python = [
        dry_loads(
            roots,
            tp=tp,
            sm=wanted or CAPABILITIES,
            require="all" if wanted else "any",
            vllm_python=python,
            trust_remote_code=trust_remote_code,
            timeout=timeout,
            on_progress=on_progress,
        )
        for python in pythons
    ]
    return [
        replace(
            reports[number],
            checkpoint=name,
            vllm_python=str(python or ""),
            rooms=tuple(_rooms(reports[number].memory, gpus)),
        )
        for number, name in enumerate(names)
        for python, reports in zip(pythons, per_python, strict=True)
    ]


def _rooms(memory: Sequence[RankMemory], cards: Sequence[Card]) -> Iterator[GpuRoom]:
    """For each card, tensor parallel size and length of a sequence how many sequences fit at once.

    An upper bound: what a step computes with and CUDA graphs take their part, which vLLM measures at its
    start (1 to 3 GB, more with long prompts).
    """
    for card in cards:
        for rank in memory:
            free = card.usable_bytes - rank.weight_bytes
            for sequence in rank.sequences:
                fitting = max(free, 0) // sequence.kv_bytes if sequence.kv_bytes else 0
                yield GpuRoom(
                    gpu=card.name,
                    tp=rank.tp,
                    kv_bytes=free,
                    tokens=sequence.tokens,
                    sequences=fitting,
                )
