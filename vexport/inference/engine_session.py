"""Start vLLM on one model in a worker process, and run all prompts in one engine start."""

import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

from vexport.engine.messages import SessionRequest, SessionResult
from vexport.engine.process import explain
from vexport.engine.session import EAGER, EngineFault, Worker, session_error
from vexport.errors import InputError
from vexport.records import OnProgress
from vexport.rules import engine as rules

LOG = logging.getLogger(__name__)
WORKER = "vexport.inference.engine_worker"
_QUANTIZING = ("quantization", "quantization_config")
"""Arguments of vLLM that quantize a model while it is loaded."""
# Matches vLLM's messages if such an argument applies to layers that are already quantized. Few
# methods can quantize them again: see resolve_quant_method in
# vllm/model_executor/layers/quantization/base_config.py.
_REQUANTIZES = re.compile(
    r"dequantize_weight|dequantization is only supported|re-?quantiz", re.IGNORECASE
)


def run_session(
    request: SessionRequest,
    *,
    log: Path,
    timeout: float,
    vllm_python: Path | None = None,
    on_progress: OnProgress,
) -> SessionResult:
    """Start vLLM on `request.checkpoint` and run the whole request.

    The worker's output goes to `log`. `vllm_python` is another interpreter with vLLM. If vLLM
    refuses the checkpoint, the result has a `failure` of kind "refused". When this function returns
    or raises, all processes of the session have ended.

    Raises:
        EngineFault: any other failure: vLLM is missing, has no kernel for this platform, crashed,
            ran out of memory, or took more than `timeout` seconds.
        InputError: a task cannot be used, or an argument would quantize layers that are already
            quantized.
    """
    where = f"vLLM on {request.checkpoint}"
    python = vllm_python or sys.executable
    LOG.debug("%s by %s: %s, log %s", where, python, dict(request.arguments), log)
    is_eager = request.arguments.get("enforce_eager", request.enforce_eager)
    result = Worker(
        module=WORKER,
        request=request,
        kind=SessionResult,
        where=where,
        log=log,
        timeout=timeout,
        vllm_python=vllm_python,
        # Without these variables, vLLM compiles parts of its sampler even in eager mode. That takes
        # 4 s at the first prompt and needs a compiler.
        environment=EAGER if is_eager else {},
    ).run(on_progress)
    return _accept(result, request, where, log)


def _accept(result: SessionResult, request: SessionRequest, where: str, log: Path) -> SessionResult:
    """Return the result of a session that succeeded, or in which vLLM refused the checkpoint.

    After a refusal, the result contains the failure. Raise an error if the session failed for any
    other reason.
    """
    if result.problem is not None:
        raise session_error(result.problem)
    if result.failure is None:
        return result
    failure = explain(result.failure, log, platform=result.platform)
    if failure.kind != "refused":
        raise EngineFault(where, failure, log)
    quantizing = [f"--engine-arg {name}" for name in _QUANTIZING if name in request.arguments]
    if quantizing and _REQUANTIZES.search(failure.message):
        where = ", ".join(quantizing)
        raise InputError.of(rules.QUANTIZED_LAYERS, where, reason=failure.message)
    given = [
        f"{name} {json.dumps(value)}"
        for name, value in request.arguments.items()
        if name != "enforce_eager"
    ]
    # The arguments may be the cause of the refusal.
    cause = f" (served with {', '.join(given)})" if given else ""
    return replace(result, failure=replace(failure, message=failure.message + cause))
