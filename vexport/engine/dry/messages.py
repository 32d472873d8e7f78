"""What crosses the border between vexport and the process that loads checkpoints dry: JSON in, JSON out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vexport.types import RankMemory

# missing: part of a parameter gets no value (vLLM reads uninitialized memory);
# unused: a stored tensor goes nowhere; cast: its values are converted to a dtype of another kind;
# narrowed: only part of it is read.
MiscopyKind = Literal["missing", "unused", "cast", "narrowed"]
Outcome = Literal["loaded", "refused", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One column of the matrix: tensor parallel size and compute capability (90 is SM 9.0)."""

    tp: int
    sm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRequest:
    """Checkpoints and the cells to try for each; `folder` takes a file per finished cell."""

    checkpoints: tuple[Path, ...]
    cells: tuple[Cell, ...]
    folder: Path
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Miscopy:
    """What the copy audit saw: at a parameter of vLLM's (missing) or a stored tensor (the others).

    `layer` is the kind of layer whose parameter it is, empty for a tensor that went nowhere.
    """

    kind: MiscopyKind
    where: str
    layer: str
    got: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTensors:
    """What the copy audit saw of all tensors that one rank loads."""

    faults: tuple[Miscopy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """All layers of the same name (indices as *), stored precision, running precision and kernel.

    Precisions are like W4A16 with the type's name behind them where it matters; `kernel` is vLLM's class.
    """

    name: str
    count: int
    scheme: str
    stored: str
    runs: str
    kernel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What vLLM did with one checkpoint in one cell.

    "refused" has vLLM's reason, and in `where` the stored tensor that it was at, if any; "unknown" means
    that the dry load could not follow vLLM that far.
    """

    cell: Cell
    outcome: Outcome
    reason: str = ""
    where: str = ""
    layers: tuple[LayerKind, ...] = ()
    faults: tuple[Miscopy, ...] = ()
    memory: RankMemory | None = None
    seconds: float = 0.0


def merge_ranks(results: Sequence[CellResult]) -> CellResult:
    """One result for a cell from those of its ranks: the first that did not load, else all their faults."""
    failed = [result for result in results if result.outcome != "loaded"]
    if failed:
        return failed[0]
    faults = {(fault.kind, fault.where): fault for result in reversed(results) for fault in result.faults}
    seconds = sum(result.seconds for result in results)
    return replace(results[0], faults=tuple(faults.values()), seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryResult:
    """Every checkpoint's cells, in the order of the request."""

    vllm: str
    checkpoints: tuple[tuple[CellResult, ...], ...]
