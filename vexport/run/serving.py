"""One engine start for a model and everything that is asked of it there; for `load` one after the other."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vexport.calibration.data import read_samples
from vexport.checkpoint.index import folder_digest, read_index, require_checkpoint
from vexport.checkpoint.source import require_data, resolve_drafter, resolve_source
from vexport.engine.arguments import require_arguments, require_heads, require_layers
from vexport.engine.generate import NONE, answer_environment
from vexport.engine.load import (
    CONTINUED,
    Prompts,
    fixed_prompts,
    load_report,
    load_request,
    shortest_length,
)
from vexport.engine.messages import (
    ANSWERS,
    DRAFT_TOKENS,
    KL_TOKENS,
    SessionRequest,
    SessionResult,
    speculative_config,
)
from vexport.engine.session import WORKER, EngineFault, log_folder, require_vllm, run_session
from vexport.errors import CheckpointFailed, InputError, VexportError
from vexport.errors.extras import unforeseen
from vexport.evaluation.drift import Scored
from vexport.evaluation.fingerprint import engine_fingerprint, write_fingerprint
from vexport.evaluation.held_out import ReadText, Rows
from vexport.evaluation.results import read_repeated, require_deterministic
from vexport.evaluation.task_data import fetch_task_data
from vexport.evaluation.tasks import resolve_tasks
from vexport.files import digest_bytes, to_json
from vexport.outputs.replaceable import NamedPath
from vexport.quantize.text import vocab_size
from vexport.records import (
    ENGINE_CHECK,
    CalibrationData,
    EngineMode,
    Finding,
    LmEvalSettings,
    LoadReport,
    OnProgress,
    named,
    silent,
)
from vexport.run.options import NO_EVALUATION, EngineOptions
from vexport.scenario import Evaluate, Serve

# The default context length of an evaluation; longer prompts are an error and never truncated.
EVALUATION_LENGTH = 4096
TASKS_WORKER = "vexport.evaluation.lm_eval_runner"
LOGPROBS = "logprobs.safetensors"
BASELINE = "baseline"
CANDIDATE = "candidate"
PLAIN = LmEvalSettings()
# The log-probability of each token of the text.
TEXT_FILE = "text.safetensors"
# Tokens drafted at once, unless an argument of vLLM says otherwise.
DRAFT_LENGTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A finished session with the prompts that it answered, and the rows of text that it read."""

    result: SessionResult
    prompts: Prompts
    rows: Rows = ()

    @property
    def scored(self) -> Scored | None:
        """The session's log-probabilities, where it has them."""
        file = self.result.logprobs_file
        if file is None:
            return None
        checkpoint, is_partial = self.result.checkpoint, self.result.engine is None
        return Scored(checkpoint=checkpoint, prompts=self.prompts, logprobs_file=file, is_partial=is_partial)

    @property
    def read_text(self) -> ReadText | None:
        """The costs of the text's tokens for the session's model, where it read one."""
        scored, file = self.scored, self.result.text_file
        if not scored or not file:
            return None
        return ReadText(scored=scored, rows=self.rows, file=file, drafts=self.result.drafts)

    def report(self, baseline: "Served | None" = None, on_progress: OnProgress = silent) -> LoadReport:
        """Judge the session; builds the reference model in this process."""
        against = baseline.result if baseline else None
        return load_report(self.result, self.prompts, baseline=against, on_progress=on_progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The questions to a model besides the fixed prompts.

    `texts` are prompts to continue; `evaluate` has the tasks of lm-eval, `lm_eval` how they are asked. With
    `repeat` a part of them is asked again, and an engine that is not deterministic is an error.
    """

    texts: Sequence[str] = ()
    evaluate: Evaluate = NO_EVALUATION
    lm_eval: LmEvalSettings = PLAIN
    repeat: bool = False


PROMPTS_ALONE = Questions()


def serve_model(
    role: str, checkpoint: Path, folder: Path, options: EngineOptions, questions: Questions = PROMPTS_ALONE
) -> Served:
    """Start vLLM once: prompts, log-probabilities, and the tasks of lm-eval or the text, if there are any.

    lm-eval's files, the log and the log-probabilities go to `folder`. Raises EnvironmentFault as
    `run_session` and for an engine that is not deterministic, InputError for unusable tasks; a checkpoint
    that vLLM refuses is a result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = questions.evaluate
    prompts = fixed_prompts(checkpoint, texts=questions.texts, count=settings.kl_prompts or CONTINUED)
    trust, longest = options.trust_remote_code, options.serve.max_model_len
    rows = read_rows(
        settings, checkpoint, longest, vocab_size(read_index(checkpoint)), trust_remote_code=trust
    )
    if rows:
        prompts = replace(prompts, tokens=beginnings(rows))
    speculative = resolve_drafter(settings.speculative or "", options.on_progress)
    request = _request(role, checkpoint, folder, options, questions, prompts)
    request = with_text(request, rows, folder, speculative)
    result = run_session(
        request,
        worker=TASKS_WORKER if request.tasks else WORKER,
        log=folder / "vllm.log",
        timeout=options.serve.timeout,
        vllm_python=options.vllm_python,
        on_progress=named(role, options.on_progress),
    )
    if request.tasks and result.engine is not None:
        write_fingerprint(folder, engine_fingerprint(checkpoint, result.engine))
        if (repeated := read_repeated(folder)) is not None:
            require_deterministic(folder, repeated, settings.alpha)
    return Served(result=result, prompts=prompts, rows=rows)


def read_rows(
    settings: Evaluate, checkpoint: Path, longest: int | None, vocabulary: int, *, trust_remote_code: bool
) -> Rows:
    """The rows of the text as the checkpoint's tokens; none where tasks decide.

    They are as long as asked, or as the sequences that the engine (`longest`) or the model allows; what is
    left of the text after the last whole row is not read, unless it is all there is.
    """
    if settings.text is None:
        return ()
    needed = settings.text_tokens + 1  # vLLM generates a token after each
    tokens = min(needed, longest or shortest_length(checkpoint, needed)) - 1
    data = CalibrationData(name=settings.text, samples=settings.text_rows, seq_len=tokens, pack=True)
    read = read_samples(
        data, checkpoint, vocab_size=vocabulary, trust_remote_code=trust_remote_code
    ).token_ids
    return tuple(row for row in read if len(row) == tokens) or tuple(row for row in read if len(row) > 1)


def with_text(request: SessionRequest, rows: Rows, folder: Path, speculative: str = "") -> SessionRequest:
    """The request that reads the rows too, whose scores go to `folder`, and with a method drafts on."""
    if not rows:
        return request
    length = max(request.max_model_len or 0, *(len(row) + 1 for row in rows))
    request = replace(request, text=rows, text_file=folder / TEXT_FILE, max_model_len=length)
    if not speculative:
        return request
    drafting = {"speculative_config": speculative_config(speculative, DRAFT_LENGTH), **request.arguments}
    length = max(length, shortest_length(request.checkpoint, KL_TOKENS + DRAFT_TOKENS))
    return replace(request, drafted=beginnings(rows), arguments=drafting, max_model_len=length)


def beginnings(rows: Rows) -> Rows:
    """The tokens of rows whose whole vocabulary is compared, and which drafts continue."""
    return tuple(row[:KL_TOKENS] for row in rows)


def clear_session(folder: Path) -> None:
    """Remove what an unfinished session left in its folder, but for the engine's answers."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif not entry.name.startswith(ANSWERS):
            entry.unlink()


def remove_answers(folder: Path) -> None:
    """Remove lm-eval's cache, once its results are kept."""
    for file in folder.glob(f"{ANSWERS}*"):
        file.unlink()


def _request(
    role: str, checkpoint: Path, folder: Path, options: EngineOptions, questions: Questions, prompts: Prompts
) -> SessionRequest:
    """The session that asks a model everything; its identity is that of the model and its engine's start.

    Nothing of the tasks is in it: an answer is found by its prompt and its sampling parameters.
    """
    request = load_request(checkpoint, prompts, logprobs_file=folder / LOGPROBS)
    settings, longest = questions.evaluate, options.serve.max_model_len
    if settings.tasks:
        longest = longest or shortest_length(checkpoint, EVALUATION_LENGTH)
    request = replace(
        request,
        enforce_eager=options.serve.enforce_eager,
        trust_remote_code=options.trust_remote_code,
        max_model_len=longest or request.max_model_len,
        arguments=options.serve.arguments(is_baseline=role == BASELINE),
    )
    if not settings.tasks:
        return request
    request = replace(request, seed=settings.seed)
    started = replace(request, canaries=(), logprob_prompts=(), logprobs_file=None)
    parts = [to_json(started), folder_digest(checkpoint)]
    if (chosen := answer_environment()) != NONE:
        parts.append(chosen)
    identity = digest_bytes("\n".join(parts).encode())
    request = replace(request, identity=identity, lm_eval=questions.lm_eval, repeat=questions.repeat)
    return with_tasks(request, settings, options, folder)


def with_tasks(
    request: SessionRequest, settings: Evaluate, options: EngineOptions, folder: Path
) -> SessionRequest:
    """The request with lm-eval's tasks, whose files go to `folder`."""
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


def task_files(settings: Evaluate, label: str) -> list[NamedPath]:
    """The tasks and texts that are files and the folders of tasks, under the label of what gave them."""
    named = (*settings.tasks, *((settings.text,) if settings.text else ()))
    files = [path for task in named if (path := Path(task).expanduser()).exists()]
    return [NamedPath(label=label, path=path) for path in (*files, *settings.include_path)]


def require_tasks(settings: Evaluate, options: EngineOptions) -> None:
    """InputError, for all tasks at once, where one cannot be used, or the text; nothing is kept."""
    if settings.text is not None:
        require_data(settings.text)
    with _tasks_alone(settings, options):
        pass


def fetch_tasks(settings: Evaluate, options: EngineOptions) -> None:
    """Bring the tasks' documents into the cache before an engine starts; raises as `fetch_task_data`."""
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
        request = SessionRequest(checkpoint=folder, trust_remote_code=trust)
        yield with_tasks(request, settings, options, folder)


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


def load_checkpoints(
    names: Sequence[str],
    pythons: Sequence[Path | None],
    serves: Sequence[Serve],
    modes: Sequence[EngineMode],
    options: EngineOptions,
) -> list[LoadReport]:
    """A report for each checkpoint, interpreter, engine setting and mode, in that order.

    None is our own interpreter; the settings differ in their tensor parallel size. Before the first engine
    starts, raises InputError where a checkpoint cannot be read, its heads cannot be cut or a vLLM does not
    know an argument, EnvironmentFault where an interpreter has no vLLM or there are too few GPUs. What stops
    an engine later is in its report.
    """
    for name in names:
        if Path(name).is_dir():  # before vLLM is asked, which takes longer
            require_servable(Path(name), serves)
    for python in pythons:
        require_vllm(python)
        require_arguments(serves, python)
    roots = {name: resolve_source(name, options.on_progress) for name in names}
    for root in roots.values():
        require_servable(root, serves)
    return [
        _load(name, roots[name], mode, replace(options, vllm_python=python, serve=serve))
        for name in names
        for python in pythons
        for serve in serves
        for mode in modes
    ]


def require_servable(root: Path, serves: Sequence[Serve]) -> None:
    """InputError where a folder is no checkpoint that vLLM could serve with these settings."""
    require_checkpoint(root)
    require_layers(root)
    for serve in serves:
        require_heads(root, serve.ranks)


def _load(name: str, root: Path, mode: EngineMode, options: EngineOptions) -> LoadReport:
    """Load and judge one checkpoint. The log of a session that died is kept, and named."""
    serve = options.serve.model_copy(update={"enforce_eager": mode == "eager"})
    try:
        with log_folder("vexport-load-") as folder:
            report = serve_model(f"load {root.name}", root, folder, replace(options, serve=serve)).report()
    except EngineFault as fault:
        report = _died(fault, fault.failure.log_tail)
    except (VexportError, OSError):
        raise
    except Exception as error:
        report = _died(unforeseen(error, f"the load of {name}"), "")
    python = str(options.vllm_python or "")
    return replace(report, checkpoint=name, mode=mode, tp=serve.ranks, vllm_python=python)


def _died(fault: VexportError, log_tail: str) -> LoadReport:
    finding = Finding.of(fault, check=ENGINE_CHECK, severity="error")
    return LoadReport(checkpoint="", ok=False, findings=(finding,), log_tail=log_tail)
