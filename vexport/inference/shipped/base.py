"""Types of shipped tasks: conversations, documents, and the interface of a task."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import JsonValue

from vexport.files import to_json, write_text
from vexport.inference.stored_responses import FinishedText
from vexport.outputs.manifest import record
from vexport.records import Json, Outcome, Reason
from vexport.scenario import Evaluate

JsonObject = Mapping[str, Json]
SUFFIX = ".shipped.json"
"""Suffix of the file that describes a part of a shipped task to a worker."""
CORRECT = "exact_match"
"""The metric that decides: 1 if all of a document's responses are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request to a model, in the form of OpenAI's chat API: messages, and tools to call."""

    messages: tuple[JsonObject, ...]
    tools: tuple[JsonObject, ...] = ()

    @property
    def has_pictures(self) -> bool:
        """Return True if a message has a picture."""
        return has_pictures([*map(dict, self.messages)])

    @property
    def begins_response(self) -> bool:
        """Return True if the last message is the beginning of the response."""
        return self.messages[-1].get("role") == "assistant"


def has_pictures(messages: Json) -> bool:
    """Return True if one of the messages has a picture."""
    listed = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in listed if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A question with its right answer.

    `question` and `target` appear in reports. A model gets the `conversations`, usually one.
    `details` appear in lm-eval's samples, and lm-eval hashes them. Together with the question they
    identify the document, so they need digests of everything else in the conversations.
    """

    question: str
    target: str
    conversations: tuple[Conversation, ...]
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOutcome:
    """The outcome of a part, and its documents that only the baseline solved, by their fault."""

    name: str
    outcome: Outcome
    documents: int
    faults: Mapping[str, int]


class Obstacle(NamedTuple):
    """A reason why a score does not decide, and the outcome in place of the interval's."""

    outcome: Outcome
    reason: Reason


ScoreRows = Sequence[Mapping[str, float]]
"""The scores of one model's responses, by metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedPart:
    """A part of the shipped task `task`. For lm-eval and in verdicts, it is a task of its own.

    Its documents depend on nothing but `name`, `seed` and `options`.
    """

    task: str
    name: str
    seed: int = 0
    options: Mapping[str, JsonValue] = field(default_factory=dict)

    def write(self, folder: Path) -> str:
        """Write a file below `folder` that describes the part, and return the file's path."""
        target = folder / self.name / f"{self.name}{SUFFIX}"
        target.parent.mkdir(parents=True, exist_ok=True)
        record(target)
        write_text(target, to_json(self))
        return str(target)


class ShippedTask(ABC):
    """A task whose documents vexport makes.

    - `name` is the name in `--task`.
    - `metrics` are 1 or 0 for each document. `CORRECT` is one of them.
    - `max_gen_toks` is the maximum number of tokens of a response.
    - `takes_tools` is True if the conversations have tools.
    - `takes_pictures` is True if the conversations have pictures.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    max_gen_toks: ClassVar[int]
    takes_tools: ClassVar[bool] = False
    takes_pictures: ClassVar[bool] = False

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The names of the parts."""

    @abstractmethod
    def options(self, settings: Evaluate) -> Mapping[str, JsonValue]:
        """Return what the documents depend on besides the seed. Raises InputError."""

    @abstractmethod
    def documents(self, part: ShippedPart) -> Sequence[Document]:
        """Make the documents of a part."""

    @abstractmethod
    def score(
        self, part: ShippedPart, document: Document, responses: Sequence[FinishedText]
    ) -> Mapping[str, float]:
        """Return each of the `metrics` for the responses to the document's conversations."""

    @abstractmethod
    def longest_sequence(self, part: ShippedPart) -> int:
        """Return a number of tokens that is enough for each conversation and its response."""

    def fault(self, scores: Mapping[str, float]) -> str:
        """Name the fault of a response that is not correct, by its scores."""
        return "wrong"

    def explain_loss(self, parts: Sequence[PartOutcome]) -> str:
        """Return a clause for the reason of a FAIL, or "". `parts` are all parts in the verdict."""
        return ""

    def obstacle(self, baseline: ScoreRows, candidate: ScoreRows, alpha: float) -> Obstacle | None:
        """Return why the interval does not decide, or None if it does."""
        return None
