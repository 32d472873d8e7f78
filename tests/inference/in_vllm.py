"""Starts vLLM once and runs lm-eval for several requests: `in_vllm REQUESTS.json OUTCOMES.json`."""

import sys
from dataclasses import dataclass
from pathlib import Path

import datasets

from vexport.engine.messages import SessionRequest
from vexport.engine.worker import CPU, answer_request, build_engine, model_arguments
from vexport.errors import VexportError
from vexport.inference.lm_eval_runner import run_tasks
from vexport.inference.model import replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    requests: tuple[SessionRequest, ...]
    cache: Path
    """The folder of `datasets`, which is to stay empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """For each request its error, or nothing, and its progress."""

    errors: tuple[str, ...]
    progress: tuple[tuple[tuple[str, int, int], ...], ...]


def answer(asked: Asked) -> Outcomes:
    arguments = model_arguments(asked.requests[0], CPU)
    llm = build_engine(arguments, CPU)
    errors, progress = [], []
    with replaced(datasets.config, "HF_DATASETS_CACHE", asked.cache):
        for request in asked.requests:
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
    return answer_request(arguments, Asked, answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
