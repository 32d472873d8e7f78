"""`python -m vexport.inference.engine_worker REQUEST.json RESULT.json`: run an engine of vLLM.

Runs in any environment with vLLM (`--vllm-python`). Only tasks need lm-eval.
"""

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Never

from vexport.engine import worker
from vexport.engine.messages import SessionRequest, SessionResult
from vexport.inference.tasks import pictured_task
from vexport.records import OnProgress
from vexport.scenario.serve import EngineArguments

if TYPE_CHECKING:
    from vllm import LLM


def ask_engine(
    arguments: EngineArguments,
    llm: "LLM",
    request: SessionRequest,
    result: SessionResult,
    on_progress: OnProgress,
) -> SessionResult:
    """Run the request on an engine built with `arguments`. Return `result` with the responses."""
    from vexport.inference.drafts import count_drafts
    from vexport.inference.engine_model import EngineModel, run_canaries, write_logprobs
    from vexport.inference.stored_responses import StoredResponses
    from vexport.inference.text_scores import write_text_scores

    model = EngineModel(llm, StoredResponses(None), on_progress)
    if request.canaries:
        start = time.perf_counter()
        canaries = run_canaries(llm, request, on_progress)
        seconds = time.perf_counter() - start
        assert result.engine is not None
        engine = replace(result.engine, canary_seconds=seconds)
        result = replace(result, engine=engine, canaries=canaries)
    if request.logprob_prompts and request.logprobs_file is not None:
        write_logprobs(llm, request.logprob_prompts, request.logprobs_file, on_progress)
        result = replace(result, logprobs_file=request.logprobs_file)
    if request.text and request.text_file is not None:
        write_text_scores(model, request.text, request.text_file, repeats=request.repeat)
        result = replace(result, text_file=request.text_file)
    if request.drafted:
        result = replace(result, drafts=count_drafts(model, request.drafted))
    if request.tasks:
        from vexport.inference.lm_eval_runner import run_tasks

        files = run_tasks(arguments, llm, request, on_progress)
        result = replace(result, files=files)
    return result


def check_request(arguments: EngineArguments, request: SessionRequest) -> None:
    """Raise InputError if the questions differ from those of an accepted baseline.

    Also raise InputError if vLLM does not have the requested parser of tool calls, or if a task has
    pictures and the model takes none.
    """
    if task := pictured_task(request.tasks):
        from vllm.engine.arg_utils import EngineArgs

        from vexport.inference.engine_model import require_pictures

        require_pictures(EngineArgs(**arguments).create_model_config(), task)
    if request.lm_eval.tool_call_parser is not None:
        from vexport.inference.shipped.tool_calls.parser import require_parser

        require_parser(request.lm_eval.tool_call_parser)
    if not request.accepted:
        return
    from vexport.inference.lm_eval_runner import constructor_arguments, require_accepted_questions
    from vexport.inference.silent_model import SilentModel

    require_accepted_questions(SilentModel(arguments), constructor_arguments(arguments), request)


def main(arguments: list[str]) -> Never:
    """Read the request, start the engine, run the request, and write the result."""
    worker.main(arguments, ask_engine, check_request)


if __name__ == "__main__":
    main(sys.argv[1:])
