"""`python -m vexport.inference.endpoint.worker REQUEST RESULT`: run prompts on a server's model.

lm-eval's class for vLLM makes the prompts, so the token ids are the same as for an engine.
lm-eval's classes for APIs are not used: they truncate prompts, omit the BOS token, and end
responses by other rules.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sized
from dataclasses import replace

import transformers
from pydantic import JsonValue

from vexport.calibration.data import load_tokenizer
from vexport.engine.messages import SERVER, SessionRequest, SessionResult
from vexport.engine.worker import input_problem, progress_reporter, run_worker
from vexport.errors import VexportError
from vexport.files import to_json
from vexport.inference.drafts import count_drafts
from vexport.inference.endpoint.model import EndpointModel
from vexport.inference.endpoint.server import Server
from vexport.inference.fingerprint import (
    ENDPOINT,
    MODEL,
    TEMPLATE,
    Fingerprint,
    template_of,
    write_fingerprint,
)
from vexport.inference.lm_eval_runner import (
    ask_tasks,
    patched_vllm_version,
    require_accepted_questions,
)
from vexport.inference.model import override_attribute
from vexport.inference.stored_responses import open_stored_responses
from vexport.inference.text_scores import write_text_scores
from vexport.records import PROGRESS_DETAIL, OnProgress
from vexport.version import __version__

# Allowance for padding. Models may have more embedding rows than the tokenizer has tokens, to make
# the number of rows a multiple of 64, 128 or more.
_MIN_PADDING = 8192


def _session(request: SessionRequest) -> SessionResult:
    assert request.endpoint is not None
    result = SessionResult(checkpoint=request.checkpoint, platform=SERVER)
    on_progress = progress_reporter()
    try:
        server = Server(request.endpoint, _show_retries(on_progress))
        model = _open_model(server, request, on_progress)
        if request.text:
            assert request.text_file is not None
            write_text_scores(
                model,
                request.text,
                request.text_file,
                request.logprobs_file,
                repeats=request.repeat,
            )
        else:
            result = replace(result, files=_ask_tasks(model, request))
        assert request.output is not None
        write_fingerprint(request.output, _fingerprint(server, request))
        if request.drafted:
            result = replace(result, drafts=count_drafts(model, request.drafted))
    except VexportError as error:
        return replace(result, problem=input_problem(error))
    return replace(result, text_file=request.text_file, logprobs_file=request.logprobs_file)


def _show_retries(on_progress: OnProgress) -> Callable[[str], None]:
    return lambda line: on_progress(f"server{PROGRESS_DETAIL}{line}", 0, 1)


def _fingerprint(server: Server, request: SessionRequest) -> Fingerprint:
    return {
        MODEL: server.mask_key(f"{server.model.name} ({server.model.root})"),
        ENDPOINT: server.endpoint.url,
        "vexport": __version__,
        "vllm": server.mask_key(server.model.version) or "unknown",
        TEMPLATE: template_of(request.checkpoint),
    }


def _open_model(server: Server, request: SessionRequest, on_progress: OnProgress) -> EndpointModel:
    assert request.output is not None
    kept = open_stored_responses(request.output, to_json(_fingerprint(server, request)))
    return EndpointModel(server, kept, on_progress, _largest_vocabulary(request))


def _ask_tasks(model: EndpointModel, request: SessionRequest) -> Mapping[str, str]:
    assert request.output is not None
    arguments: dict[str, JsonValue] = {
        "pretrained": str(request.checkpoint),
        "base_url": model.server.endpoint.url,
        "max_model_len": request.max_model_len,
        "seed": request.seed,
        "trust_remote_code": request.trust_tokenizer,
    }
    with patched_vllm_version():
        from lm_eval.models import vllm_causallms
    with (
        override_attribute(vllm_causallms, "SamplingParams", dict),
        override_attribute(transformers.AutoConfig, "from_pretrained", _read_config_if_any),
    ):
        if request.accepted:
            require_accepted_questions(model, arguments, request)
        return ask_tasks(model, arguments, request)


_read_config = transformers.AutoConfig.from_pretrained


def _read_config_if_any(*names: object, **options: object) -> object:
    """Return the config of a folder, or an empty config if the folder has only a tokenizer."""
    try:
        return _read_config(*names, **options)
    except (OSError, ValueError):
        return transformers.PretrainedConfig()


def _largest_vocabulary(request: SessionRequest) -> int:
    """Return an upper bound of the model's vocabulary: the tokenizer's size plus padding."""
    tokenizer = load_tokenizer(request.checkpoint, trust_remote_code=request.trust_tokenizer)
    assert isinstance(tokenizer, Sized)
    known = len(tokenizer)
    return known + max(_MIN_PADDING, known // 4)


if __name__ == "__main__":
    code = run_worker(sys.argv[1:], SessionRequest, _session)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for a server that does not respond
