"""From what the worker saw in each cell to one report: the matrix and the findings."""

from collections.abc import Iterator, Sequence
from typing import Literal

from vexport.engine.messages import Cell, CellResult, Miscopy, MiscopyKind
from vexport.records import CellStatus, DryLoadReport, Finding, MatrixCell, MatrixRow, Severity

CHECK = "dry-load"
# Which cells must load: every one, or for each tensor parallel size at least one.
Require = Literal["all", "any"]
BLIND_SPOTS = (
    "no kernel ran, no value was looked at, and what vLLM does to weights after loading was left out",
    "kernels are those of vLLM's CUDA wheel with FlashInfer, without DeepGEMM and Humming",
)
# What vLLM and transformers ask for where a checkpoint brings code.
TRUST = "trust_remote_code"
_SAYS: dict[MiscopyKind, tuple[Severity, str, str]] = {
    "missing": (
        "error",
        "every element from the checkpoint, {}",
        "add the missing tensor; vLLM reads what is in memory",
    ),
    "unused": ("warning", "a parameter of vLLM's that it belongs to", "correct its name, or drop it"),
    "cast": ("error", "{}, into which vLLM converts the values", "store it in that dtype"),
    "narrowed": (
        "error",
        "{}, which is all that vLLM reads",
        "store it in the shape that config.json describes",
    ),
}


def judge(name: str, vllm: str, results: Sequence[CellResult], require: Require) -> DryLoadReport:
    """The report on one checkpoint from its cells."""
    # For each tensor parallel size the first that loaded: it is the same on every capability.
    memory = {each.memory.tp: each.memory for each in reversed(results) if each.memory is not None}
    findings = (*_not_loaded(results, require), *_faults(results), *_precisions(results))
    return DryLoadReport(
        checkpoint=name,
        ok=all(finding.severity != "error" for finding in findings),
        findings=findings,
        vllm=vllm,
        cells=tuple(_cell(result, needed=_needed(result.cell, results, require)) for result in results),
        rows=tuple(_rows(results)),
        memory=tuple(memory[tp] for tp in sorted(memory)),
        blind_spots=BLIND_SPOTS,
    )


def errors_or_doubt(report: DryLoadReport, require: Require = "any") -> list[Finding] | str:
    """The errors that hold for a tensor parallel size on all GPUs, or why it cannot be told.

    With `require` "all" those that hold on any.
    """
    needed = [cell for cell in report.cells if cell.needed and cell.reason]
    doubts = {_place(cell, require): cell.reason for cell in needed if cell.status == "not shown"}
    open_to_doubt = {cell.reason for cell in needed if _place(cell, require) in doubts}
    certain = {cell.reason for cell in needed if _place(cell, require) not in doubts}
    errors = [each for each in report.findings if each.severity == "error"]
    errors = [each for each in errors if each.got in certain or each.got not in open_to_doubt]
    if doubts and not errors:
        return f"the dry load cannot build this model: {min(doubts.values())}"
    if any(TRUST in each.got for each in errors):
        return "the checkpoint brings Python code, which runs with --trust-remote-code only"
    return errors


def _place(cell: MatrixCell, require: Require) -> tuple[int, int]:
    return cell.tp, cell.sm if require == "all" else 0


def unused(report: DryLoadReport) -> list[Finding]:
    """The findings on stored tensors that went nowhere."""
    return [each for each in report.findings if each.expected == _SAYS["unused"][1]]


def _cell(result: CellResult, *, needed: bool = True) -> MatrixCell:
    return MatrixCell(
        tp=result.cell.tp, sm=result.cell.sm, status=_status(result), reason=result.reason, needed=needed
    )


def _needed(cell: Cell, results: Sequence[CellResult], require: Require) -> bool:
    """Return whether a cell must load: with "any", where no other of its tensor parallel size does."""
    loaded = {result.cell.tp for result in results if result.outcome == "loaded"}
    return require == "all" or cell.tp not in loaded


def _status(result: CellResult) -> CellStatus:
    if result.outcome != "loaded":
        return "refused" if result.outcome == "refused" else "not shown"
    if any(_SAYS[fault.kind][0] == "error" for fault in result.faults):
        return "faulty"
    return "other precision" if any(kind.runs != kind.stored for kind in result.layers) else "loads"


def _rows(results: Sequence[CellResult]) -> Iterator[MatrixRow]:
    """A row for each kind of layer; where a cell has no such layer, what became of the checkpoint there."""
    kinds = {(kind.name, kind.stored): kind for result in reversed(results) for kind in result.layers}
    order = dict.fromkeys((kind.name, kind.stored) for result in results for kind in result.layers)
    for key in order:
        kind = kinds[key]
        cells = tuple(_layer_cell(result, key) for result in results)
        yield MatrixRow(name=kind.name, count=kind.count, scheme=kind.scheme, stored=kind.stored, cells=cells)


def _layer_cell(result: CellResult, key: tuple[str, str]) -> MatrixCell:
    layer = next((kind for kind in result.layers if (kind.name, kind.stored) == key), None)
    if layer is None:
        return _cell(result)
    status: CellStatus = "loads" if layer.runs == layer.stored else "other precision"
    if any(_SAYS[fault.kind][0] == "error" and fault.layer == layer.name for fault in result.faults):
        status = "faulty"
    return MatrixCell(
        tp=result.cell.tp, sm=result.cell.sm, status=status, precision=layer.runs, kernel=layer.kernel
    )


def _not_loaded(results: Sequence[CellResult], require: Require) -> Iterator[Finding]:
    """One finding for each reason, with the cells that it holds in."""
    reasons: dict[tuple[str, str, str], list[Cell]] = {}
    for result in results:
        if result.outcome != "loaded":
            key = (result.outcome, result.where or "checkpoint", result.reason)
            reasons.setdefault(key, []).append(result.cell)
    for (outcome, where, reason), cells in reasons.items():
        needed = any(_needed(cell, results, require) for cell in cells)
        yield Finding(
            check=CHECK,
            severity="error" if needed else "warning",
            where=_in_cells(where, cells, results),
            expected="a checkpoint that vLLM loads",
            got=reason,
            fix="see `vexport check`, or serve it elsewhere" if outcome == "refused" else "load it on a GPU",
        )


def _faults(results: Sequence[CellResult]) -> Iterator[Finding]:
    """One finding for each fault at each place, however many cells have it."""
    faults: dict[tuple[str, MiscopyKind], tuple[Miscopy, list[Cell]]] = {}
    for result in results:
        for fault in result.faults:
            faults.setdefault((fault.where, fault.kind), (fault, []))[1].append(result.cell)
    for fault, cells in faults.values():
        severity, expected, fix = _SAYS[fault.kind]
        yield Finding(
            check=CHECK,
            severity=severity,
            where=_in_cells(fault.where, cells, results),
            expected=expected.format(fault.expected),
            got=fault.got,
            fix=fix,
        )


def _precisions(results: Sequence[CellResult]) -> Iterator[Finding]:
    """One finding for each kernel with another precision than the stored one; a warning if it is coarser."""
    kernels: dict[tuple[str, str, str], tuple[dict[str, None], dict[Cell, None]]] = {}
    for result in results:
        for kind in result.layers:
            if kind.runs != kind.stored:
                key = (kind.stored, kind.runs, kind.kernel or kind.scheme)
                names, cells = kernels.setdefault(key, ({}, {}))
                names[kind.name] = None
                cells[result.cell] = None
    for (stored, runs, kernel), (names, cells) in kernels.items():
        coarser = _activation_bits(runs) < _activation_bits(stored)
        yield Finding(
            check=CHECK,
            severity="warning" if coarser else "info",
            where=_in_cells(", ".join(names), list(cells), results),
            expected=f"{stored} as stored",
            got=f"{runs} by {kernel}",
            fix="measure accuracy at that precision, or serve it elsewhere",
        )


def _activation_bits(precision: str) -> int:
    return int(precision.rpartition("A")[2])


def _in_cells(place: str, cells: Sequence[Cell], results: Sequence[CellResult]) -> str:
    """`place` and the cells meant, unless that is all of them."""
    if len(cells) == len(results):
        return place
    sizes = dict.fromkeys(cell.tp for cell in cells)
    capabilities = dict.fromkeys(cell.sm for cell in cells)
    if len(sizes) * len(capabilities) == len(cells):
        return f"{place} (tp {_list(sizes)}, sm {_list(capabilities)})"
    return f"{place} ({'; '.join(f'tp {cell.tp}, sm {cell.sm}' for cell in cells)})"


def _list(numbers: dict[int, None]) -> str:
    return "/".join(str(number) for number in numbers)
