"""A model under test: what is asked of it in one start of vLLM, or over the address of a server."""

import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from vexport.architectures.config import vocab_size
from vexport.calibration.data import read_samples
from vexport.checkpoint.hub import HubName, fetch, list_files, side_files
from vexport.checkpoint.index import folder_digest, read_index
from vexport.checkpoint.source import hub_name, parse_data, require_data, resolve_drafter
from vexport.engine.describe import NONE, answer_environment
from vexport.engine.load import CONTINUED, Prompts, fixed_prompts, shortest_length
from vexport.engine.messages import (
    ANSWERS,
    DRAFT_TOKENS,
    KL_TOKENS,
    SessionRequest,
    SessionResult,
    speculative_config,
)
from vexport.engine.session import Worker, session_error
from vexport.errors import CheckpointFailed, InputError, clip, visible
from vexport.files import digest_bytes, to_json, user_path
from vexport.inference.answers import Rows, Served
from vexport.inference.endpoint.server import Server
from vexport.inference.engine_session import run_session
from vexport.inference.fingerprint import engine_fingerprint, write_fingerprint
from vexport.inference.repeated import read_repeated, require_deterministic
from vexport.inference.task_data import fetch_task_data
from vexport.inference.tasks import require_generating, resolve_tasks
from vexport.outputs.manifest import (
    is_recorded,
    record,
    remove_recorded,
    require_manifest,
    strangers,
)
from vexport.outputs.replaceable import is_filled_folder, refuse_others
from vexport.records import PROGRESS_DETAIL, CalibrationData, LmEvalSettings, named
from vexport.records.values import MOST_COUNT
from vexport.run.given import BASELINE, CANDIDATE
from vexport.run.options import NO_EVALUATION, EngineOptions
from vexport.scenario import Evaluate

LOG = logging.getLogger(__name__)
# The default context length of an evaluation; longer prompts are an error and never truncated.
EVALUATION_LENGTH = 4096
SERVER_WORKER = "vexport.inference.endpoint.worker"
LOGPROBS = "logprobs.safetensors"
PLAIN = LmEvalSettings()
# The log-probability of each token of the text.
TEXT_FILE = "text.safetensors"
ENGINE_LOG, SERVER_LOG = "vllm.log", "lm-eval.log"
# Tokens of a sequence: two of a text, the first of which is not predicted, and a generated one.
_LEAST_TEXT = 2
# The files that transformers loads a tokenizer from: vocabularies of all kinds, and settings.
_TOKENIZER_FILE = re.compile(
    r"tokenizer.*\.(json|model)|vocab.*\.(json|txt)|tekken\.json|spiece\.model|sentencepiece.*\.model|.*\.tiktoken"
)
_TOKENIZER_NEEDED = "tokenizer.json, or other files of a tokenizer"
_GIVE_TOKENIZER = (
    "give --tokenizer, a folder or ORG/NAME (evaluate: {tokenizer: ...} in a scenario)"
)
# Tokens drafted at once, unless an argument of vLLM says otherwise.
DRAFT_LENGTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnderTest:
    """A model and everything that is asked of it besides the fixed prompts.

    `checkpoint` is its folder, or that of the tokenizer of the model behind the address `url`.
    lm-eval's files, the log and the log-probabilities go to `folder`. `texts` are prompts to
    continue; `evaluate` has the tasks of lm-eval or the text, `lm_eval` how tasks are asked. With
    `repeat` a part of them is asked again, of a server always: what is behind an address may
    change. Code of the tokenizer for a server's prompts runs only with `trust_tokenizer`.
    """

    role: str
    checkpoint: Path
    folder: Path
    options: EngineOptions
    url: str | None = None
    texts: Sequence[str] = ()
    evaluate: Evaluate = NO_EVALUATION
    lm_eval: LmEvalSettings = PLAIN
    repeat: bool = False
    trust_tokenizer: bool = False

    @property
    def is_baseline(self) -> bool:
        """Return whether the other models are compared with this one."""
        return self.role == BASELINE


def serve_model(model: ModelUnderTest) -> Served:
    """Ask a model its prompts, and the tasks of lm-eval or the text, in one start of vLLM or over
    an address.

    Raises EnvironmentFault as `run_session`, for a server that fails for good and a model whose
    answers change, InputError for unusable tasks; a checkpoint that vLLM refuses is a result.
    """
    model.folder.mkdir(parents=True, exist_ok=True)
    served = _in_engine(model) if model.url is None else _behind_address(model, model.url)
    if (repeated := read_repeated(model.folder)) is not None:
        require_deterministic(model.folder, repeated, model.evaluate.alpha)
    return served


def _in_engine(model: ModelUnderTest) -> Served:
    checkpoint, settings, options = model.checkpoint, model.evaluate, model.options
    prompts = fixed_prompts(checkpoint, texts=model.texts, count=settings.kl_prompts or CONTINUED)
    vocabulary = vocab_size(read_index(checkpoint).config, str(checkpoint / "config.json"))
    rows = _read_rows(model, options.serve.max_model_len, vocabulary)
    if rows:
        prompts = replace(prompts, tokens=_beginnings(rows))
    speculative = resolve_drafter(settings.speculative or "", options.on_progress)
    request = _with_text(_engine_request(model, prompts), rows, model.folder, speculative)
    result = run_session(
        request,
        log=_recorded(model.folder / ENGINE_LOG),
        timeout=options.serve.timeout,
        vllm_python=options.vllm_python,
        on_progress=named(model.role, options.on_progress),
    )
    if request.tasks and result.engine is not None:
        write_fingerprint(model.folder, engine_fingerprint(checkpoint, result.engine))
    return Served(result=result, prompts=prompts, rows=rows)


def _behind_address(model: ModelUnderTest, url: str) -> Served:
    settings, options, folder = model.evaluate, model.options, model.folder
    endpoint = settings.asking(url, is_baseline=model.is_baseline)
    served = (
        Server(endpoint, _retries_shown(model.role, options)).model.max_model_len
        or EVALUATION_LENGTH
    )
    longest = min(served, options.serve.max_model_len or EVALUATION_LENGTH)
    if settings.text is not None and longest <= _LEAST_TEXT:
        got, need = (
            f"sequences of at most {longest} tokens",
            f"more than {_LEAST_TEXT}, to read text",
        )
        raise InputError(
            f"{model.role} {url}", got=got, need=need, fix="start it with a longer --max-model-len"
        )
    rows = _read_rows(model, longest, MOST_COUNT)
    request = SessionRequest(
        checkpoint=model.checkpoint,
        endpoint=endpoint,
        lm_eval=model.lm_eval,
        max_model_len=longest,
        repeat=True,
        trust_remote_code=options.trust_remote_code,
        trust_tokenizer=model.trust_tokenizer,
        output=folder,
        text=rows,
        text_file=_recorded(folder / TEXT_FILE) if rows else None,
        logprobs_file=_recorded(folder / LOGPROBS) if rows else None,
        drafted=_beginnings(rows) if settings.speculative else (),
    )
    result = Worker(
        module=SERVER_WORKER,
        request=_with_tasks(request, settings, options, folder),
        kind=SessionResult,
        where=f"{model.role} {url}",
        log=_recorded(folder / SERVER_LOG),
        timeout=options.serve.timeout,
        vllm_python=options.vllm_python,
    ).run(named(model.role, options.on_progress))
    if result.problem is not None:
        raise session_error(result.problem)
    prompts = Prompts(natural=True, texts=(), tokens=_beginnings(rows))
    return Served(result=result, prompts=prompts, rows=rows)


def _read_rows(model: ModelUnderTest, longest: int | None, vocabulary: int) -> Rows:
    """The rows of the text as the model's tokens; none where tasks decide.

    They are as long as asked, or as the sequences that the engine (`longest`) or the model allows;
    what is left of the text after the last whole row is not read, unless it is all there is.
    """
    settings, checkpoint = model.evaluate, model.checkpoint
    if settings.text is None:
        return ()
    needed = settings.text_tokens + 1  # vLLM generates a token after each
    tokens = min(needed, longest or shortest_length(checkpoint, needed)) - 1
    data = CalibrationData(
        name=settings.text,
        samples=settings.text_rows,
        seq_len=tokens,
        column=parse_data(settings.text).column,
        pack=True,
    )
    trust = model.options.trust_remote_code if model.url is None else model.trust_tokenizer
    samples = read_samples(data, checkpoint, vocab_size=vocabulary, trust_remote_code=trust)
    for note in samples.notes if model.is_baseline else ():
        LOG.warning("note: %s", note)
    read = samples.token_ids
    return tuple(row for row in read if len(row) == tokens) or tuple(
        row for row in read if len(row) > 1
    )


def _with_text(
    request: SessionRequest, rows: Rows, folder: Path, speculative: str = ""
) -> SessionRequest:
    """The request that reads the rows too, whose scores go to `folder`, and with a method drafts
    on.
    """
    if not rows:
        return request
    length = max(request.max_model_len or 0, *(len(row) + 1 for row in rows))
    request = replace(
        request, text=rows, text_file=_recorded(folder / TEXT_FILE), max_model_len=length
    )
    if not speculative:
        return request
    drafting = {
        "speculative_config": speculative_config(speculative, DRAFT_LENGTH),
        **request.arguments,
    }
    length = max(length, shortest_length(request.checkpoint, KL_TOKENS + DRAFT_TOKENS))
    return replace(request, drafted=_beginnings(rows), arguments=drafting, max_model_len=length)


def _beginnings(rows: Rows) -> Rows:
    """The tokens of rows whose whole vocabulary is compared, and which drafts continue."""
    return tuple(row[:KL_TOKENS] for row in rows)


def clear_session(folder: Path, root: Path) -> None:
    """Remove what an unfinished session left in its folder, but for the engine's answers.

    `root` is the folder with the manifest. InputError, before anything is removed, if it lacks the
    manifest or if somebody else's files are in `folder`.
    """
    if not is_filled_folder(folder):
        return
    require_manifest(root)
    refuse_others(root, strangers(root, folder))
    remove_recorded(root, folder, folder.glob(f"{ANSWERS}*"))


def remove_answers(folder: Path) -> None:
    """Remove lm-eval's cache, once its results are kept."""
    for file in folder.glob(f"{ANSWERS}*"):
        if is_recorded(file):
            file.unlink()


def _recorded(file: Path) -> Path:
    """Add a file that another process will write to the manifest, and return its path."""
    record(file)
    return file


def _engine_request(model: ModelUnderTest, prompts: Prompts) -> SessionRequest:
    """The session that asks a model everything but the text."""
    settings, options = model.evaluate, model.options
    lengths = (EVALUATION_LENGTH,) if settings.tasks else ()
    request = SessionRequest(
        checkpoint=model.checkpoint,
        max_model_len=options.serve.max_model_len or shortest_length(model.checkpoint, *lengths),
        enforce_eager=options.serve.enforce_eager,
        arguments=options.serve.arguments(is_baseline=model.is_baseline),
        trust_remote_code=options.trust_remote_code,
        seed=settings.seed,
    )
    request = replace(
        request,
        canaries=prompts.texts,
        logprob_prompts=prompts.tokens,
        logprobs_file=_recorded(model.folder / LOGPROBS),
        lm_eval=model.lm_eval,
        repeat=model.repeat,
        identity=_identity(request) if settings.tasks else None,
    )
    return _with_tasks(request, settings, options, model.folder)


def _identity(started: SessionRequest) -> str:
    """A digest of the model and its engine's start, on which lm-eval's answers depend.

    Nothing of the tasks is in it: an answer is found by its prompt and its sampling parameters.
    """
    parts = [to_json(started), folder_digest(started.checkpoint)]
    if (chosen := answer_environment()) != NONE:
        parts.append(chosen)
    return digest_bytes("\n".join(parts).encode())


def _with_tasks(
    request: SessionRequest, settings: Evaluate, options: EngineOptions, folder: Path
) -> SessionRequest:
    """The request with lm-eval's tasks, if there are any, whose files go to `folder`."""
    if not settings.tasks:
        return request
    tasks = resolve_tasks(
        settings.tasks,
        folder=folder / "tasks",
        include_paths=settings.include_path,
        trust_remote_code=options.trust_remote_code,
    )
    return replace(
        request,
        tasks=tasks,
        include_paths=settings.include_path,
        limit=settings.limit,
        output=folder,
        seed=settings.seed,
    )


def _retries_shown(role: str, options: EngineOptions) -> Callable[[str], None]:
    """Return a function that shows that the server is asked again."""
    return lambda line: options.on_progress(f"{role}: server{PROGRESS_DETAIL}{line}", 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTokenizer:
    """The folder of the tokenizer for a server's prompts; `is_trusted` if its own code may run."""

    folder: Path
    is_trusted: bool


def tokenizer_of(
    role: str, url: str, settings: Evaluate, options: EngineOptions, here: Path | None = None
) -> ServedTokenizer:
    """Return the tokenizer for a server's prompts: as given, else `here`, else the server's own.

    The server names its tokenizer by the folder or model of the hub that it was started with. A
    folder is used only if the server runs on this machine: another machine must not choose among
    the files here. It does not choose a download either: a model of the hub is fetched if the
    server runs on this machine, or if the caller names the same model (`--model`). The server's
    word never runs code.

    InputError if there is no tokenizer; raises as `Server` if the server does not answer.
    """
    if settings.tokenizer is None and here is not None:
        return ServedTokenizer(folder=here, is_trusted=options.trust_remote_code)
    where = f"{role} {url}: tokenizer"
    server = Server(
        settings.asking(url, is_baseline=role == BASELINE), _retries_shown(role, options)
    )
    if settings.tokenizer is not None:
        folder = _chosen_tokenizer(where, settings.tokenizer)
        return ServedTokenizer(folder=folder, is_trusted=options.trust_remote_code)
    name = server.model.root or server.model.name
    shown = visible(clip(server.masked(name), 200))
    if (folder := Path(name)).is_dir() and _is_local(url):
        if _has_tokenizer(folder):
            return ServedTokenizer(folder=folder, is_trusted=False)
        got = f"no tokenizer in {shown}, which the model was started with"
        raise InputError(where, got=got, need=_TOKENIZER_NEEDED, fix=_GIVE_TOKENIZER)
    model = None if folder.is_absolute() else HubName.parse(name)
    if model is None:
        got = (
            f"{shown}, which the model was started with: no model of the hub, and no folder "
            f"of this machine"
        )
        raise InputError(
            where, got=got, need="a tokenizer, to make prompts with", fix=_GIVE_TOKENIZER
        )
    if not _is_local(url) and name != settings.asking(url, is_baseline=role == BASELINE).model:
        got = f"{shown}, a model of the hub that a server on another machine names"
        fix = (
            f"add --tokenizer {shown} if this is the model that you expect (evaluate: "
            f"{{tokenizer: {shown}}})"
        )
        raise InputError(where, got=got, need="your word before it is fetched", fix=fix)
    listing = list_files(model)
    return ServedTokenizer(folder=fetch(listing, side_files(listing.sizes)), is_trusted=False)


def _chosen_tokenizer(where: str, name: str) -> Path:
    """Return the folder of --tokenizer, fetched if it is a model of the hub."""
    folder = user_path(name)
    if folder.is_dir():
        if not _has_tokenizer(folder):
            got = f"no tokenizer in {folder}"
            raise InputError(where, got=got, need=_TOKENIZER_NEEDED, fix=_GIVE_TOKENIZER)
        return folder
    try:
        model = None if folder.is_absolute() else hub_name(name)
    except InputError:
        model = None
    if model is None:
        raise InputError(
            where, got=name, need="a tokenizer, to make prompts with", fix=_GIVE_TOKENIZER
        )
    listing = list_files(model)
    return fetch(listing, side_files(listing.sizes))


def _has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a file of a tokenizer."""
    try:
        return any(_TOKENIZER_FILE.fullmatch(entry.name) for entry in folder.iterdir())
    except OSError:
        return False


def _is_local(url: str) -> bool:
    """Return whether an address is one of this machine's, by its name or number."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def require_tasks(settings: Evaluate, options: EngineOptions) -> None:
    """Raise InputError, for all tasks at once, where one or the text cannot be used; nothing is
    kept.
    """
    if settings.text is not None:
        require_data(settings.text)
    with _tasks_alone(settings, options) as request:
        if settings.enable_thinking:
            require_generating(request.tasks)


def fetch_tasks(settings: Evaluate, options: EngineOptions) -> None:
    """Bring the tasks' documents into the cache before an engine starts; raises as
    `fetch_task_data`.
    """
    if not settings.tasks:
        return
    with _tasks_alone(settings, options) as request:
        fetch_task_data(
            request,
            log=request.checkpoint / "fetch.log",
            timeout=options.serve.timeout,
            vllm_python=options.vllm_python,
            on_progress=options.on_progress,
        )


@contextmanager
def _tasks_alone(settings: Evaluate, options: EngineOptions) -> Iterator[SessionRequest]:
    """A request with nothing but the tasks, whose files are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="vexport-tasks-") as name:
        folder, trust = Path(name), options.trust_remote_code
        asked = LmEvalSettings(enable_thinking=settings.enable_thinking)
        request = SessionRequest(checkpoint=folder, trust_remote_code=trust, lm_eval=asked)
        yield _with_tasks(request, settings, options, folder)


def require_served(role: str, result: SessionResult) -> None:
    """Raise where vLLM refused a model: the candidate's own fault, or an unusable baseline."""
    if result.failure is None:
        return
    kind = CheckpointFailed if role == CANDIDATE else InputError
    raise kind(
        f"{role} {result.checkpoint}",
        got=f"vLLM does not load it: {result.failure.message}",
        need="",
        fix="find the fault with `vexport check`, or export it again",
    )
