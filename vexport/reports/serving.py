"""Build the document of a start-up log: what the server states, with the lines of the log."""

import json
from collections.abc import Iterator

from vexport.records.serving import StartupLog, Stated
from vexport.reports import document as doc
from vexport.reports.document import facts, mono, muted, parts, row, table

_TITLES = {
    "version": "vLLM",
    "model": "model",
    "architecture": "architecture",
    "device": "device",
    "tensor_parallel_size": "tensor parallel",
    "method": "quantization",
    "dtype": "dtype",
    "kv_cache_dtype": "KV cache dtype",
    "max_model_len": "maximum length",
    "cache_tokens": "KV cache, tokens",
    "max_concurrency": "sequences at once",
}


def startup_log_document(log: StartupLog) -> doc.Document:
    """Return a document with the values, the selected kernels, and the remarks of a log."""
    stated = {title: getattr(log, name) for name, title in _TITLES.items()}
    missing = [title for title, value in stated.items() if value is None]
    pairs = ((title, _value(value)) for title, value in stated.items() if value is not None)
    return doc.Document(
        title=log.log,
        sentence=f"{log.lines:,} lines",
        parts=parts(
            facts(*pairs, *_arguments(log)),
            _selections(log),
            _remarks(log),
            doc.Listing(row(*missing), "not stated") if missing else None,
            muted("the log alone: no checkpoint was compared with it"),
        ),
    )


def _value(stated: Stated) -> str:
    return f"{stated.value} (line {stated.line})"


def _arguments(log: StartupLog) -> Iterator[tuple[str, str]]:
    if log.arguments:
        yield "arguments", ", ".join(f"{k}={json.dumps(v)}" for k, v in log.arguments.items())


def _selections(log: StartupLog) -> doc.Table | None:
    rows = [(each.kind, each.subject, mono(each.choice), str(each.line)) for each in log.selections]
    return table(("Kind", "For", "Selected", ">Line"), rows) if rows else None


def _remarks(log: StartupLog) -> doc.Listing | None:
    entries = [f"{each.kind} (line {each.line}): {each.text}" for each in log.remarks]
    return doc.Listing(row(*entries), "remarks") if entries else None
