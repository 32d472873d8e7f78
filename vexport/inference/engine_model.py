"""Run prompts on an engine of vLLM in this process."""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file

from vexport.engine.messages import CANARY_TOKENS, DRAFT_TOKENS, SessionRequest, draft_counts
from vexport.errors import InputError, first_line
from vexport.files import atomic_path
from vexport.inference.model import Model, Question, TokenIds, override_attribute
from vexport.inference.row_scores import RowScores, scores_of_flat
from vexport.inference.stored_responses import StoredResponses, answer_to_json
from vexport.records import Canary, DraftCounts, Json, OnProgress
from vexport.rules import sight as rules

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.config import ModelConfig
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput
    from vllm.tokenizers import TokenizerLike

# Number of questions per batch, as a multiple of the engine's batch size. With smaller batches, the
# engine is partly idle at the end of each batch. With larger batches, more responses are lost if an
# evaluation is killed.
_BATCHES = 4
# Number of likeliest tokens at each place of a text. Their log-probabilities give a lower bound of
# the KL. If the vocabulary has at most `_SMALL_VOCABULARY` tokens, all of them are read, and the KL
# is exact.
_MAX_TOP_LOGPROBS = 128
_MIN_TOP_LOGPROBS = 20
_SMALL_VOCABULARY = 1024
# Maximum numbers of log-probabilities: of one row, and of several rows that run at once. A row with
# more than `_VALUES_AT_ONCE` runs alone. vLLM returns Python lists, which need about 100 bytes per
# number.
_MAX_VALUES = 1 << 22
_VALUES_AT_ONCE = 1 << 20


class EngineModel(Model):
    """A vLLM engine in this process."""

    def __init__(
        self,
        llm: "LLM",
        stored_responses: StoredResponses,
        on_progress: OnProgress,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(stored_responses, on_progress)
        self._llm = llm
        self.llm_engine = llm.llm_engine
        most = int(llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)
        self._batch_size = batch_size or _BATCHES * most

    def ask(self, questions: Mapping[str, Question]) -> None:
        """Run questions in batches, and store the responses after each batch."""
        keys = list(questions)
        for first in range(0, len(keys), self._batch_size):
            batch = keys[first : first + self._batch_size]
            answers = self._ask_batch([questions[key] for key in batch])
            self.stored_responses.add(dict(zip(batch, answers, strict=True)))

    def _ask_batch(self, questions: Sequence[Question]) -> list[Json]:
        from lm_eval.models.vllm_causallms import VLLM
        from vllm import SamplingParams

        scoring = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)
        step = self._llm.llm_engine.step

        def counted() -> "list[RequestOutput]":
            outputs: list[RequestOutput] = step()
            self.count(sum(output.finished for output in outputs))
            return outputs

        parameters: list[SamplingParams] = [each.parameters or scoring for each in questions]
        with override_attribute(self._llm.llm_engine, "step", counted):
            outputs = self._outputs(questions, parameters)
        answers: list[Json] = []
        for question, output in zip(questions, outputs, strict=True):
            if question.parameters:
                text = output.outputs[0]
                answers.append(answer_to_json(text.text, text.finish_reason))
            else:
                score = VLLM._parse_logprobs(list(question.prompt), output, question.context)
                answers.append(list(score))
        return answers

    def _outputs(
        self, questions: Sequence[Question], parameters: "Sequence[SamplingParams]"
    ) -> "list[RequestOutput]":
        """Run questions. vLLM renders conversations with pictures."""
        from vllm import TokensPrompt

        outputs: dict[int, RequestOutput] = {}
        texts = [at for at, each in enumerate(questions) if not each.chat_options]
        if texts:
            prompts = [TokensPrompt(prompt_token_ids=list(questions[at].prompt)) for at in texts]
            chosen = [parameters[at] for at in texts]
            answers = self._llm.generate(prompts, chosen, use_tqdm=False)
            outputs |= zip(texts, answers, strict=True)
        pictured: dict[str, list[int]] = {}
        for at, each in enumerate(questions):
            if each.chat_options:
                pictured.setdefault(repr(each.chat_options), []).append(at)
        for places in pictured.values():
            answers = self._chat(
                [questions[at] for at in places], [parameters[at] for at in places]
            )
            outputs |= zip(places, answers, strict=True)
        return [outputs[at] for at in range(len(questions))]

    def _chat(
        self, questions: Sequence[Question], parameters: "Sequence[SamplingParams]"
    ) -> "list[RequestOutput]":
        """Run conversations with pictures that have the same options.

        Raises InputError if the model or its chat template do not take them.
        """
        conversations = [
            list(each.conversation.messages) for each in questions if each.conversation is not None
        ]
        options = questions[0].chat_options
        try:
            outputs: list[RequestOutput] = self._llm.chat(
                conversations, parameters, use_tqdm=False, **options
            )
        except ValueError as error:  # vLLM's class for a request that it refuses
            raise InputError.of(rules.REFUSED, "chat", reply=first_line(error)) from error
        return outputs

    def score_rows(self, rows: Sequence[TokenIds]) -> Iterator[RowScores]:
        """Yield the log-probabilities of each row's tokens and of the likeliest tokens.

        For a small vocabulary, yield the log-probabilities of all tokens.
        """
        from vllm import SamplingParams

        vocabulary = self._llm.llm_engine.model_config.get_vocab_size()
        longest = max(map(len, rows))
        top = top_tokens(vocabulary, longest)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=-1 if top == vocabulary else top,
            flat_logprobs=True,
            detokenize=False,
        )
        at_once = max(1, _VALUES_AT_ONCE // (longest * (top + 1)))
        for start in range(0, len(rows), at_once):
            self.on_progress("text", start, len(rows))
            for output in _outputs(self._llm, rows[start : start + at_once], sampling):
                yield _row_scores(output.prompt_logprobs)
        self.on_progress("text", len(rows), len(rows))

    def count_draft(self, prompt: TokenIds) -> DraftCounts:
        """Continue a prompt, up to the engine's maximum sequence length, and count drafts."""
        from vllm import SamplingParams

        longest = self._llm.llm_engine.model_config.max_model_len
        length = max(1, min(DRAFT_TOKENS, longest - len(prompt)))
        sampling = SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False
        )
        before = self._draft_totals()
        _outputs(self._llm, [prompt], sampling)
        return self._draft_totals() - before

    def _draft_totals(self) -> DraftCounts:
        metrics = self._llm.get_metrics()
        return draft_counts({metric.name: getattr(metric, "value", 0) for metric in metrics})


def require_pictures(config: "ModelConfig", task: str) -> None:
    """Raise InputError if the model takes no pictures."""
    if not config.is_multimodal_model:
        architecture = ", ".join(config.architectures)
        raise InputError.of(rules.TEXT_MODEL, config.model, architecture=architecture, task=task)


def top_tokens(vocabulary: int, longest: int) -> int:
    """Return the number of likeliest tokens to read at each place of a text's rows.

    `longest` is the number of tokens of the longest row. For a small vocabulary, return its size.
    For long rows, return a smaller number, which bounds the memory for a row.
    """
    fitting = _MAX_VALUES // longest
    if vocabulary <= min(_SMALL_VOCABULARY, fitting):
        return vocabulary
    return min(vocabulary, max(_MIN_TOP_LOGPROBS, min(_MAX_TOP_LOGPROBS, fitting)))


def _row_scores(flat: "FlatLogprobs") -> RowScores:
    """Convert vLLM's flat lists. The first position of a row has no log-probabilities."""
    # Converting through an array reads a list about ten times as fast as numpy.
    tokens = np.frombuffer(array("i", flat.token_ids), dtype=np.int32)
    logprobs = np.frombuffer(array("f", flat.logprobs), dtype=np.float32)
    return scores_of_flat(tokens, logprobs, len(flat) - 1)


def _outputs(
    llm: "LLM", prompts: Sequence[TokenIds], sampling: "SamplingParams | list[SamplingParams]"
) -> "list[RequestOutput]":
    tokens = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs: list[RequestOutput] = llm.generate(tokens, sampling, use_tqdm=False)
    return outputs


def run_canaries(
    llm: "LLM", request: SessionRequest, on_progress: OnProgress
) -> tuple[Canary, ...]:
    """Continue each text of `request.canaries` greedily by `CANARY_TOKENS` tokens.

    The maximum sequence length may shorten a continuation. The engine ignores end-of-sequence
    tokens, because later tokens also show whether log-probabilities stay finite. The position of
    the first end-of-sequence token is recorded.
    """
    from vllm import SamplingParams

    on_progress("canaries", 0, len(request.canaries))
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in request.canaries]
    longest = llm.llm_engine.model_config.max_model_len
    lengths = [max(1, min(CANARY_TOKENS, longest - len(prompt))) for prompt in prompts]
    samplings = [
        SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=0, seed=request.seed
        )
        for length in lengths
    ]
    outputs = _outputs(llm, prompts, samplings)
    on_progress("canaries", len(outputs), len(outputs))
    # vLLM would stop at the end token of the tokenizer and at end tokens of generation_config.json.
    stops = llm.llm_engine.model_config.try_get_generation_config().get("eos_token_id")
    ends = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}
    return tuple(
        _canary(text, output.outputs[0], ends, tokenizer)
        for text, output in zip(request.canaries, outputs, strict=True)
    )


def _canary(
    prompt: str, output: "CompletionOutput", ends: Set[int | None], tokenizer: "TokenizerLike"
) -> Canary:
    """Return the continuation, with its text cut at the first end-of-sequence token."""
    tokens = list(output.token_ids)
    ended = next((number for number, token in enumerate(tokens) if token in ends), None)
    chosen = [
        entry[token].logprob for entry, token in zip(output.logprobs or (), tokens, strict=True)
    ]
    text = output.text
    finish_reason = str(output.finish_reason)
    if ended is not None:
        text = tokenizer.decode(tokens[:ended], skip_special_tokens=True)
        finish_reason = "stop"
    return Canary(
        prompt=prompt,
        text=text,
        tokens=len(tokens),
        finish_reason=finish_reason,
        ended_after=ended,
        non_finite=sum(not math.isfinite(value) for value in chosen),
    )


def write_logprobs(
    llm: "LLM", prompts: Sequence[TokenIds], file: Path, on_progress: OnProgress
) -> None:
    """Write each prompt's log-probabilities of the whole vocabulary, except at the last position.

    `file` becomes a safetensors file with a float32 tensor (len(prompt) - 1, vocabulary) for each
    prompt, named `prompt.0`, `prompt.1`, ... The prompts run one at a time, because vLLM returns
    Python lists with some 100 bytes per number.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
    )
    tensors: dict[str, torch.Tensor] = {}
    for number, prompt in enumerate(prompts):
        on_progress("logprobs", number, len(prompts))
        (output,) = _outputs(llm, [prompt], sampling)
        tensors[f"prompt.{number}"] = dense(output.prompt_logprobs)
    with atomic_path(file) as temporary:
        save_file(tensors, temporary)
    on_progress("logprobs", len(prompts), len(prompts))


def dense(flat: "FlatLogprobs") -> torch.Tensor:
    """Convert vLLM's flat lists to a matrix (positions, vocabulary).

    The first position is left out, because it has no log-probabilities. At each position, vLLM
    lists the prompt's token and then the whole vocabulary, best first.
    """
    rows = []
    for start, end in zip(flat.start_indices[1:], flat.end_indices[1:], strict=True):
        # Converting through an array reads a list about ten times as fast as torch. Each position
        # contains the whole vocabulary.
        tokens = torch.frombuffer(array("q", flat.token_ids[start:end]), dtype=torch.int64)
        values = torch.frombuffer(array("f", flat.logprobs[start:end]), dtype=torch.float32)
        row = torch.full((int(tokens.max()) + 1,), float("-inf"))
        rows.append(row.scatter_(0, tokens, values))
    return torch.stack(rows)
