"""Get a model's responses from an engine of vLLM or from a server.

Both kinds of sources have the same interface, `ResponseSource.get_responses`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vexport.architectures.config import vocab_size
from vexport.checkpoint.index import folder_digest, read_index
from vexport.checkpoint.source import resolve_drafter
from vexport.engine.describe import NONE, kernel_environment
from vexport.engine.messages import (
    DRAFT_TOKENS,
    KL_TOKENS,
    SessionRequest,
    SessionResult,
    speculative_config,
)
from vexport.engine.session import Worker, session_error
from vexport.files import digest_bytes, to_json
from vexport.inference.answers import Rows, ServedSession
from vexport.inference.endpoint.server import Server
from vexport.inference.endpoint.tokenizer import show_retries
from vexport.inference.engine_session import run_session
from vexport.inference.fingerprint import engine_fingerprint, write_fingerprint
from vexport.inference.options import BASELINE, NO_EVALUATION, EngineOptions
from vexport.inference.prompting import require_tools
from vexport.inference.prompts import CONTINUED_PROMPTS, Prompts, fixed_prompts, limited_length
from vexport.inference.questions import QuestionDigests
from vexport.inference.repeated import read_repeated, require_deterministic
from vexport.inference.requested_tasks import add_tasks
from vexport.inference.session_folder import (
    ENGINE_LOG,
    LOGPROBS,
    SERVER_LOG,
    TEXT_FILE,
    add_to_manifest,
)
from vexport.inference.shipped import longest_sequences
from vexport.inference.text_rows import read_rows, truncated_rows
from vexport.records import named
from vexport.records.values import MOST_COUNT
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import LmEvalSettings
from vexport.scenario.serve import EngineArguments

SERVER_WORKER = "vexport.inference.endpoint.worker"
# The default context length of an evaluation. Longer prompts are an error and never truncated.
EVALUATION_LENGTH = 4096
# Maximum number of tokens that vLLM computes in a step if a row of text is longer than this. Some
# versions hold the logits of all tokens of a step: 1.2 GB in float32 for a vocabulary of 152 k.
LONG_ROW = 2048
# Number of tokens to draft at once, unless an argument of vLLM sets another number.
DRAFT_LENGTH = 3
DEFAULT_LM_EVAL = LmEvalSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """All prompts for a model in addition to the fixed prompts.

    `evaluate` contains the tasks of lm-eval or the text, and `lm_eval` the settings of the tasks'
    prompts. `texts` are the texts of the fixed prompts, or empty for built-in texts. With `repeat`,
    the model runs twice on a part of the documents. `accepted` has the digests of an accepted
    baseline's questions. It is an error if the questions of this evaluation differ from them.
    """

    evaluate: Evaluate = NO_EVALUATION
    lm_eval: LmEvalSettings = DEFAULT_LM_EVAL
    texts: Sequence[str] = ()
    repeat: bool = False
    accepted: QuestionDigests = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSource(ABC):
    """A model that runs and returns responses.

    `role` names the model in progress and errors. The baseline has the role `BASELINE`.
    """

    role: str
    options: EngineOptions

    @abstractmethod
    def get_responses(self, questions: Questions, folder: Path) -> ServedSession:
        """Return the session of the model. Write its responses and the log to `folder`.

        If vLLM refuses a checkpoint, the returned session has the failure.

        Raises:
            EnvironmentFault: the engine or the server fails for good, or too many
                repeated responses differ.
            InputError: a task cannot be used.
        """

    @property
    def is_baseline(self) -> bool:
        """Return True if other models are compared with this model."""
        return self.role == BASELINE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSource(ResponseSource):
    """A checkpoint that vLLM runs on this machine, in one start of the engine.

    `arguments` are vLLM's arguments for this model.
    """

    checkpoint: Path
    arguments: EngineArguments

    def get_responses(self, questions: Questions, folder: Path) -> ServedSession:
        """Start vLLM, and run the fixed prompts and the tasks or the text."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = questions.evaluate
        require_tools(self.role, self.checkpoint, settings)
        prompts = fixed_prompts(
            self.checkpoint, texts=questions.texts, count=settings.kl_prompts or CONTINUED_PROMPTS
        )
        rows = read_rows(
            settings,
            self.checkpoint,
            longest=self.options.serve.max_model_len,
            vocabulary=self._vocabulary(),
            trust_tokenizer=self.options.trust_remote_code,
            shows_notes=self.is_baseline,
        )
        if rows:
            prompts = replace(prompts, tokens=truncated_rows(rows))
        request = self._request(questions, prompts, rows, folder)
        result = run_session(
            request,
            log=add_to_manifest(folder / ENGINE_LOG),
            timeout=self.options.serve.timeout,
            vllm_python=self.options.vllm_python,
            on_progress=named(self.role, self.options.on_progress),
        )
        if (request.tasks or rows) and result.engine is not None:
            write_fingerprint(folder, engine_fingerprint(self.checkpoint, result.engine))
        _require_deterministic(folder, settings)
        return ServedSession(result=result, prompts=prompts, rows=rows)

    def _vocabulary(self) -> int:
        config_file = self.checkpoint / "config.json"
        return vocab_size(read_index(self.checkpoint).config, str(config_file))

    def _request(
        self, questions: Questions, prompts: Prompts, rows: Rows, folder: Path
    ) -> SessionRequest:
        settings = questions.evaluate
        speculative = resolve_drafter(settings.speculative or "", self.options.on_progress)
        engine_request = self._engine_request(settings)
        request = replace(
            engine_request,
            canaries=prompts.texts if self.options.serve.canaries else (),
            logprob_prompts=prompts.tokens,
            logprobs_file=add_to_manifest(folder / LOGPROBS),
            lm_eval=questions.lm_eval,
            repeat=questions.repeat,
            accepted=questions.accepted,
            identity=_identity(engine_request) if settings.tasks else None,
        )
        request = add_tasks(request, settings, self.options, folder)
        if rows:
            request = _with_text(request, rows, folder)
        if rows and speculative:
            request = _with_drafts(request, rows, speculative)
        return request

    def _engine_request(self, settings: Evaluate) -> SessionRequest:
        options = self.options
        needed = max((EVALUATION_LENGTH, *longest_sequences(settings)))
        lengths = (needed,) if settings.tasks else ()
        return SessionRequest(
            checkpoint=self.checkpoint,
            max_model_len=options.serve.max_model_len or limited_length(self.checkpoint, *lengths),
            enforce_eager=options.serve.enforce_eager,
            arguments=self.arguments,
            trust_remote_code=options.trust_remote_code,
            seed=settings.seed,
        )


def _with_text(request: SessionRequest, rows: Rows, folder: Path) -> SessionRequest:
    longest = max(len(row) + 1 for row in rows)
    return replace(
        request,
        text=rows,
        text_file=add_to_manifest(folder / TEXT_FILE),
        max_model_len=max(request.max_model_len or 0, longest),
        arguments=arguments_for_text(request.arguments, longest),
    )


def arguments_for_text(arguments: EngineArguments, longest: int) -> EngineArguments:
    """Return the arguments of an engine that scores rows of up to `longest` tokens.

    vLLM computes long rows in parts, unless `arguments` turn that off.
    """
    if longest <= LONG_ROW or arguments.get("enable_chunked_prefill") is False:
        return arguments
    sequences = arguments.get("max_num_seqs")
    # vLLM requires a token for each sequence.
    tokens = max(LONG_ROW, sequences) if isinstance(sequences, int) else LONG_ROW
    return {"max_num_batched_tokens": tokens, **arguments}


def _with_drafts(request: SessionRequest, rows: Rows, speculative: str) -> SessionRequest:
    """Return the request with drafting: the model continues the first tokens of each row."""
    config = speculative_config(speculative, DRAFT_LENGTH)
    needed = limited_length(request.checkpoint, KL_TOKENS + DRAFT_TOKENS)
    return replace(
        request,
        drafted=truncated_rows(rows),
        arguments={"speculative_config": config, **request.arguments},
        max_model_len=max(request.max_model_len or 0, needed),
    )


def _identity(engine_request: SessionRequest) -> str:
    """Return a digest of the model and of the engine's arguments.

    Stored responses of lm-eval depend on both. The digest does not depend on the tasks, because the
    key of a stored response is its prompt with its sampling parameters.
    """
    parts = [to_json(engine_request), folder_digest(engine_request.checkpoint)]
    environment = kernel_environment()
    if environment != NONE:
        parts.append(environment)
    return digest_bytes("\n".join(parts).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSource(ResponseSource):
    """A model that a server serves at an address.

    `tokenizer` is the folder of the tokenizer for the prompts. The tokenizer's code runs only with
    `trust_tokenizer`. A part of the documents always runs twice, because the model at an address
    may change.
    """

    url: str
    tokenizer: Path
    trust_tokenizer: bool = False

    def get_responses(self, questions: Questions, folder: Path) -> ServedSession:
        """Send the tasks or the text to the server, and return its responses."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = questions.evaluate
        longest = self._longest_sequence(settings)
        rows = read_rows(
            settings,
            self.tokenizer,
            longest=longest,
            vocabulary=MOST_COUNT,
            trust_tokenizer=self.trust_tokenizer,
            shows_notes=self.is_baseline,
        )
        result = Worker(
            module=SERVER_WORKER,
            request=self._request(questions, rows, longest, folder),
            kind=SessionResult,
            where=f"{self.role} {self.url}",
            log=add_to_manifest(folder / SERVER_LOG),
            timeout=self.options.serve.timeout,
            vllm_python=self.options.vllm_python,
        ).run(named(self.role, self.options.on_progress))
        if result.problem is not None:
            raise session_error(result.problem)
        _require_deterministic(folder, settings)
        prompts = Prompts(natural=True, texts=(), tokens=truncated_rows(rows))
        return ServedSession(result=result, prompts=prompts, rows=rows)

    def _longest_sequence(self, settings: Evaluate) -> int:
        """Return the maximum number of tokens of a sequence."""
        endpoint = settings.endpoint_at(self.url, is_baseline=self.is_baseline)
        server = Server(endpoint, show_retries(self.role, self.options))
        # vLLM generates a token after each row of text.
        needed = max((EVALUATION_LENGTH, *longest_sequences(settings)))
        if settings.text is not None:
            needed = settings.text_tokens + 1
        served = server.model.max_model_len or needed
        return min(served, self.options.serve.max_model_len or needed)

    def _request(
        self, questions: Questions, rows: Rows, longest: int, folder: Path
    ) -> SessionRequest:
        settings = questions.evaluate
        request = SessionRequest(
            checkpoint=self.tokenizer,
            endpoint=settings.endpoint_at(self.url, is_baseline=self.is_baseline),
            lm_eval=questions.lm_eval,
            max_model_len=longest,
            repeat=True,
            accepted=questions.accepted,
            trust_remote_code=self.options.trust_remote_code,
            trust_tokenizer=self.trust_tokenizer,
            output=folder,
        )
        if rows:
            request = replace(
                request,
                text=rows,
                text_file=add_to_manifest(folder / TEXT_FILE),
                logprobs_file=add_to_manifest(folder / LOGPROBS),
                drafted=truncated_rows(rows) if settings.speculative else (),
            )
        return add_tasks(request, settings, self.options, folder)


def _require_deterministic(folder: Path, settings: Evaluate) -> None:
    repeated = read_repeated(folder)
    if repeated is not None:
        require_deterministic(folder, repeated, settings.alpha)
