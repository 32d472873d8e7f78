"""Compare the statements of a server with the messages of a dry load of a checkpoint."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from vexport.errors import Inconclusive, InputError
from vexport.records import Finding, MatrixRow, NotJudged
from vexport.records.served import ComparedStatus, ComparedValue
from vexport.records.serving import (
    Remark,
    RemarkKind,
    Selection,
    SelectionKind,
    StartupLog,
    Stated,
)
from vexport.rules import serving as rules
from vexport.rules.book import Rule

# Values without which a log cannot be compared. vLLM writes them when it begins to build the model.
_BEGINNING = ("version", "method", "max_model_len")
# Values that belong to a model, and values that the start of a server chooses.
_OF_MODEL = {"architecture": "architecture", "method": "quantization method"}
_OF_START = {
    "dtype": "dtype",
    "kv_cache_dtype": "KV cache dtype",
    "max_model_len": "maximum length",
}
_KINDS: dict[SelectionKind, str] = {
    "kernel": "kernels of linear layers",
    "attention": "attention backends",
    "experts": "kernels of experts",
}
_REMARKS: dict[RemarkKind, Rule] = {
    "disabled": rules.DISABLED,
    "requantized": rules.NUMBERS,
    "scales": rules.NUMBERS,
}
_GIB = 2**30
# vLLM rounds the size of a checkpoint and the memory of the KV cache to two decimals. It fills the
# memory with whole blocks.
_ROUNDING_GIB = 0.011
_CACHE_TOLERANCE = 0.1

Key = tuple[SelectionKind, str]


def require_beginning(log: StartupLog) -> None:
    """Raise Inconclusive if a log ends, or a server stops, before vLLM builds the model."""
    needed = _BEGINNING if log.lines else ("version",)
    missing = [name.replace("_", " ") for name in needed if getattr(log, name) is None]
    if missing:
        raise Inconclusive.of(rules.INCOMPLETE, log.log, missing=missing)


def require_same_model(log: StartupLog, values: Iterable[ComparedValue]) -> None:
    """Raise InputError if a value of the model differs."""
    for value in values:
        if value.status == "differs":
            raise InputError.of(
                rules.OTHER_MODEL,
                _place(log, value.line),
                name=value.name,
                found=value.server,
                expected=value.dry_load,
            )


def model_values(log: StartupLog, dry_load: StartupLog) -> list[ComparedValue]:
    """Compare the architecture and the quantization method."""
    return [*_values(log, dry_load, _OF_MODEL)]


def start_values(log: StartupLog, dry_load: StartupLog) -> list[ComparedValue]:
    """Compare values that the arguments of a server can change."""
    return [*_values(log, dry_load, _OF_START)]


def size_value(log: StartupLog, num_bytes: int) -> ComparedValue:
    """Compare the size of the safetensors files."""
    gib = num_bytes / _GIB
    found = log.checkpoint_gib
    is_equal = found is not None and abs(_number(found) - gib) < _ROUNDING_GIB
    return _value("checkpoint size, GiB", found, f"{gib:.2f}", is_equal=is_equal)


def cache_value(log: StartupLog, sequence_bytes: int) -> ComparedValue | None:
    """Compare the number of sequences of the maximum length that fit into the KV cache.

    `sequence_bytes` is the size of such a sequence in the dry load. Return None if the log does not
    state the memory, or if an argument sets the number of blocks.
    """
    memory, found = log.cache_gib, log.max_concurrency
    if memory is None or found is None or log.arguments.get("num_gpu_blocks_override"):
        return None
    expected = _number(memory) * _GIB / sequence_bytes
    is_equal = abs(_number(found) - expected) <= _CACHE_TOLERANCE * expected
    name = "sequences in the KV cache"
    return _value(name, found, f"{expected:.2f}", is_equal=is_equal)


def selection_values(log: StartupLog, dry_load: StartupLog) -> list[ComparedValue]:
    """Compare the kernels and backends.

    Selections that vLLM makes while it loads weights are ignored unless the dry load has them. If
    the server lacks kinds of layers and has other kinds instead, the kinds are one difference.
    """
    found, expected = _choices(log.selections), _choices(dry_load.selections)
    values = [_selection(key, found[key], expected[key]) for key in expected if key in found]
    for kind, name in _KINDS.items():
        missing = {key: expected[key] for key in expected.keys() - found.keys() if key[0] == kind}
        others = {
            key: chosen
            for key, chosen in found.items()
            if key[0] == kind and key not in expected and not chosen[0].while_loading
        }
        if missing and others:
            line = min(chosen[0].line for chosen in others.values())
            server, own = _listed(others), _listed(missing)
            values.append(
                ComparedValue(name=name, status="differs", server=server, dry_load=own, line=line)
            )
        else:
            values += [_selection(key, [], chosen) for key, chosen in missing.items()]
            values += [_selection(key, chosen, []) for key, chosen in others.items()]
    return values


def unlogged_kernels(
    dry_load: StartupLog, rows: Iterable[MatrixRow], forcing: str
) -> Iterator[str]:
    """Yield the kernels of a dry load that vLLM does not log, in words.

    `rows` are the layers of a dry load for one GPU. vLLM logs a linear kernel by its class, and of
    experts only the backend. `forcing` are the arguments of the server that choose kernels.
    """
    logged = {each.choice for each in dry_load.selections}
    has_experts = any(each.kind == "experts" for each in dry_load.selections)
    layers: dict[str, list[str]] = {}
    for row in rows:
        for kernel in {cell.kernel for cell in row.cells if cell.kernel}:
            if kernel not in logged and (kernel.endswith("Kernel") or not has_experts):
                layers.setdefault(kernel, []).append(row.name)
    for kernel, names in layers.items():
        chosen = f", and the log has {forcing}" if forcing else ""
        yield (
            f"not compared: kernels of {', '.join(names)} (this vLLM does not log them; "
            f"the dry load has {kernel}{chosen})"
        )


def late_selections(log: StartupLog, dry_load: StartupLog) -> Iterator[str]:
    """Yield the selections that only the server makes, while it loads weights, in words."""
    known = _choices(dry_load.selections)
    for key, chosen in _choices(log.selections).items():
        if chosen[0].while_loading and key not in known:
            yield (
                f"not compared: {key[1]} {_names(chosen)} in line {chosen[0].line} (vLLM selects "
                "it while it loads weights, and a dry load does not)"
            )


def differing(values: Iterable[ComparedValue]) -> set[str]:
    """Return the names of the values that differ."""
    return {value.name for value in values if value.status == "differs"}


def with_reason(
    values: Iterable[ComparedValue], names: Iterable[str], reason: str
) -> list[ComparedValue]:
    """Return the values. Those with these names and without a reason get the reason."""
    explained = set(names)
    return [
        replace(value, reason=reason) if value.name in explained and not value.reason else value
        for value in values
    ]


def difference_findings(log: StartupLog, values: Iterable[ComparedValue]) -> list[Finding]:
    """Return an error for each value that differs."""
    return [
        Finding.at(
            rules.DIFFERENCE,
            _place(log, value.line),
            name=value.name,
            found=value.server,
            expected=value.dry_load,
            reason=f" ({value.reason})" if value.reason else "",
        )
        for value in values
        if value.status == "differs"
    ]


def remark_findings(log: StartupLog, dry_load: StartupLog) -> list[Finding]:
    """Return a finding for each warning of the server that the dry load does not have."""
    known = {remark.text for remark in dry_load.remarks}
    return [_remark(log, remark) for remark in log.remarks if remark.text not in known]


def gaps(log: StartupLog, values: Iterable[ComparedValue]) -> Iterator[NotJudged]:
    """Yield the values of a log that could not be compared, and a missing end of the log."""
    if not log.lines:
        return
    if log.start_seconds is None:
        ends = "the log ends before the server runs"
        failed = (
            log.failure and f"{ends}; the error in line {log.failure.line}: {log.failure.value}"
        )
        yield NotJudged(what="the end of the start", why=failed or ends)
    for value in values:
        if value.status == "not stated":
            yield NotJudged(what=value.name, why=f"not in the log, dry load: {value.dry_load}")
        elif value.status == "unknown":
            yield NotJudged(what=value.name, why=f"not in the dry load, log: {value.server}")


def _values(
    log: StartupLog, dry_load: StartupLog, names: dict[str, str]
) -> Iterator[ComparedValue]:
    for name, title in names.items():
        found, expected = getattr(log, name), getattr(dry_load, name)
        if expected is not None:
            is_equal = found is not None and found.value == expected.value
            yield _value(title, found, expected.value, is_equal=is_equal)


def _value(name: str, found: Stated | None, expected: str, *, is_equal: bool) -> ComparedValue:
    if found is None:
        return ComparedValue(name=name, status="not stated", server="", dry_load=expected)
    status: ComparedStatus = "equal" if is_equal else "differs"
    return ComparedValue(
        name=name, status=status, server=found.value, dry_load=expected, line=found.line
    )


def _choices(selections: Sequence[Selection]) -> dict[Key, list[Selection]]:
    choices: dict[Key, list[Selection]] = {}
    for each in selections:
        # vLLM's message about an attention backend that an argument names is shorter.
        subject = "attention backend" if each.subject == "backend" else each.subject
        choices.setdefault((each.kind, subject), []).append(each)
    return choices


def _selection(
    key: Key, found: Sequence[Selection], expected: Sequence[Selection]
) -> ComparedValue:
    kind, subject = key
    server, dry_load = _names(found), _names(expected)
    status: ComparedStatus = "equal" if server == dry_load else "differs"
    if not server or not dry_load:
        status = "unknown" if server else "not stated"
    return ComparedValue(
        name=f"kernel of {subject}" if kind == "kernel" else subject,
        status=status,
        server=server,
        dry_load=dry_load,
        line=found[0].line if found else 0,
    )


def _names(selections: Sequence[Selection]) -> str:
    return ", ".join(sorted({each.choice for each in selections}))


def _listed(choices: dict[Key, list[Selection]]) -> str:
    return "; ".join(f"{_names(chosen)} for {key[1]}" for key, chosen in sorted(choices.items()))


def _number(stated: Stated) -> float:
    return float(stated.value.rstrip(".") or 0)


def _remark(log: StartupLog, remark: Remark) -> Finding:
    return Finding.at(_REMARKS[remark.kind], _place(log, remark.line), message=remark.text)


def _place(log: StartupLog, line: int) -> str:
    return f"{log.log}:{line}" if line else log.log
