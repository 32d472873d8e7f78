"""Every checkpoint in every vLLM that was asked for, without weights and without a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vexport.checkpoint.index import require_checkpoint
from vexport.checkpoint.source import resolve_source
from vexport.engine.arguments import require_layers
from vexport.engine.dry.load import CAPABILITIES, dry_loads
from vexport.engine.dry.room import rooms
from vexport.engine.session import require_vllm
from vexport.formats.gpus import Card
from vexport.types import DryLoadReport, OnProgress


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
    are those of the GPUs in use, of which one must do for each `tp`. Raises as `engine.dry.load.dry_loads`,
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
            rooms=tuple(rooms(reports[number].memory, gpus)),
        )
        for number, name in enumerate(names)
        for python, reports in zip(pythons, per_python, strict=True)
    ]
