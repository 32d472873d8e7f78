"""The sides of a comparison that are served elsewhere: asked over their API, or answered already."""

from pathlib import Path

from vexport.checkpoint.hub import fetch, list_files, side_files
from vexport.checkpoint.source import hub_name
from vexport.engine.load import Prompts
from vexport.engine.messages import SessionRequest, SessionResult
from vexport.engine.session import Worker, session_error
from vexport.errors import InputError
from vexport.evaluation.endpoint import Server
from vexport.evaluation.results import read_repeated, require_deterministic
from vexport.records import named
from vexport.records.values import MOST_COUNT
from vexport.run.options import EngineOptions
from vexport.run.serving import (
    BASELINE,
    EVALUATION_LENGTH,
    LOGPROBS,
    TEXT_FILE,
    Questions,
    Served,
    beginnings,
    read_rows,
    with_tasks,
)
from vexport.scenario import Evaluate

WORKER = "vexport.evaluation.endpoint_worker"


def is_results(name: str) -> bool:
    """Return whether the name of a model is lm-eval's results: a file, or a folder with one."""
    path = Path(name).expanduser()
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.rglob("results_*.json"))
    return path.is_file() and path.name.startswith("results_")


def tokenizer_of(role: str, url: str, settings: Evaluate, here: Path | None = None) -> Path:
    """The folder of the tokenizer for a server's prompts: as given, else `here`, else the server's own.

    InputError where there is none to be had; raises as `Server` where the server does not answer.
    """
    if here is not None and settings.tokenizer is None:
        return here
    server = Server(settings.asking(url, is_baseline=role == BASELINE))
    name = settings.tokenizer or server.model.root or server.model.name
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        model = None if folder.is_absolute() else hub_name(name)
    except InputError:
        model = None
    if model is None:
        got = f"no folder {name} here, which the model was started with" if not settings.tokenizer else name
        fix = "give --tokenizer, a folder or ORG/NAME (evaluate: {tokenizer: ...} in a scenario)"
        raise InputError(f"{role} {url}: tokenizer", got=got, need="one, to make prompts with", fix=fix)
    listing = list_files(model)
    return fetch(listing, side_files(listing.sizes))


def ask_endpoint(
    role: str, url: str, tokenizer: Path, folder: Path, options: EngineOptions, questions: Questions
) -> Served:
    """Ask the model behind an address; lm-eval's files, scores of a text and the log go to `folder`.

    A share of the questions is asked twice: what is behind an address may change. Raises EnvironmentFault
    where the server fails for good or is not deterministic, InputError for unusable tasks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings, trust = questions.evaluate, options.trust_remote_code
    endpoint = settings.asking(url, is_baseline=role == BASELINE)
    served = Server(endpoint).model.max_model_len or EVALUATION_LENGTH
    longest = min(served, options.serve.max_model_len or EVALUATION_LENGTH)
    rows = read_rows(settings, tokenizer, longest, MOST_COUNT, trust_remote_code=trust)
    request = SessionRequest(
        checkpoint=tokenizer,
        endpoint=endpoint,
        lm_eval=questions.lm_eval,
        max_model_len=longest,
        repeat=True,
        trust_remote_code=trust,
        output=folder,
        text=rows,
        text_file=folder / TEXT_FILE if rows else None,
        logprobs_file=folder / LOGPROBS if rows else None,
        drafted=beginnings(rows) if settings.speculative else (),
    )
    result = Worker(
        module=WORKER,
        request=with_tasks(request, settings, options, folder) if settings.tasks else request,
        kind=SessionResult,
        where=f"{role} {url}",
        log=folder / "lm-eval.log",
        timeout=options.serve.timeout,
        vllm_python=options.vllm_python,
    ).run(named(role, options.on_progress))
    if result.problem is not None:
        raise session_error(result.problem)
    if (repeated := read_repeated(folder)) is not None:
        require_deterministic(folder, repeated, settings.alpha)
    prompts = Prompts(natural=True, texts=(), tokens=beginnings(rows))
    return Served(result=result, prompts=prompts, rows=rows)
