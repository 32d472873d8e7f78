"""Statements of a server, in its start-up log or while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

SelectionKind = Literal["kernel", "attention", "experts"]
RemarkKind = Literal["disabled", "requantized", "scales"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A value that the log states, and the number of the first line with it.

    The line is 0 if a running server states the value.
    """

    value: str
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A kernel or backend (`choice`) that vLLM selected for a kind of layer (`subject`).

    `while_loading` is True if vLLM selected it after it began to read weights.
    """

    kind: SelectionKind
    subject: str
    choice: str
    line: int
    while_loading: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A message about something that vLLM disabled or requantized by itself, or about scales."""

    kind: RemarkKind
    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupLog:
    """Statements of a start-up log. A value that the log does not state is None.

    `arguments` are the arguments that differ from vLLM's defaults. The maximum concurrency is the
    number of sequences of the maximum length that fit into the KV cache. Sizes are in GiB, and
    `start_seconds` is the duration of the whole start. `lines` is 0 if a running server states the
    values. If a log has several starts, the statements are those of the last one, which begins with
    the line `begin`. Otherwise, `begin` is 0. `failure` is the first message of the level ERROR.
    """

    schema: Literal["vexport.startup-log/1"] = "vexport.startup-log/1"
    log: str
    lines: int
    begin: int = 0
    version: Stated | None = None
    model: Stated | None = None
    architecture: Stated | None = None
    device: Stated | None = None
    gpu: Stated | None = None
    tensor_parallel_size: Stated | None = None
    method: Stated | None = None
    dtype: Stated | None = None
    kv_cache_dtype: Stated | None = None
    max_model_len: Stated | None = None
    checkpoint_gib: Stated | None = None
    cache_gib: Stated | None = None
    cache_tokens: Stated | None = None
    max_concurrency: Stated | None = None
    start_seconds: Stated | None = None
    failure: Stated | None = None
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    selections: tuple[Selection, ...] = ()
    remarks: tuple[Remark, ...] = ()
