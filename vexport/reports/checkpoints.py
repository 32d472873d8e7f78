"""Build the documents of checkpoints: check, load in vLLM, and dry load for other devices."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from vexport.formats.arguments import bits_of_inputs
from vexport.records import (
    ENGINE_CHECK,
    CellStatus,
    CheckReport,
    CompiledKernels,
    DryLoadReport,
    GpuRoom,
    LoadReport,
    MatrixCell,
    MatrixRow,
)
from vexport.records.gates import (
    STATIC_SCOPE,
    Gate,
    cell_gate,
    checkpoint_gate,
    finding_counts,
    ignored_counts,
    static_reason,
)
from vexport.records.scale import percent
from vexport.reports import document as doc
from vexport.reports.document import facts, muted, parts, row, table
from vexport.reports.findings import check_target
from vexport.reports.formatting import count, duration, engine_line, served_with, size, small
from vexport.reports.serving import comparison_table

CheckpointReport = CheckReport | LoadReport | DryLoadReport
T = TypeVar("T", bound=CheckpointReport)
# Tone and text of a cell by its status.
_STATUS: dict[CellStatus, tuple[str, str]] = {
    "loads": ("pass", "loads"),
    "other precision": ("info", "loads"),
    "faulty": ("fail", "FAULTY"),
    "refused": ("fail", "REFUSED"),
    "not shown": ("skipped", "not shown"),
}


def check_documents(reports: Sequence[CheckReport], *, every: bool = False) -> list[doc.Document]:
    """Return a document for each checkpoint. Findings are folded by kind unless `every` is True."""
    return [
        _document("check", report, _not_judged(report, every=every), every=every)
        for report in reports
    ]


def _not_judged(report: CheckReport | DryLoadReport, *, every: bool) -> doc.Listing | None:
    entries = [str(each if every else each.brief) for each in report.not_judged]
    return doc.Listing(row(*entries), "not judged") if entries else None


def load_documents(
    reports: Sequence[LoadReport | DryLoadReport], *, every: bool = False
) -> list[doc.Document]:
    """Return a document for each load.

    If the loads differ in vLLM, tensor parallel size or mode, a table with a column for each
    combination comes first. A dry load has a table of kinds of layers by compute capability.
    """
    return [
        *_versions(reports),
        *(
            _document(
                "load",
                load,
                *([load_facts(load)] if isinstance(load, LoadReport) else _dry_parts(load)),
                every=every,
            )
            for load in with_load_names(reports)
        ),
    ]


def _dry_parts(report: DryLoadReport) -> tuple[doc.Part, ...]:
    if report.server is None:
        return device_parts(report)
    return parts(
        comparison_table(report.server),
        _not_judged(report, every=True),
        muted(f"compared with a dry load in vLLM {report.vllm}"),
        doc.Listing(row(*report.blind_spots), "not verified"),
    )


def load_suites(reports: Sequence[LoadReport | DryLoadReport]) -> Iterator[tuple[str, list[Gate]]]:
    """Yield a suite for each checkpoint, with a gate for each of the checkpoint's loads.

    Each dry load is a suite by itself. It has a gate for each cell, and the gate `dry load` for the
    findings.
    """
    loads: dict[str, list[Gate]] = {}
    for report, column in zip(reports, column_names(reports), strict=True):
        if isinstance(report, LoadReport):
            gate = checkpoint_gate(f"load {column}".strip(), report)
            loads.setdefault(report.checkpoint, []).append(gate)
        else:
            gate = checkpoint_gate("dry load", report)
            yield f"{report.checkpoint} {column}".strip(), [*map(cell_gate, report.cells), gate]
    yield from loads.items()


def with_load_names(reports: Sequence[T]) -> list[T]:
    """Return the reports with checkpoint names that differ between loads.

    If loads differ in vLLM, tensor parallel size or mode, these are added to the names in brackets.
    """
    return [
        replace(
            report, checkpoint=f"{report.checkpoint} ({column})" if column else report.checkpoint
        )
        for report, column in zip(reports, column_names(reports), strict=True)
    ]


def _document(
    gate_name: str, report: CheckpointReport, *content: doc.Part | None, every: bool = False
) -> doc.Document:
    gate = checkpoint_gate(gate_name, report, with_message=every)
    findings = tuple((gate_name, finding) for finding in gate.findings)
    reason = static_reason(report)
    return doc.Document(
        title=report.checkpoint,
        status=gate.status,
        scope=STATIC_SCOPE if reason else "",
        ignored=ignored_counts(report),
        reason=reason,
        device=report.engine.device if isinstance(report, LoadReport) and report.engine else "",
        sentence=finding_counts(report.findings) + check_target(report),
        parts=parts(
            doc.FindingList(findings, "--format json", every) if findings else None, *content
        ),
    )


def load_facts(load: LoadReport) -> doc.Facts:
    """Return the facts of a load: engine, arguments, blind spots, log-probabilities, and log."""
    engine, agreement = load.engine, load.logprobs
    return facts(
        ("vLLM", engine_line(engine)) if engine else None,
        ("served with", served_with(engine)) if engine and engine.settings else None,
        *(("not verified", spot) for spot in (engine.blind_spots if engine else ())),
        (
            "log-probs",
            f"mean KL {small(agreement.mean_kl)} against {agreement.reference} (limit "
            f"{small(agreement.limit)}), max {small(agreement.max_kl)}, first choice agrees "
            f"{percent(agreement.top1_agreement)} over {agreement.positions} positions",
        )
        if agreement
        else None,
        ("canaries", f"{duration(engine.canary_seconds)} (--no-canaries leaves them out)")
        if engine and engine.canary_seconds
        else None,
        ("log", load.log_tail) if load.log_tail else None,
    )


def column_names(reports: Sequence[CheckpointReport]) -> list[str]:
    """Return a name for each load, made from the settings in which the loads differ.

    The settings are vLLM, tensor parallel size and mode. vLLM is named by its version. The version
    may come from another load with the same interpreter. If it is unknown, the interpreter is the
    name. Checks get empty names.
    """
    pythons = ["" if isinstance(report, CheckReport) else report.vllm_python for report in reports]
    versions = {
        python: report.vllm for python, report in zip(pythons, reports, strict=True) if report.vllm
    }
    names = [versions.get(python, python or "vLLM") for python in pythons]
    sizes = [f"tp {report.tp}" if isinstance(report, LoadReport) else "" for report in reports]
    modes = [report.mode if isinstance(report, LoadReport) else "" for report in reports]
    kept = [
        words
        for words, differing in ((names, pythons), (sizes, sizes), (modes, modes))
        if len(set(differing)) > 1
    ]
    return [" ".join(filter(None, words)) for words in zip(*kept, strict=True)] or [""] * len(
        reports
    )


def _versions(reports: Sequence[LoadReport | DryLoadReport]) -> list[doc.Document]:
    """Return a document with a table of checkpoints and loads.

    Returns an empty list if the loads do not differ in vLLM, tensor parallel size or mode.
    """
    named = column_names(reports)
    names = tuple(dict.fromkeys(named))
    if len(names) < 2:
        return []
    answers = {
        (report.checkpoint, column): _load_answer(report)
        for report, column in zip(reports, named, strict=True)
    }
    rows = (
        (checkpoint, *(answers.get((checkpoint, name), "") for name in names))
        for checkpoint in dict.fromkeys(report.checkpoint for report in reports)
    )
    return [doc.Document(title="loads", parts=(table(("checkpoint", *names), rows),))]


def _load_answer(report: LoadReport | DryLoadReport) -> str:
    if isinstance(report, DryLoadReport):
        loaded = sum(cell.loads for cell in report.cells)
        answer = "loads" if report.ok else "FAILS"
        return (
            answer
            if loaded == len(report.cells)
            else f"{answer} ({loaded} of {len(report.cells)} cells)"
        )
    if report.ok:
        return "loads"
    first = next(finding for finding in report.findings if finding.severity == "error")
    return {"load": "REFUSED", ENGINE_CHECK: "NO ANSWER"}.get(first.check, f"FAULTY: {first.check}")


def device_parts(report: DryLoadReport) -> tuple[doc.Part, ...]:
    """Return the tables, memory and blind spots of a dry load.

    Tensor parallel sizes with equal results share a table. It has a column for each capability.
    """
    return parts(
        [_matrix(report, sizes) for sizes in _equal_sizes(report)],
        [_without_toolkit(report, sizes) for sizes in _equal_sizes(report)]
        if report.without_toolkit
        else [],
        _compiled(report.compiled) if report.compiled else None,
        _memory(report) if report.memory else None,
        _room_table(report.rooms) if report.rooms else None,
        muted(f"dry load: the model class and loaders of vLLM {report.vllm} read only headers"),
        doc.Listing(row(*report.blind_spots), "not verified") if report.blind_spots else None,
    )


def _compiled(compiled: Sequence[CompiledKernels]) -> doc.Listing:
    lines = (f"{each.library}: needs {each.needs}" for each in compiled)
    return doc.Listing(row(*lines), "compiled at the first start")


def _memory(report: DryLoadReport) -> doc.Section:
    """Return a table of each rank's memory: weights, and the KV cache for sequences by length."""
    lengths = (f"KV of {count(sequence.tokens)} tokens" for sequence in report.memory[0].sequences)
    rows = (
        (
            f"{rank.tp}",
            size(rank.weight_bytes),
            *(size(sequence.kv_bytes) for sequence in rank.sequences),
        )
        for rank in report.memory
    )
    return doc.Section(
        "memory of each rank", (table(("Ranks", "Weights", *lengths), rows, stack=False),)
    )


def _room_table(rooms: Sequence[GpuRoom]) -> doc.Section:
    """Return the number of sequences of each length that fit on each GPU.

    A note below the table names the memory that is not included.
    """
    by_gpu: dict[str, list[GpuRoom]] = {}
    for room in rooms:
        by_gpu.setdefault(f"{room.tp} x {room.gpu}", []).append(room)
    rows = (
        row(gpu, _free_cell(fit[0]), *(count(room.sequences) for room in fit))
        for gpu, fit in by_gpu.items()
    )
    header = (
        "GPUs",
        "For KV cache",
        *dict.fromkeys(f"of {count(room.tokens)} tokens" for room in rooms),
    )
    caption = (
        "Upper limits: activations and CUDA graphs need memory too, which vLLM measures at its "
        "start."
    )
    return doc.Section("sequences that fit at once", (table(header, rows, caption, stack=False),))


def _free_cell(room: GpuRoom) -> doc.TableCell:
    if room.kv_bytes > 0:
        return doc.TableCell(size(room.kv_bytes))
    return doc.TableCell(f"weights do not fit: {size(-room.kv_bytes)} too many", tone="fail")


def _equal_sizes(report: DryLoadReport) -> list[list[int]]:
    """Return groups of tensor parallel sizes whose cells in the tables are equal."""
    alike: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for tp in dict.fromkeys(cell.tp for cell in report.cells):
        kinds = (*report.rows, *report.without_toolkit)
        rows = (report.cells, *(row.cells for row in kinds))
        texts = tuple(tuple(_cell(cell).text for cell in row if cell.tp == tp) for row in rows)
        alike.setdefault(texts, []).append(tp)
    return list(alike.values())


def _matrix(report: DryLoadReport, sizes: list[int]) -> doc.Section:
    whole = [cell for cell in report.cells if cell.tp == sizes[0]]
    rows: list[tuple[doc.TableCell | str, ...]] = [("whole checkpoint", "", *map(_cell, whole))]
    if any(cell.status not in ("refused", "not shown") for cell in whole):
        rows += _equal_rows(report.rows, sizes[0])
    capabilities = (f"SM {cell.sm}" for cell in whole)
    matrix = table(("Layers", "Stored", *capabilities), rows, stack=False)
    return doc.Section(f"tensor parallel {', '.join(map(str, sizes))}", (matrix,))


def _without_toolkit(report: DryLoadReport, sizes: list[int]) -> doc.Section:
    capabilities = (f"SM {cell.sm}" for cell in report.cells if cell.tp == sizes[0])
    rows = _equal_rows(report.without_toolkit, sizes[0])
    matrix = table(("Layers", "Stored", *capabilities), rows, stack=False)
    sizes_text = ", ".join(map(str, sizes))
    return doc.Section(f"without a CUDA toolkit (nvcc), tensor parallel {sizes_text}", (matrix,))


def _equal_rows(layers: Sequence[MatrixRow], tp: int) -> Iterator[tuple[doc.TableCell | str, ...]]:
    """Yield one row for all kinds of layers that have equal storage and equal cells.

    The row lists the last part of each name once, and the number of layers.
    """
    alike: dict[doc.Row, list[MatrixRow]] = {}
    for kind in layers:
        # W8A8 may store integers or floats, and only vLLM's name of the scheme contains the type.
        stored = kind.scheme if kind.scheme.startswith(kind.stored) else kind.stored
        shown = row(stored, *(_cell(cell, kind) for cell in kind.cells if cell.tp == tp))
        alike.setdefault(shown, []).append(kind)
    for shown, same in alike.items():
        names = dict.fromkeys(kind.name.rpartition(".")[2] for kind in same)
        yield f"{' '.join(names)} ({sum(kind.count for kind in same)})", *shown


def _cell(cell: MatrixCell, kind: MatrixRow | None = None) -> doc.TableCell:
    """Return a cell's text: precision and kernel of a layer, or the status of the checkpoint.

    `kind` is the kind of layer, or None for the whole checkpoint. The cell has the colour of a
    warning if the kernel uses fewer bits for inputs than the checkpoint's scheme. A finding reports
    the same.
    """
    tone, text = _STATUS[cell.status]
    if cell.precision and cell.status not in ("refused", "not shown"):
        mark = "FAULTY " if cell.status == "faulty" else ""
        kernel = cell.kernel.removesuffix("LinearKernel").removesuffix("ScaledMM")
        text = f"{mark}{cell.precision} {kernel}".strip()
    if cell.status == "other precision" and kind is not None:
        is_lower = bits_of_inputs(cell.precision) < bits_of_inputs(kind.stored)
        tone = "warning" if is_lower else tone
    return doc.TableCell(text, tone=tone)
