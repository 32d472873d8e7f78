"""`python -m vexport.evaluation.worker REQUEST RESULT`: the worker of the engine, with tasks of lm-eval."""

import sys

from vexport.engine.worker import main
from vexport.evaluation.lm_eval_runner import run_tasks

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], run_tasks))
