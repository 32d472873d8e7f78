"""`python -m vexport.evaluation.worker REQUEST RESULT`: the worker of the engine, with tasks of lm-eval."""

import sys

from vexport.engine import worker
from vexport.evaluation.lm_eval_runner import run_tasks


def main(arguments: list[str]) -> int:
    """As the engine's worker."""
    return worker.main(arguments, run_tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
