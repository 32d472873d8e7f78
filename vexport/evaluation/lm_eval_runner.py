"""`python -m vexport.evaluation.lm_eval_runner REQUEST RESULT`: the engine's worker with tasks of lm-eval."""

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from pydantic import JsonValue

from vexport.engine import worker
from vexport.engine.messages import ANSWERS, SessionRequest
from vexport.errors import EnvironmentFault, InputError, VexportError
from vexport.evaluation.fingerprint import UNTEMPLATED
from vexport.evaluation.lm_eval_environment import (
    allow_code,
    computed_once,
    dataset_cache,
    engine_words,
    metrics_required,
    missing,
    require_allowed,
    tasks_as_data,
    vllm_distribution,
)
from vexport.evaluation.lm_eval_model import AskedModel, EngineModel, KeptAnswers, ModelArguments, wrap_engine
from vexport.evaluation.results import Repeated, compare_rows, documents_to_repeat, write_repeated
from vexport.evaluation.samples import SEED
from vexport.evaluation.task_data import explained_downloads
from vexport.evaluation.tasks import GROUP_SUFFIX
from vexport.files import atomic_path
from vexport.records import OnProgress

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.vllm_causallms import VLLM
    from lm_eval.result_schema import EvalResults
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.manager import TaskDict
    from vllm import LLM

_CONSTRUCTOR_KEYS = ("dtype", "trust_remote_code", "max_model_len", "seed")
_ANSWER_KEYS = ("max_gen_toks", "think_end_token", "enable_thinking")
"""Arguments of lm-eval's vLLM model that are the person's to set; recorded where they are."""


def run_tasks(model_args: ModelArguments, llm: "LLM", request: SessionRequest, progress: OnProgress) -> None:
    """Evaluate `request.tasks` on an engine, as `ask_tasks`; `model_args` are those it was built with."""
    arguments = {key: model_args[key] for key in _CONSTRUCTOR_KEYS if key in model_args}
    arguments["pretrained"] = model_args["model"]
    kept, size = KeptAnswers(None), request.lm_eval.batch_size
    if request.identity is not None and request.output is not None:
        kept = kept_answers(request.output, f"{request.identity} {engine_words()}")
    asked = EngineModel(llm, kept, progress, size if isinstance(size, int) else None)
    ask_tasks(asked, arguments, request)


def ask_tasks(asked: AskedModel, arguments: dict[str, JsonValue], request: SessionRequest) -> None:
    """Evaluate `request.tasks` and write lm-eval's result and sample files into `request.output`.

    `arguments` are those of lm-eval's model. InputError names the task where it cannot be loaded or its
    prompts do not fit.
    """
    from lm_eval.utils import setup_logging

    assert request.output is not None, "a request with tasks has an output folder"
    setup_logging()  # else what lm-eval says is not in the log, its warnings apart
    with ExitStack() as stack:
        stack.enter_context(
            explained_downloads(lambda *_: None, 0, len(request.tasks), request.include_paths)
        )
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vexport-eval-")))
        stack.enter_context(vllm_distribution(scratch / "packages"))
        stack.enter_context(dataset_cache(scratch / "datasets", request))
        if not request.trust_remote_code:
            stack.enter_context(tasks_as_data())
        stack.enter_context(computed_once())
        settings = request.lm_eval
        given = {key: value for key in _ANSWER_KEYS if (value := getattr(settings, key)) is not None}
        arguments = {**arguments, **given}
        model = wrap_engine(asked, arguments, settings)
        _evaluate(model, asked, arguments, request, scratch / "output")
        _move_files(scratch / "output", request.output)


def kept_answers(output: Path, identity: str) -> KeptAnswers:
    """The answers of a model, and of what computes them; those of another are removed."""
    file = output / f"{ANSWERS}{hashlib.sha256(identity.encode()).hexdigest()[:16]}.jsonl"
    for other in output.glob(f"{ANSWERS}*"):
        if other != file:
            other.unlink()
    return KeptAnswers(file)


def _evaluate(
    model: "VLLM", asked: AskedModel, arguments: ModelArguments, request: SessionRequest, output: Path
) -> None:
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=str(output))
    manager = task_manager(request)
    run = partial(_simple_evaluate, model, dict(arguments), manager, tracker, request)
    tasks = load_tasks(request, manager, request.tasks)
    if any(task.OUTPUT_TYPE != "generate_until" for task in each_task(tasks)):
        asked.require_scores()
    plain = list(map(_without_template, plain_tasks(tasks))) if request.lm_eval.plain_as_is else []
    try:
        results = run(tasks, request.limit)
        _ask_further_seeds(run, results, request)
        if request.repeat:
            assert request.output is not None
            asked.ask_again()
            write_repeated(request.output, _repeat(run, results, request))
    except jinja2.TemplateError as error:
        fix = "fix doc_to_text, doc_to_target or doc_to_choice of the task"
        need = "a template that its documents can fill"
        raise InputError(f"tasks {', '.join(request.tasks)}", got=str(error), need=need, fix=fix) from error
    if plain:
        results["config"][UNTEMPLATED] = plain
    _save(tracker, results, output)


def plain_tasks(loaded: "list[Task | Group]") -> "Iterator[Task]":
    """The tasks that score how likely a text is as it stands; chats are no such text."""
    scored = ("loglikelihood", "loglikelihood_rolling")
    return (task for task in each_task(loaded) if task.OUTPUT_TYPE in scored)


def each_task(loaded: "list[Task | Group]") -> "Iterator[Task]":
    """The tasks, those of groups too."""
    for entry in loaded:
        yield from entry.get_all_tasks() if hasattr(entry, "get_all_tasks") else [entry]


def _without_template(task: "Task") -> str:
    """Let a task be asked without a chat template; its name."""
    build = task.build_all_requests

    def build_plain(**options: object) -> None:
        plain = {"apply_chat_template": False, "fewshot_as_multiturn": False, "chat_template": None}
        build(**{**options, **plain})

    task.build_all_requests = build_plain
    return str(task.task_name)


def _simple_evaluate(
    model: "VLLM",
    arguments: dict[str, JsonValue],
    manager: "TaskManager",
    tracker: "EvaluationTracker",
    request: SessionRequest,
    tasks: "list[Task | Group]",
    limit: float | None,
    seed: int = 0,
) -> "EvalResults":
    from lm_eval import simple_evaluate

    settings = request.lm_eval
    sampling = {"seed": request.seed + seed, "do_sample": True} if settings.seeds > 1 else {}
    return simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=settings.num_fewshot,
        batch_size=settings.batch_size,
        system_instruction=settings.system_instruction,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.fewshot_as_multiturn,
        gen_kwargs={**sampling, **settings.gen_kwargs} or None,
        limit=limit,
        log_samples=True,
        bootstrap_iters=0,
        evaluation_tracker=tracker,
        confirm_run_unsafe_code=request.trust_remote_code,
        random_seed=request.seed,
        numpy_random_seed=request.seed,
        torch_random_seed=request.seed,
        fewshot_random_seed=request.seed,
    )


def _ask_further_seeds(
    run: "Callable[[list[Task | Group], float | None, int], EvalResults]",
    results: "EvalResults",
    request: SessionRequest,
) -> None:
    """Add the answers of generating tasks with further seeds to the samples of the first.

    lm-eval's own scores stay those of the first seed.
    """
    for seed in range(1, request.lm_eval.seeds):
        tasks = load_tasks(request, task_manager(request), request.tasks)
        generating = {task.task_name for task in each_task(tasks) if task.OUTPUT_TYPE == "generate_until"}
        if request.lm_eval.plain_as_is:
            list(map(_without_template, plain_tasks(tasks)))
        samples = run(tasks, request.limit, seed)["samples"] if generating else {}
        for name in generating & samples.keys():
            results["samples"][name] += [{**row, SEED: seed} for row in samples[name]]


def _repeat(
    run: "Callable[[list[Task | Group], float | None], EvalResults]",
    results: "EvalResults",
    request: SessionRequest,
) -> Repeated:
    """Ask a part of the documents again and count the answers that changed.

    Tasks that are loaded again begin at the same seed: the first documents get the same few-shot examples.
    """
    tasks = load_tasks(request, task_manager(request), request.tasks)
    if request.lm_eval.plain_as_is:
        list(map(_without_template, plain_tasks(tasks)))
    again = run(tasks, documents_to_repeat(len(results["samples"]), request.limit))
    return compare_rows(results["samples"], again["samples"])


def _save(tracker: "EvaluationTracker", results: "EvalResults", output: Path) -> None:
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(task_name=name, samples=rows)
    written = sum(1 for _ in output.rglob("*.json*"))
    if written != 1 + len(samples):
        got = f"lm-eval wrote {written} of {1 + len(samples)} files (it logs a failed write and goes on)"
        raise EnvironmentFault(str(output), got=got, need="", fix="look for a full disk in the log")


def task_manager(request: SessionRequest) -> "TaskManager":
    """lm-eval's index of tasks; its own 14000 files are read only where a task has no separate file."""
    from lm_eval.tasks import TaskManager

    return TaskManager(
        include_path=[str(path) for path in (*request.include_paths, *_group_folders(request))],
        include_defaults=not _only_files(request),
    )


def _group_folders(request: SessionRequest) -> list[Path]:
    return [Path(task).parent for task in request.tasks if task.endswith(GROUP_SUFFIX)]


def load_tasks(request: SessionRequest, manager: "TaskManager", names: Sequence[str]) -> list["Task | Group"]:
    """The tasks, and the outermost groups, which lm-eval then aggregates."""
    tasks: list[Task | Group] = []
    allow_code(trust=request.trust_remote_code)
    for task in names:
        require_allowed(task, manager, trust=request.trust_remote_code)
        try:
            name = Path(task).name.removesuffix(GROUP_SUFFIX) if task.endswith(GROUP_SUFFIX) else task
            with metrics_required(Path(name).stem):
                tasks += outermost(manager.load([name]))
        except VexportError:
            raise
        except Exception as error:
            if (fault := missing(error, task)) is not None:
                raise fault from error
            need, fix = "a task that lm-eval can load", "correct the task"
            got = f"{type(error).__name__}: {error}"
            raise InputError(f"task {task}", got=got, need=need, fix=fix) from error
    return tasks


def outermost(loaded: "TaskDict") -> list["Task | Group"]:
    inner = {child for children in loaded["group_map"].values() for child in children}
    outer = [group for name, group in loaded["groups"].items() if name not in inner]
    grouped = {task.task_name for group in outer for task in group.get_all_tasks()}
    return [*outer, *(task for name, task in loaded["tasks"].items() if name not in grouped)]


def _only_files(request: SessionRequest) -> bool:
    return all(Path(task).is_file() for task in request.tasks)


def _move_files(source: Path, target: Path) -> None:
    """Move lm-eval's files out of its folder for the model, the results last: they say that all is there."""
    files = sorted(source.rglob("*.json*"), key=lambda file: (file.suffix == ".json", file.name))
    for file in files:
        with atomic_path(target / file.name) as temporary:
            shutil.copyfile(file, temporary)


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], run_tasks))
