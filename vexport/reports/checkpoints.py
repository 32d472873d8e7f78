"""Reports on checkpoints: what a check found, what vLLM did with them, what it would do on other devices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from vexport.records import (
    ENGINE_CHECK,
    CellStatus,
    CheckReport,
    DryLoadReport,
    GpuRoom,
    LoadReport,
    MatrixCell,
    MatrixRow,
)
from vexport.reports import document as doc
from vexport.reports.document import columns, facts, muted, parts, row
from vexport.reports.formatting import count, size
from vexport.reports.gates import checkpoint_gate, finding_counts, judged_for
from vexport.reports.sentences import agreement_line, engine_line, served_with

CheckpointReport = CheckReport | LoadReport | DryLoadReport
T = TypeVar("T", bound=CheckpointReport)
_WHOLE = "whole checkpoint"
_TONE: dict[CellStatus, str] = {
    "loads": "pass",
    "other precision": "warning",
    "faulty": "fail",
    "refused": "fail",
    "not shown": "skipped",
}
_SHORT: dict[CellStatus, str] = {
    "loads": "loads",
    "other precision": "loads",
    "faulty": "FAULTY",
    "refused": "REFUSED",
    "not shown": "not shown",
}


def check_documents(reports: Sequence[CheckReport], *, every: bool = False) -> list[doc.Document]:
    """One for each checkpoint; its findings, those of a kind as one unless `every`."""
    unjudged = [
        parts(doc.Listing(row(*map(str, report.not_judged)), "not judged") if report.not_judged else None)
        for report in reports
    ]
    return [
        _document("check", report, listed, every=every)
        for report, listed in zip(reports, unjudged, strict=True)
    ]


def load_documents(reports: Sequence[LoadReport]) -> list[doc.Document]:
    """A matrix of checkpoints by vLLM and mode, where there is one, then each load with its engine."""
    return [*_versions(reports), *(_document("load", load, (load_facts(load),)) for load in titled(reports))]


def dry_load_documents(reports: Sequence[DryLoadReport]) -> list[doc.Document]:
    """Documents of dry loads, each with the matrix of kinds of layers by capability."""
    return [*_versions(reports), *(_document("load", load, device_parts(load)) for load in titled(reports))]


def titled(reports: Sequence[T]) -> list[T]:
    """The reports; of several loads what tells them apart is added to the name of the checkpoint."""
    return [
        replace(report, checkpoint=f"{report.checkpoint} ({column})" if column else report.checkpoint)
        for report, column in zip(reports, column_names(reports), strict=True)
    ]


def _document(
    gate_name: str, report: CheckpointReport, content: tuple[doc.Part, ...], *, every: bool = False
) -> doc.Document:
    gate = checkpoint_gate(gate_name, report)
    findings = tuple((gate_name, finding) for finding in gate.findings)
    return doc.Document(
        title=report.checkpoint,
        status=gate.status,
        device=report.engine.device if isinstance(report, LoadReport) and report.engine else "",
        sentence=finding_counts(report.findings) + judged_for(report),
        parts=parts(doc.FindingList(findings, "--format json", every) if findings else None, content),
    )


def load_facts(load: LoadReport) -> doc.Facts:
    """The engine, how it was started, what it cannot show, its distance from the reference, its log."""
    engine = load.engine
    return facts(
        ("vLLM", engine_line(engine)) if engine else None,
        ("served with", served_with(engine)) if engine and engine.settings else None,
        *(("not shown", spot) for spot in (engine.blind_spots if engine else ())),
        ("log-probs", agreement_line(load.logprobs)) if load.logprobs else None,
        ("log", load.log_tail) if load.log_tail else None,
    )


def column_names(reports: Sequence[CheckpointReport]) -> list[str]:
    """Return the vLLM, tensor parallel size and mode of each load, as far as the loads differ in them.

    A vLLM is named by its version: that of another load by the same interpreter where one does not know it,
    else the interpreter. Checks do not differ in any.
    """
    pythons = ["" if isinstance(report, CheckReport) else report.vllm_python for report in reports]
    versions = {python: report.vllm for python, report in zip(pythons, reports, strict=True) if report.vllm}
    names = [versions.get(python, python or "vLLM") for python in pythons]
    modes = _where_they_differ([report.mode if isinstance(report, LoadReport) else "" for report in reports])
    sizes = _where_they_differ(
        [f"tp {report.tp}" if isinstance(report, LoadReport) else "" for report in reports]
    )
    several = len(set(pythons)) > 1
    return [
        " ".join(filter(None, (name if several else "", size, mode)))
        for name, size, mode in zip(names, sizes, modes, strict=True)
    ]


def _where_they_differ(words: list[str]) -> list[str]:
    """The words where they differ; nothing where they are all alike."""
    return words if len(set(words)) > 1 else [""] * len(words)


def _versions(reports: Sequence[LoadReport | DryLoadReport]) -> list[doc.Document]:
    """Rows checkpoints, columns vLLM and mode; nothing where there is one column."""
    named = column_names(reports)
    names = tuple(dict.fromkeys(named))
    if len(names) < 2:
        return []
    answers = {
        (report.checkpoint, column): _load_answer(report)
        for report, column in zip(reports, named, strict=True)
    }
    rows = tuple(
        row(checkpoint, *(answers.get((checkpoint, name), "") for name in names))
        for checkpoint in dict.fromkeys(report.checkpoint for report in reports)
    )
    return [doc.Document(title="loads", parts=(doc.Table(columns("checkpoint", *names), rows),))]


def _load_answer(report: LoadReport | DryLoadReport) -> str:
    """A cell in few words."""
    if isinstance(report, DryLoadReport):
        loaded = sum(cell.status in ("loads", "other precision") for cell in report.cells)
        answer = "loads" if report.ok else "FAILS"
        return answer if loaded == len(report.cells) else f"{answer} ({loaded} of {len(report.cells)} cells)"
    if report.ok:
        return "loads"
    first = next(finding for finding in report.findings if finding.severity == "error")
    return {"load": "REFUSED", ENGINE_CHECK: "NO ANSWER"}.get(first.check, f"FAULTY: {first.check}")


def device_parts(report: DryLoadReport) -> tuple[doc.Part, ...]:
    """A table for the tensor parallel sizes whose columns, one for each capability, are alike."""
    return parts(
        [_matrix(report, sizes) for sizes in _alike(report)],
        _memory(report),
        _rooms(report),
        muted(f"vLLM {report.vllm}, model class and loaders on headers alone"),
        doc.Listing(row(*report.blind_spots), "not shown") if report.blind_spots else None,
    )


def _memory(report: DryLoadReport) -> doc.Section | None:
    """Weights of a rank, and its KV cache for sequences of the same lengths."""
    if not report.memory:
        return None
    lengths = [sequence.tokens for sequence in report.memory[0].sequences]
    header = columns("Ranks", "Weights", *(f"KV of {count(tokens)} tokens" for tokens in lengths))
    rows = tuple(
        row(f"{rank.tp}", size(rank.weight_bytes), *(size(sequence.kv_bytes) for sequence in rank.sequences))
        for rank in report.memory
    )
    return doc.Section("memory of each rank", (doc.Table(header, rows, stack=False),))


def _rooms(report: DryLoadReport) -> doc.Section | None:
    """The number of sequences of each length that fit on each GPU, and what that leaves out."""
    if not report.rooms:
        return None
    lengths = dict.fromkeys(room.tokens for room in report.rooms)
    header = columns("GPUs", "For KV cache", *(f"of {count(tokens)} tokens" for tokens in lengths))
    by_gpu: dict[tuple[str, int], list[GpuRoom]] = {}
    for room in report.rooms:
        by_gpu.setdefault((room.gpu, room.tp), []).append(room)
    rows = tuple(
        row(f"{tp} x {gpu}", _free(rooms[0]), *(count(room.sequences) for room in rooms))
        for (gpu, tp), rooms in by_gpu.items()
    )
    caption = "At most: activations and CUDA graphs take their part, which vLLM measures at its start."
    return doc.Section("sequences that fit at once", (doc.Table(header, rows, caption=caption, stack=False),))


def _free(room: GpuRoom) -> doc.TableCell:
    if room.kv_bytes > 0:
        return doc.TableCell(size(room.kv_bytes))
    return doc.TableCell(f"weights do not fit: {size(-room.kv_bytes)} too many", tone="fail")


def _alike(report: DryLoadReport) -> list[tuple[int, ...]]:
    """The tensor parallel sizes, together where every cell is the same."""
    alike: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for tp in dict.fromkeys(cell.tp for cell in report.cells):
        rows = (report.cells, *(row.cells for row in report.rows))
        texts = tuple(tuple(_cell_text(cell) for cell in row if cell.tp == tp) for row in rows)
        alike.setdefault(texts, []).append(tp)
    return [tuple(sizes) for sizes in alike.values()]


def _matrix(report: DryLoadReport, sizes: tuple[int, ...]) -> doc.Section:
    whole = [cell for cell in report.cells if cell.tp == sizes[0]]
    rows = [row(_WHOLE, "", *map(_cell, whole))]
    if any(cell.status not in ("refused", "not shown") for cell in whole):
        rows += _equal_rows(report.rows, sizes[0])
    header = columns("Layers", "Stored", *(f"SM {cell.sm}" for cell in whole))
    table = doc.Table(header, tuple(rows), stack=False)
    return doc.Section(f"tensor parallel {', '.join(map(str, sizes))}", (table,))


def _equal_rows(kinds: Sequence[MatrixRow], tp: int) -> list[tuple[doc.TableCell, ...]]:
    """The kinds of layers that are stored alike and do alike, together."""
    alike: dict[tuple[doc.TableCell, ...], list[MatrixRow]] = {}
    for kind in kinds:
        # W8A8 is integers or floats, which vLLM's name of the scheme says.
        stored = kind.scheme if kind.scheme.startswith(kind.stored) else kind.stored
        shown = row(stored, *(_cell(cell) for cell in kind.cells if cell.tp == tp))
        alike.setdefault(shown, []).append(kind)
    return [row(_names(members), *shown) for shown, members in alike.items()]


def _names(rows: Sequence[MatrixRow]) -> str:
    """The last part of each name, once, and how many layers that is."""
    names = dict.fromkeys(row.name.rpartition(".")[2] for row in rows)
    return f"{' '.join(names)} ({sum(row.count for row in rows)})"


def _cell(cell: MatrixCell) -> doc.TableCell:
    return doc.TableCell(_cell_text(cell), tone=_TONE[cell.status])


def _cell_text(cell: MatrixCell) -> str:
    """A cell in few words: precision and kernel of a layer, or what became of the checkpoint."""
    if not cell.precision or cell.status in ("refused", "not shown"):
        return _SHORT[cell.status]
    mark = "FAULTY " if cell.status == "faulty" else ""
    kernel = cell.kernel.removesuffix("LinearKernel").removesuffix("ScaledMM")
    return f"{mark}{cell.precision} {kernel}".strip()
