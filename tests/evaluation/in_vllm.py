"""Starts vLLM once and runs lm-eval for each request file: `in_vllm OUTCOMES.json REQUEST.json...`."""

import json
import sys
from pathlib import Path

from vexport.engine.messages import SessionRequest
from vexport.errors import VexportError
from vexport.evaluation.lm_eval_runner import run_tasks
from vexport.files import from_json


def main(outcomes_file: str, *request_files: str) -> None:
    from vllm import LLM

    requests = [from_json(SessionRequest, Path(file)) for file in request_files]
    arguments: dict[str, str | int | float | bool] = {
        "model": str(requests[0].checkpoint),
        "max_model_len": 64,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    llm = LLM(**arguments)
    outcomes = []
    for request in requests:
        progress: list[tuple[str, int, int]] = []
        error = None
        try:
            run_tasks(arguments, llm, request, lambda *step, seen=progress: seen.append(step))
        except VexportError as problem:
            error = f"{type(problem).__name__}: {problem}"
        outcomes.append({"error": error, "progress": progress})
    Path(outcomes_file).write_text(json.dumps(outcomes))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
