"""Loads checkpoints dry: starts the worker, gives it the cells, judges what it saw."""

from collections.abc import Sequence
from pathlib import Path

from vexport.engine.dry.judge import Require, judge
from vexport.engine.dry.messages import Cell, DryRequest, DryResult
from vexport.engine.session import NO_EMULATION, log_folder, run_worker
from vexport.types import DryLoadReport, OnProgress, silent

# Ampere, Ada, Hopper and Blackwell in data centres: where vLLM's answers differ.
CAPABILITIES = (80, 89, 90, 100)
_SECONDS = 600.0


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
    timeout: float = _SECONDS,
    on_progress: OnProgress = silent,
) -> list[DryLoadReport]:
    """What vLLM's own model classes and weight loaders make of checkpoints, from their headers alone.

    Needs no GPU and reads no weights: about 10 s to import vLLM for the first ones, then 0.2 s for each cell
    of a small model. The cells are `tp` (tensor parallel sizes) x `sm` (90 for SM 9.0); each must load, or
    with `require` "any" one for each `tp`. Reports come in the order of `checkpoints`.
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
        result = run_worker(
            "vexport.engine.dry.worker",
            request,
            DryResult,
            where="dry load in vLLM",
            log=folder / "vllm.log",
            timeout=timeout,
            vllm_python=vllm_python,
            extra=NO_EMULATION,
            on_progress=on_progress,
        )
    return [
        judge(str(checkpoint), result.vllm, found, require)
        for checkpoint, found in zip(checkpoints, result.checkpoints, strict=True)
    ]
