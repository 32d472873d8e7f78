"""Answers that are kept while a model is asked, so that a second call asks only the rest."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from vexport.engine.messages import ANSWERS
from vexport.outputs.manifest import is_recorded, record
from vexport.records import Json


class FinishedText(str):
    """A generated text with the engine's reason for ending it, such as `stop` or `length`.

    The reason is empty if it is unknown. lm-eval's lists of answers carry the object on to the
    samples. lm-eval also converts a task's targets to the type of the answers: it calls the type
    with the text alone.
    """

    finish_reason: str

    def __new__(cls, text: str, finish_reason: str = "") -> "FinishedText":
        """Attach the reason to the text."""
        finished = super().__new__(cls, text)
        finished.finish_reason = finish_reason
        return finished

    def __reduce__(self) -> tuple[type["FinishedText"], tuple[str, str]]:
        """Return how to copy the object: lm-eval makes copies."""
        return FinishedText, (str(self), self.finish_reason)


def kept_text(text: str, finish_reason: str | None) -> Json:
    """Return a generated answer as `KeptAnswers` stores it."""
    return {"text": text, "finish_reason": finish_reason or ""}


def finished_text(answer: Json) -> FinishedText:
    """Read an answer of `kept_text`, or a bare text, which older versions stored."""
    if isinstance(answer, dict):
        return FinishedText(str(answer.get("text", "")), str(answer.get("finish_reason", "")))
    return FinishedText(str(answer), "")


class KeptAnswers(dict[str, Json]):
    """Answers by their keys, stored in a file with one line each, or in memory alone.

    If a killed process left an unfinished last line, the line is removed.
    """

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self._file = file
        content = b""
        if file is not None and file.is_file():
            content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if file is not None and len(whole) < len(content):
            os.truncate(file, len(whole))
        for line in whole.splitlines():
            with suppress(ValueError):  # lines that older versions did not remove
                self.update(json.loads(line))

    def add(self, answers: Mapping[str, Json]) -> None:
        """Store answers."""
        self.update(answers)
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            for key, answer in answers.items():
                file.write(f"{json.dumps({key: answer})}\n")


def open_kept_answers(output: Path, identity: str) -> KeptAnswers:
    """Open the answers of one model, computed by one version of everything that computes them.

    `identity` names both. Answers with another identity are removed from the folder `output`.
    """
    digest = hashlib.sha256(identity.encode()).hexdigest()
    file = output / f"{ANSWERS}{digest[:16]}.jsonl"
    for other in output.glob(f"{ANSWERS}*"):
        if other != file and is_recorded(other):
            other.unlink()
    record(file)
    return KeptAnswers(file)
