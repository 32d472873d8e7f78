"""`python -m vexport.evaluation.task_data_worker REQUEST.json RESULT.json`: fetches what tasks read.

It builds the tasks once; imports lm-eval and datasets, but no vLLM.
"""

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from vexport.engine.messages import FoundProblems, InputProblem, SessionRequest
from vexport.engine.worker import answer_request, input_problem, reporter
from vexport.errors import EnvironmentFault, VexportError
from vexport.evaluation.lm_eval_environment import nltk_problem, task_settings, tasks_as_data
from vexport.evaluation.lm_eval_runner import load_tasks, task_manager
from vexport.evaluation.task_data import STAGE, explained_downloads
from vexport.records import OnProgress


def main(arguments: list[str]) -> int:
    """Read the request, fetch, write the result; 0 whenever there is a result to read."""
    return answer_request(arguments, SessionRequest, _problems_of)


def _problems_of(request: SessionRequest) -> FoundProblems:
    """Why the data of tasks cannot be had, each data set once."""
    problems: dict[InputProblem, None] = {}
    try:
        for error in fetch(request, reporter()):
            problems[input_problem(error)] = None
    except VexportError as error:
        problems[input_problem(error)] = None
    return FoundProblems(problems=tuple(problems))


def fetch(request: SessionRequest, report: OnProgress) -> Iterator[VexportError]:
    """Build every task once, which downloads its documents; yield why those of a task cannot be had."""
    if importlib.util.find_spec("lm_eval") is None:
        fix = "install it there with `pip install lm-eval`"
        raise EnvironmentFault(sys.executable, got="lm-eval is missing", need="", fix=fix)
    report(STAGE, 0, len(request.tasks))
    manager, folders = task_manager(request), request.include_paths
    for number, task in enumerate(request.tasks):
        before = set(sys.modules)
        try:
            with ExitStack() as stack:
                stack.enter_context(explained_downloads(report, number, len(request.tasks), folders))
                if not request.trust_remote_code:
                    stack.enter_context(tasks_as_data())
                load_tasks(request, manager, [task])
        except VexportError as error:
            yield error
            yield from _data_problem(task_settings(task, manager), report, folders)
        yield from nltk_problem(task, before)
    report(STAGE, len(request.tasks), len(request.tasks))


def _data_problem(
    settings: Mapping[str, object], report: OnProgress, folders: Sequence[Path]
) -> Iterator[VexportError]:
    """Return why the documents of a task that cannot be loaded cannot be had either, if so: all is said at
    once.
    """
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.config.task import TaskConfig

    if not isinstance(settings.get("dataset_path"), str):
        return
    task = ConfigurableTask.__new__(ConfigurableTask)
    task._config = TaskConfig(task="documents")
    task.DATASET_PATH, task.DATASET_NAME = settings["dataset_path"], settings.get("dataset_name")
    kwargs = settings.get("dataset_kwargs")
    try:
        with explained_downloads(report, 0, 1, folders):
            task.download(dict(kwargs) if isinstance(kwargs, Mapping) else None)
    except VexportError as error:
        yield error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
