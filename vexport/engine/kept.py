"""What a session has been told before its tasks, kept for one that continues it after an interruption.

Used in the worker process only. Nothing is kept of a session without an identity.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from vexport.engine.messages import SessionRequest, SessionResult
from vexport.files import digest_bytes, from_json, to_json, write_text
from vexport.types import Canary

FILE = "session-part.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The canaries' answers and the files of log-probabilities that are whole; `digest` names the session."""

    digest: str
    canaries: tuple[Canary, ...] = ()
    files: tuple[str, ...] = ()
    seconds: dict[str, float] | None = None


class KeptParts:
    """The file of a session, in the folder of its log-probabilities."""

    def __init__(self, request: SessionRequest, result: SessionResult) -> None:
        self._file: Path | None = None
        self._kept = Kept(digest="")
        if request.identity is None or request.logprobs_file is None:
            return
        self._file = request.logprobs_file.parent / FILE
        engine = result.engine
        asked = (request.canaries, request.canary_tokens, request.logprob_prompts, request.text)
        computes = (engine.vllm, engine.torch, engine.processor) if engine else ()
        digest = digest_bytes(repr((request.identity, asked, computes)).encode())
        if self._file.is_file() and (kept := from_json(Kept, self._file)).digest == digest:
            self._kept = kept
        else:
            self._kept = Kept(digest=digest)

    @property
    def canaries(self) -> tuple[Canary, ...]:
        """The answers that were given; none where they were not."""
        return self._kept.canaries

    @property
    def seconds(self) -> dict[str, float]:
        """What took how long of all that is kept."""
        return self._kept.seconds or {}

    def has(self, file: Path) -> bool:
        """Whether a file was written whole."""
        return file.name in self._kept.files and file.is_file()

    def keep(
        self, seconds: dict[str, float], *, canaries: tuple[Canary, ...] = (), file: Path | None = None
    ) -> None:
        """Add what the session has been told."""
        files = (*self._kept.files, *((file.name,) if file else ()))
        kept = replace(self._kept, files=files, seconds={**self.seconds, **seconds})
        self._kept = replace(kept, canaries=canaries) if canaries else kept
        if self._file is not None:
            write_text(self._file, to_json(self._kept))
