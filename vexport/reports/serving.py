"""Build the document of a start-up log: what the server states, with the lines of the log."""

import json
from collections.abc import Iterator

from vexport.records.served import ComparedStatus, ComparedValue, ServerComparison
from vexport.records.serving import StartupLog, Stated
from vexport.reports import document as doc
from vexport.reports.document import facts, mono, muted, parts, row, table

_TONES: dict[ComparedStatus, str] = {
    "equal": "pass",
    "differs": "fail",
    "not stated": "skipped",
    "unknown": "skipped",
}
_TITLES = {
    "version": "vLLM",
    "model": "model",
    "architecture": "architecture",
    "device": "device",
    "gpu": "GPU",
    "tensor_parallel_size": "tensor parallel",
    "method": "quantization",
    "dtype": "dtype",
    "kv_cache_dtype": "KV cache dtype",
    "max_model_len": "maximum length",
    "checkpoint_gib": "checkpoint, GiB",
    "cache_gib": "KV cache, GiB",
    "cache_tokens": "KV cache, tokens",
    "max_concurrency": "sequences at once",
    "start_seconds": "start, seconds",
}


def startup_log_document(log: StartupLog) -> doc.Document:
    """Return a document with the values, the selected kernels, and the remarks of a log."""
    stated = {title: getattr(log, name) for name, title in _TITLES.items()}
    missing = [title for title, value in stated.items() if value is None]
    earlier = row(f"earlier starts, before line {log.begin}") if log.begin else ()
    pairs = ((title, _value(value)) for title, value in stated.items() if value is not None)
    return doc.Document(
        title=log.log,
        sentence=f"{log.lines:,} lines" if log.lines else "running server",
        parts=parts(
            facts(*pairs, *_arguments(log), *_failure(log)),
            _selections(log),
            _remarks(log),
            doc.Listing(earlier, "ignored") if earlier else None,
            doc.Listing(row(*missing), "not stated") if missing else None,
            muted("the log alone: no checkpoint was compared with it"),
        ),
    )


def _failure(log: StartupLog) -> Iterator[tuple[str, str]]:
    if log.failure is not None:
        yield "first error", _value(log.failure)


def comparison_table(server: ServerComparison) -> doc.Table:
    """Return a table of the values of a server next to the values of the dry load."""
    rows = (
        (
            value.name,
            mono(value.server or value.status),
            str(value.line or ""),
            _expected(value),
        )
        for value in server.values
    )
    return table(("Value", "Server", ">Line", "Dry load"), rows, stack=False)


def _expected(value: ComparedValue) -> doc.TableCell:
    text = "equal" if value.status == "equal" else value.dry_load or value.status
    return doc.TableCell(text, tone=_TONES[value.status])


def _value(stated: Stated) -> str:
    return f"{stated.value} (line {stated.line})" if stated.line else stated.value


def _arguments(log: StartupLog) -> Iterator[tuple[str, str]]:
    if log.arguments:
        yield "arguments", ", ".join(f"{k}={json.dumps(v)}" for k, v in log.arguments.items())


def _selections(log: StartupLog) -> doc.Table | None:
    rows = [(each.kind, each.subject, mono(each.choice), str(each.line)) for each in log.selections]
    return table(("Kind", "For", "Selected", ">Line"), rows) if rows else None


def _remarks(log: StartupLog) -> doc.Listing | None:
    entries = [f"{each.kind} (line {each.line}): {each.text}" for each in log.remarks]
    return doc.Listing(row(*entries), "remarks") if entries else None
