"""A worker that starts vLLM once and runs lm-eval for several requests.

It is called as `in_vllm REQUESTS.json OUTCOMES.json`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import datasets

from vexport.engine.messages import SessionRequest
from vexport.engine.worker import CPU, build_engine, model_arguments, run_worker
from vexport.errors import VexportError
from vexport.inference.lm_eval_runner import run_tasks
from vexport.inference.model import override_attribute


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Requests to lm-eval."""

    requests: tuple[SessionRequest, ...]
    cache: Path
    """Cache folder of `datasets`. It must stay empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Error (or an empty string) and progress of each request."""

    errors: tuple[str, ...]
    progress: tuple[tuple[tuple[str, int, int], ...], ...]


def answer(requests: Requests) -> Outcomes:
    arguments = model_arguments(requests.requests[0], CPU)
    llm = build_engine(arguments, CPU)
    errors, progress = [], []
    with override_attribute(datasets.config, "HF_DATASETS_CACHE", requests.cache):
        for request in requests.requests:
            steps: list[tuple[str, int, int]] = []
            error = ""
            try:
                run_tasks(arguments, llm, request, lambda *step, steps=steps: steps.append(step))
            except VexportError as problem:
                error = f"{type(problem).__name__}: {problem}"
            errors.append(error)
            progress.append(tuple(steps))
    llm.llm_engine.engine_core.shutdown()
    return Outcomes(errors=tuple(errors), progress=tuple(progress))


def main(arguments: list[str]) -> int:
    return run_worker(arguments, Requests, answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
