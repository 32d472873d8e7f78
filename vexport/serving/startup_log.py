"""Read the start-up log of `vllm serve`, line by line.

vLLM writes `LEVEL DATE TIME [module.py:123] message`. Whatever stands in front (a rank, a
container's timestamp, colours) is ignored, because the message follows the module. If a line is a
JSON object, the message is a value of the object. The log of a container that has restarted has
several starts. The last one counts, because its server runs.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import BinaryIO, Literal

from pydantic import JsonValue

from vexport.errors import InputError, visible
from vexport.records.serving import (
    Remark,
    RemarkKind,
    Selection,
    SelectionKind,
    StartupLog,
    Stated,
)
from vexport.rules import serving as rules
from vexport.words import clip

MOST_MEGABYTES = 64
# A longer line is cut. The configuration of an engine takes some 10 kB.
_LONGEST_LINE = 1 << 20
_LONGEST_REMARK = 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PLACE = re.compile(r"\[[\w./-]+\.py:\d+\] ?")
_LEVEL = re.compile(r"\b(?:(?P<warning>WARN(?:ING)?)|(?P<error>ERROR|CRITICAL|FATAL))\b")
# Keys of the message in JSON lines: of python-json-logger, structlog, loguru, and Docker. Under
# other keys, a message is recognized by vLLM's module.
_MESSAGE_KEYS = ("message", "msg", "event", "log", "text")
_LEVEL_KEYS = ("levelname", "level", "severity")
# Source: v1/engine/core.py. The configuration is `VllmConfig.__str__` in config/vllm.py.
_ENGINE = re.compile(
    r"Initializing a V1 LLM engine \(v(?P<version>[^)]*)\) with config: (?P<config>.*)"
)
# Sources: entrypoints/common/startup.py, config/model.py, v1/core/kv_cache_utils.py,
# v1/worker/gpu_worker.py and cpu_worker.py, model_loader/weight_utils.py, v1/engine/core.py. Names
# of files with settings for a GPU contain its name (fused_moe.py, fp8_utils.py).
# A server writes its arguments once, at the beginning of its start.
_ARGUMENTS = re.compile(r"non-default args: (?P<arguments>\{.*\})")
_STATED = {
    "version": re.compile(r"vLLM (?:API )?server version (?P<value>[^\s,]+)"),
    "architecture": re.compile(r"Resolved architecture: (?P<value>\w+)"),
    "max_model_len": re.compile(r"Using max model len (?P<value>\d+)"),
    "cache_tokens": re.compile(r"KV cache size: (?P<value>[\d,]+) tokens"),
    "max_concurrency": re.compile(
        r"Maximum concurrency for [\d,]+ tokens per request: (?P<value>[\d.]+)x"
    ),
    "checkpoint_gib": re.compile(r"Checkpoint size: (?P<value>[\d.]+) GiB"),
    "cache_gib": re.compile(
        r"(?:Available KV cache memory: |Explicitly set \()(?P<value>[\d.]+)(?: GiB|/)"
    ),
    "start_seconds": re.compile(r"init engine \([^)]*\) took (?P<value>[\d.]+) s"),
    "gpu": re.compile(r"\bdevice_name=(?P<value>\w[\w-]*)"),
}
# vLLM writes one of these when it has built the model. Sources: model_loader/weight_utils.py and
# default_loader.py.
_LOADING = re.compile(r"Loading (?:safetensors checkpoint shards|weights took)|Checkpoint size: ")
# vLLM's name of a value in the engine's configuration, and the name of the field.
_OF_CONFIG = {
    "model": "model",
    "dtype": "dtype",
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "quantization": "method",
    "kv_cache_dtype": "kv_cache_dtype",
    "device_config": "device",
}
# vLLM names a kernel by its class. Sources: kernels/linear/__init__.py, the quantization methods,
# fused_moe/oracle, platforms/cuda.py and v1/attention/backends/mla/prefill/selector.py.
_SELECTIONS: tuple[tuple[SelectionKind, re.Pattern[str]], ...] = (
    (
        "experts",
        re.compile(r"Using '?(?P<choice>[\w ]+?)'? (?P<subject>(?:\w+ )?MoE(?: LoRA)? backend)\b"),
    ),
    ("experts", re.compile(r"Using (?P<choice>\w+) for (?P<subject>[\w ]*MoE)\b")),
    (
        "kernel",
        re.compile(
            r"(?:Selected|Using) (?P<choice>\w*Kernel) for (?P<subject>[\w.-]+(?: [\w-]+)*)"
        ),
    ),
    (
        "attention",
        re.compile(
            r"(?:Using|Overriding with) (?:AttentionBackendEnum\.)?(?P<choice>[A-Z][A-Z0-9_]+) "
            r"(?P<subject>(?:attention |MLA prefill )?backend)\b"
        ),
    ),
)
_REMARKS: tuple[tuple[RemarkKind, re.Pattern[str]], ...] = (
    ("requantized", re.compile(r"\brequantiz", re.IGNORECASE)),
    ("scales", re.compile(r"\b(?:\w*_)?scal(?:e|es|ing)\b")),
    ("disabled", re.compile(r"\bdisabl(?:ed|ing)\b|\bfall(?:ing|s)? back\b", re.IGNORECASE)),
)
# Python's text of a member of an enum: <AttentionBackendEnum.FLASHINFER: 'vllm...'>.
_MEMBER = re.compile(r"<\w+\.(\w+): .*>")
_SECRET = re.compile(r"key|token$|password|secret")
_OPENING, _CLOSING, _QUOTES = "([{<", ")]}>", "'\""

# The levels that matter.
_Level = Literal["warning", "error"] | None


@dataclass(slots=True)
class _Found:
    """Statements of a start that were found so far. The first statement of a value counts.

    `begin` is the line with which the last of several starts begins.
    """

    lines: int = 0
    begin: int = 0
    has_arguments: bool = False
    is_vllm: bool = False
    is_loading: bool = False
    stated: dict[str, Stated] = field(default_factory=dict)
    arguments: dict[str, JsonValue] = field(default_factory=dict)
    selections: dict[tuple[str, str, str], Selection] = field(default_factory=dict)
    remarks: dict[str, Remark] = field(default_factory=dict)

    def add(self, message: str, level: _Level) -> None:
        if engine := _ENGINE.search(message):
            self._state("version", engine["version"])
            for name, value in top_level(engine["config"], "="):
                if name in _OF_CONFIG:
                    self.stated[_OF_CONFIG[name]] = Stated(value=_unquoted(value), line=self.lines)
        elif arguments := _ARGUMENTS.search(message):
            if self.has_arguments:
                self._start_again()
            self.has_arguments = True
            self.arguments = _arguments(arguments["arguments"])
        else:
            for name, pattern in _STATED.items():
                if match := pattern.search(message):
                    self._state(name, match["value"].replace(",", ""))
            self.is_loading |= _LOADING.search(message) is not None
            self._select(message)
            if level == "error":
                self._state("failure", clip(visible(message), _LONGEST_REMARK))
            elif level == "warning":
                self._remark(message)

    def _start_again(self) -> None:
        self.begin = self.lines
        self.is_loading = False
        for found in (self.stated, self.selections, self.remarks):
            found.clear()

    def _state(self, name: str, value: str) -> None:
        self.stated.setdefault(name, Stated(value=value, line=self.lines))

    def _select(self, message: str) -> None:
        for kind, pattern in _SELECTIONS:
            if match := pattern.search(message):
                subject, choice = match["subject"], match["choice"]
                selection = Selection(
                    kind=kind,
                    subject=subject,
                    choice=choice,
                    line=self.lines,
                    while_loading=self.is_loading,
                )
                self.selections.setdefault((kind, subject, choice), selection)
                return

    def _remark(self, message: str) -> None:
        for kind, pattern in _REMARKS:
            if pattern.search(message):
                text = clip(visible(message), _LONGEST_REMARK)
                self.remarks.setdefault(text, Remark(kind=kind, text=text, line=self.lines))
                return


def read_startup_log(stream: BinaryIO, name: str) -> StartupLog:
    """Return the statements of a log. `name` is the log's name in reports and errors.

    Raises InputError if no line is vLLM's, or if the log is larger than MOST_MEGABYTES.
    """
    found = _Found()
    for line in _lines(stream, name):
        found.lines += 1
        # Without zero bytes, UTF-16 (as Windows PowerShell writes) reads like ASCII.
        decoded = line.replace(b"\0", b"").decode(errors="replace")
        text = _COLOUR.sub("", decoded).rstrip("\r\n")
        message, level, is_vllm = _message(text)
        found.is_vllm |= is_vllm
        found.add(message, level)
    if not found.is_vllm and not found.stated:
        raise InputError.of(rules.NO_LOG, name)
    return StartupLog(
        log=name,
        lines=found.lines,
        begin=found.begin,
        version=found.stated.get("version"),
        model=found.stated.get("model"),
        architecture=found.stated.get("architecture"),
        device=found.stated.get("device"),
        gpu=found.stated.get("gpu"),
        tensor_parallel_size=found.stated.get("tensor_parallel_size"),
        method=found.stated.get("method"),
        dtype=found.stated.get("dtype"),
        kv_cache_dtype=found.stated.get("kv_cache_dtype"),
        max_model_len=found.stated.get("max_model_len"),
        checkpoint_gib=found.stated.get("checkpoint_gib"),
        cache_gib=found.stated.get("cache_gib"),
        cache_tokens=found.stated.get("cache_tokens"),
        max_concurrency=found.stated.get("max_concurrency"),
        start_seconds=found.stated.get("start_seconds"),
        failure=found.stated.get("failure"),
        arguments=found.arguments,
        selections=tuple(found.selections.values()),
        remarks=tuple(found.remarks.values()),
    )


def _lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the lines. Only one line is in memory, and a long line is cut."""
    size, is_rest = 0, False
    while part := stream.readline(_LONGEST_LINE):
        size += len(part)
        if size > MOST_MEGABYTES * 10**6:
            raise InputError.of(rules.TOO_LARGE, name, most=MOST_MEGABYTES)
        if not is_rest:
            yield part
        is_rest = not part.endswith(b"\n")


def _message(text: str) -> tuple[str, _Level, bool]:
    """Return the message of a line, its level, and whether it is vLLM's for sure."""
    begin = text.find("{")
    if begin >= 0 and text.endswith("}") and not _PLACE.search(text[:begin]):
        try:
            content = json.loads(text[begin:])
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, dict):
            return _json_message(content)
    place = _PLACE.search(text)
    if place is None:
        return text, _level(text), False
    return text[place.end() :], _level(text[: place.start()]), True


def _level(text: str) -> _Level:
    match = _LEVEL.search(text)
    return None if match is None else "warning" if match["warning"] else "error"


def _json_message(content: dict[str, object]) -> tuple[str, _Level, bool]:
    named = (content[key] for key in _MESSAGE_KEYS if isinstance(content.get(key), str))
    recognized = (text for text in _texts(content) if _PLACE.search(text))
    inner = next(chain(named, recognized), "")
    message, level, is_vllm = _message(str(inner).strip())
    levels = " ".join(str(content.get(key, "")).upper() for key in _LEVEL_KEYS)
    return message, level or _level(levels), is_vllm


def _texts(content: Mapping[str, object]) -> Iterator[str]:
    """Yield the texts in an object, also those of inner objects."""
    for value in content.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from _texts(value)


def top_level(text: str, sign: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of `name=value, name=value`, without those inside brackets."""
    for part in _split(text):
        name, found, value = part.partition(sign)
        if found:
            yield name.strip(), value.strip()


def _split(text: str) -> Iterable[str]:
    """Yield the parts of a text between commas. Commas in brackets and quotes do not count."""
    depth, quote, begin = 0, "", 0
    for position, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        elif letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[begin:position]
            begin = position + 1
    yield text[begin:]


def _unquoted(value: str) -> str:
    return value.strip("'\"").removeprefix("torch.")


def _arguments(text: str) -> dict[str, JsonValue]:
    """Return the arguments in Python's text of a dict. A value that is no literal stays text.

    Keys and passwords are masked. vLLM masks only some of them.
    """
    pairs = ((_unquoted(name), value) for name, value in top_level(text[1:-1], ":"))
    return {name: "***" if _SECRET.search(name) else _literal(value) for name, value in pairs}


def _literal(text: str) -> JsonValue:
    if member := _MEMBER.fullmatch(text):
        return member[1]
    try:
        value: object = ast.literal_eval(text)
        plain: JsonValue = json.loads(json.dumps(value))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return plain
