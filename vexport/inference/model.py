"""The interface of a model in a worker process: an engine of vLLM, or a model behind a server.

Both accept the same questions: prompts of token ids to continue or to score (`Model.answers`), rows
of a text (`score_rows`), and prompts to continue by speculative decoding (`count_draft`). lm-eval
calls `generate` like `vllm.LLM.generate`, and the wrapper in `lm_eval_model` calls `score`.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from vexport.inference.shipped.base import Conversation
from vexport.inference.stored_responses import FinishedText, StoredResponses, answer_from_json
from vexport.records import DraftCounts, Json, OnProgress

if TYPE_CHECKING:
    from vexport.inference.row_scores import RowScores

_PROGRESS_STEPS = 100
Parameters = object
"""Sampling parameters: vLLM's SamplingParams, or parameters of a server's API by name."""
TokenIds = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt to continue with `parameters`.

    Without `parameters`, the model scores the tokens from `context` on instead of generating text.
    With a `conversation`, the prompt is the rendered conversation. It is empty if the model renders
    conversations itself (`Model.takes_messages`), or if the conversation has pictures. An engine
    renders pictures by `chat_options`, the arguments of `vllm.LLM.chat`.
    """

    prompt: TokenIds
    context: int = 0
    parameters: Parameters = None
    conversation: Conversation | None = None
    chat_options: Mapping[str, Json] = field(default_factory=dict)


class Model(ABC):
    """A model that runs prompts, with the methods of `vllm.LLM` that lm-eval's class calls.

    `on_progress` receives the name of the current step, the number of finished prompts, and the
    number of all prompts. `takes_messages` is True if the model renders conversations itself.
    """

    takes_messages: ClassVar[bool] = False
    llm_engine: Any

    def __init__(self, stored_responses: StoredResponses, on_progress: OnProgress) -> None:
        self.stored_responses = stored_responses
        self.on_progress = on_progress
        self._round = 0
        self._stage = ""
        self._done = 0
        self._total = 0

    @abstractmethod
    def ask(self, questions: Mapping[str, Question]) -> None:
        """Run all questions. Store the responses in `self.stored_responses` by the questions' keys.

        A generated response has the form of `answer_to_json`. The response to a question without
        `parameters` is a pair: the log-likelihood, and whether each token was the likeliest.
        """

    @abstractmethod
    def score_rows(self, rows: Sequence[TokenIds]) -> "Iterator[RowScores]":
        """Yield each row's log-probabilities at all places except the first."""

    @abstractmethod
    def count_draft(self, prompt: TokenIds) -> DraftCounts:
        """Continue a prompt greedily by `DRAFT_TOKENS` tokens, and count its drafts.

        The model ignores the end-of-sequence token, so that all prompts generate the same number of
        tokens.
        """

    def require_scores(self) -> None:  # noqa: B027 - an engine has them
        """Raise an error if the model returns no log-probabilities of prompts.

        It is an InputError or an EnvironmentFault.
        """

    def begin_step(self, stage: str, prompts: int) -> None:
        """Begin a step with this number of prompts."""
        self._stage = stage
        self._done = 0
        self._total = prompts
        self.on_progress(stage, 0, prompts)

    def count(self, finished: int) -> None:
        """Add `finished` to the number of finished prompts. Report progress at each percent."""
        before = self._done
        self._done = min(self._total, before + finished)
        percent_before = before * _PROGRESS_STEPS // self._total
        percent = self._done * _PROGRESS_STEPS // self._total
        if percent_before < percent:
            self.on_progress(self._stage, self._done, self._total)

    def start_round(self) -> None:
        """Start a new round: responses from earlier rounds are not reused."""
        self._round += 1

    def generate(
        self,
        prompts: Sequence[Mapping[str, list[int]]],
        sampling_params: Sequence[Parameters],
        use_tqdm: bool,
        lora_request: None,
    ) -> list[SimpleNamespace]:
        """Continue prompts, as `vllm.LLM` does."""
        questions = [
            Question(prompt=prompt["prompt_token_ids"], parameters=parameters)
            for prompt, parameters in zip(prompts, sampling_params, strict=True)
        ]
        texts = map(answer_from_json, self.answers(questions))
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in texts]

    def chat(self, questions: Sequence[Question]) -> list[FinishedText]:
        """Return the responses to questions with conversations."""
        return [*map(answer_from_json, self.answers(questions))]

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return a pair for each (context, continuation).

        The pair contains the log-likelihood of the continuation after the context, and whether each
        token of the continuation was the likeliest.
        """
        questions = [
            Question(prompt=context + continuation, context=len(context))
            for context, continuation in pairs
        ]
        scores: list[tuple[float, bool]] = []
        for answer in self.answers(questions):
            assert isinstance(answer, list)
            log_likelihood, is_greedy = answer
            assert isinstance(log_likelihood, float | int)
            assert isinstance(is_greedy, bool)
            scores.append((log_likelihood, is_greedy))
        return scores

    def answers(self, questions: Sequence[Question]) -> Iterator[Json]:
        """Return the responses in order.

        Only questions without a stored response are sent to the model. The longest prompts run
        first, as in lm-eval.
        """
        keys = [self._key(number, question) for number, question in enumerate(questions)]
        by_key = dict(zip(keys, questions, strict=True))
        left = [key for key in by_key if key not in self.stored_responses]
        left.sort(key=lambda key: -len(by_key[key].prompt))
        # For the worker's log.
        print(f"{len(keys) - len(left)} of {len(keys)} responses are kept", flush=True)
        self.count(len(keys) - len(left))
        if left:
            self.ask({key: by_key[key] for key in left})
        return (self.stored_responses[key] for key in keys)

    def _key(self, number: int, question: Question) -> str:
        """Return the key of a question's response.

        Equal questions of a round have the same key, unless their responses are sampled.
        """
        given = _as_mapping(question.parameters)
        sampled = number if given.get("temperature") else None
        parts = (
            self._round,
            list(question.prompt),
            question.context,
            sorted(given.items()),
            sampled,
            *((question.conversation,) if question.conversation is not None else ()),
            *sorted(question.chat_options.items()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _as_mapping(parameters: Parameters) -> Mapping[str, object]:
    """Return sampling parameters by name. vLLM's SamplingParams are a msgspec struct."""
    if isinstance(parameters, dict):
        return parameters
    names = getattr(parameters, "__struct_fields__", ())
    return {name: getattr(parameters, name) for name in names}


@contextmanager
def override_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute of `owner` inside the block, and restore its value afterwards."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
