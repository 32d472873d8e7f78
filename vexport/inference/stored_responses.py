"""Store responses while a model runs, so that a second call runs only the missing prompts."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vexport.engine.messages import ANSWERS
from vexport.files import require_no_device
from vexport.foreign import json_object
from vexport.outputs.manifest import is_recorded, record
from vexport.records import Json


class Call(NamedTuple):
    """A call of a tool. `arguments` is the text that the model wrote, which may not be JSON."""

    name: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"


class FinishedText(str):
    """A generated text with the engine's reason for ending it, such as `stop` or `length`.

    The reason is empty if it is unknown. `calls` are the calls of tools in the text. Both reach
    lm-eval's tasks, because lm-eval copies these objects. They are optional in the constructor,
    because lm-eval also calls the class with a task's target as the only argument.
    """

    finish_reason: str
    calls: tuple[Call, ...]

    def __new__(
        cls, text: str, finish_reason: str = "", calls: Sequence[Call] = ()
    ) -> "FinishedText":
        """Attach the reason and the calls to the text."""
        finished = super().__new__(cls, text)
        finished.finish_reason = finish_reason
        finished.calls = tuple(calls)
        return finished

    def __reduce__(self) -> tuple[type["FinishedText"], tuple[str, str, tuple[Call, ...]]]:
        """Return the constructor and its arguments, so that copies keep the reason and calls."""
        return FinishedText, (str(self), self.finish_reason, self.calls)


def text_with_calls(content: str, finish_reason: str, calls: Sequence[Call]) -> FinishedText:
    """Return a response whose text has a line for each call, after the model's other text."""
    lines = [content.strip(), *map(str, calls)] if calls else [content]
    return FinishedText("\n".join(line for line in lines if line), finish_reason, calls)


def answer_to_json(text: str, finish_reason: str | None, calls: Sequence[Call] = ()) -> Json:
    """Return a generated response in the form that `StoredResponses` stores."""
    stored: dict[str, Json] = {"text": text, "finish_reason": finish_reason or ""}
    return {**stored, "calls": [[*call] for call in calls]} if calls else stored


def answer_from_json(answer: Json) -> FinishedText:
    """Read a response from `answer_to_json`."""
    stored = answer if isinstance(answer, dict) else {}
    listed = stored.get("calls")
    calls = [
        Call(*map(str, call))
        for call in (listed if isinstance(listed, list) else [])
        if isinstance(call, list)
    ]
    return FinishedText(str(stored.get("text", "")), str(stored.get("finish_reason", "")), calls)


class StoredResponses(dict[str, Json]):
    """Responses by key, in memory and in a file with a line for each added response.

    Without a file, the responses are only in memory. If a killed process left an incomplete last
    line, the line is removed.
    """

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self._file = file
        content = b""
        if file is not None:
            require_no_device(file)
        if file is not None and file.is_file():
            content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if file is not None and len(whole) < len(content):
            os.truncate(file, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            self.update(json_object(line, f"{file}:{number}", "responses by prompt"))

    def add(self, answers: Mapping[str, Json]) -> None:
        """Store responses."""
        self.update(answers)
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            for key, answer in answers.items():
                file.write(f"{json.dumps({key: answer})}\n")


def open_stored_responses(output: Path, identity: str) -> StoredResponses:
    """Open the stored responses of one model in the folder `output`.

    `identity` describes the model and everything that affects its responses, such as versions.
    Stored responses with another identity are removed from the folder.
    """
    digest = hashlib.sha256(identity.encode()).hexdigest()
    file = output / f"{ANSWERS}{digest[:16]}.jsonl"
    for other in output.glob(f"{ANSWERS}*"):
        if other != file and is_recorded(other):
            other.unlink()
    record(file)
    return StoredResponses(file)
