"""`python -m vexport.evaluation.worker REQUEST RESULT`: the worker of the engine, with tasks of lm-eval."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from vexport.engine import worker
from vexport.evaluation.lm_eval_environment import vllm_distribution
from vexport.evaluation.lm_eval_runner import run_tasks


def preload() -> None:
    """Import what every evaluation imports, for a process that forks them."""
    worker.preload()
    from lm_eval import simple_evaluate  # noqa: F401

    with TemporaryDirectory() as folder, vllm_distribution(Path(folder)):
        from lm_eval.models.vllm_causallms import VLLM  # noqa: F401


def main(arguments: list[str]) -> int:
    """As the engine's worker."""
    return worker.main(arguments, run_tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
