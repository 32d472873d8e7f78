"""A model that adds two numbers, with chosen errors. The real lm-eval evaluates it into folders."""

import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

from tests.scores.make import Runs
from vexport.engine.worker import exit_with_parent
from vexport.files import from_json, to_json, write_text
from vexport.inference.lm_eval_runner import cached_lm_eval_steps


class Adder(LM):  # type: ignore[misc]
    """Model that answers the last `a + b =` of a prompt.

    Its answer is off by one on the documents in `wrong`.
    """

    def __init__(self, wrong: Sequence[int]) -> None:
        super().__init__()
        self.wrong = frozenset(wrong)

    def _sum(self, request: Instance) -> str:
        """Return the sum that the model answers."""
        left, right = (int(number) for number in re.findall(r"\d+", request.args[0])[-2:])
        return str(left + right + (request.doc_id in self.wrong))

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [f" {self._sum(request)}".strip() for request in requests]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        answers = []
        for request in requests:
            option = request.args[1].strip()
            right = self._sum(request) == option
            fallback = request.doc_id in self.wrong and option == "none of them"
            answers.append((-1.0 if right or fallback else -50.0, right))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError


def main(arguments: list[str]) -> int:
    return evaluate(arguments, Adder)


def evaluate(arguments: list[str], make_model: Callable[[Sequence[int]], LM]) -> int:
    """Read the request, run lm-eval once for each of its folders, and return it as the result."""
    request_file, result_file = map(Path, arguments)
    exit_with_parent()
    request = from_json(Runs, request_file)
    tasks = request.tasks
    groups = [Path(task) for task in tasks if task.endswith(".group.yaml")]
    names = [
        Path(task).name.removesuffix(".group.yaml") if Path(task) in groups else task
        for task in tasks
    ]
    manager = TaskManager(
        include_path=[str(group.parent) for group in groups] or None, include_defaults=False
    )
    with tempfile.TemporaryDirectory() as cache, cached_lm_eval_steps():
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        for folder, wrong in request.wrong.items():
            tracker = EvaluationTracker(output_path=folder)
            results = simple_evaluate(
                model=make_model(wrong),
                tasks=names,
                model_args={"pretrained": "test/adder"},
                task_manager=manager,
                log_samples=True,
                bootstrap_iters=0,
                evaluation_tracker=tracker,
            )
            samples = results.pop("samples")
            tracker.save_results_aggregated(results=results, samples=samples)
            for name, rows in samples.items():
                tracker.save_results_samples(task_name=name, samples=rows)
    write_text(result_file, to_json(request))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
