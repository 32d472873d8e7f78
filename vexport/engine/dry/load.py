"""Loads checkpoints dry: starts the worker, gives it the cells, judges what it saw."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vexport.checkpoint.index import require_checkpoint
from vexport.checkpoint.source import resolve_drafter, resolve_source
from vexport.engine.arguments import require_layers
from vexport.engine.dry.judge import Require, judge
from vexport.engine.messages import Cell, DryRequest, DryResult
from vexport.engine.session import NO_EMULATION, Worker, log_folder, require_vllm
from vexport.formats.gpus import Card
from vexport.records import DryLoadReport, GpuRoom, OnProgress, RankMemory, silent

# Ampere, Ada, Hopper and Blackwell in data centres: where vLLM's answers differ.
CAPABILITIES = (80, 89, 90, 100)
SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DryLoad:
    """A load of checkpoints by vLLM's own model classes and weight loaders, from their headers alone.

    Needs no GPU and reads no weights: about 10 s to import vLLM, then 0.2 s for each cell of a small model.
    The cells are `tp` (tensor parallel sizes) x `sm` (90 for SM 9.0); each must load, or with `require` "any"
    one for each `tp`. `vllm_python` is the interpreter, None our own. With `speculative`, `METHOD` or
    `METHOD=FOLDER`, vLLM's draft model is built and loaded as well.
    """

    checkpoints: Sequence[Path]
    tp: Sequence[int] = (1,)
    sm: Sequence[int] = (90,)
    require: Require = "all"
    vllm_python: Path | None = None
    trust_remote_code: bool = False
    speculative: str = ""
    timeout: float = SECONDS

    def reports(self, on_progress: OnProgress = silent) -> list[DryLoadReport]:
        """A report for each checkpoint, in their order. Raises as `started`."""
        with self.started() as reports:
            return reports(on_progress)

    @contextmanager
    def started(self) -> Iterator[Callable[[OnProgress], list[DryLoadReport]]]:
        """Start the process; what is yielded waits for the reports.

        EngineFault where vLLM is missing, dies outside a cell, or takes more than `timeout` seconds.
        """
        with log_folder("vexport-dry-") as folder:
            worker = Worker(
                module="vexport.engine.dry.worker",
                request=DryRequest(
                    checkpoints=tuple(checkpoint.absolute() for checkpoint in self.checkpoints),
                    cells=tuple(Cell(tp=size, sm=capability) for size in self.tp for capability in self.sm),
                    folder=folder,
                    trust_remote_code=self.trust_remote_code,
                    speculative=self.speculative,
                ),
                kind=DryResult,
                where="dry load in vLLM",
                log=folder / "vllm.log",
                timeout=self.timeout,
                vllm_python=self.vllm_python,
                environment=NO_EMULATION,
            )
            with worker.started() as result:
                yield lambda on_progress: self._judged(result(on_progress))

    def _judged(self, result: DryResult) -> list[DryLoadReport]:
        return [
            judge(str(checkpoint), result.vllm, cells, self.require)
            for checkpoint, cells in zip(self.checkpoints, result.checkpoints, strict=True)
        ]


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
    speculative: str = "",
) -> list[DryLoadReport]:
    """A report for each checkpoint and interpreter, in that order; None is our own interpreter.

    Without `sm` the capabilities are those of `gpus`, for which the reports have the room; without both they
    are those of the GPUs in use, of which one must do for each `tp`. Raises as `DryLoad`,
    and InputError where a checkpoint cannot be read.
    """
    roots = [resolve_source(name, on_progress) for name in names]
    for root in roots:
        require_checkpoint(root)
        require_layers(root)
    drafter = resolve_drafter(speculative, on_progress)
    for python in pythons:
        require_vllm(python)

    wanted = sm or tuple(dict.fromkeys(card.sm for card in gpus))
    per_python = [
        DryLoad(
            checkpoints=roots,
            tp=tp,
            sm=wanted or CAPABILITIES,
            require="all" if wanted else "any",
            vllm_python=python,
            trust_remote_code=trust_remote_code,
            speculative=drafter,
            timeout=timeout,
        ).reports(on_progress)
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
