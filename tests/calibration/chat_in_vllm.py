"""Render requests like vLLM's chat endpoint.

The call is `python -m tests.calibration.chat_in_vllm FOLDER < CASES`. A case is a template with
messages and tools. The result has the template's content format, the messages that vLLM passes to
the template, and the prompt or the error.
"""

import json
import sys
from types import SimpleNamespace

# transformers imports scikit-learn if it is installed, which takes 4 seconds. It is not used here.
sys.modules["sklearn"] = None  # type: ignore[assignment]

from transformers import PreTrainedTokenizerFast  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.renderers.chat_utils import parse_chat_messages  # noqa: E402
from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template  # noqa: E402


def answer(case: dict, tokenizer: object, config: object) -> dict:  # type: ignore[type-arg]
    """Return the result of one case."""
    template = case["template"]
    kind = _detect_content_format(template, default="string")
    if "messages" not in case:
        return {"format": kind}
    try:
        request = ChatCompletionRequest(
            model="m", messages=case["messages"], tools=case.get("tools")
        )
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
        messages, _, _ = parse_chat_messages(request.messages, config, kind)
        prompt = safe_apply_chat_template(
            config, tokenizer, messages, tools=tools, chat_template=template, tokenize=False
        )
    except Exception as error:
        return {"format": kind, "error": f"{type(error).__name__}: {error}"[:300]}
    return {"format": kind, "messages": messages, "prompt": prompt}


if __name__ == "__main__":
    folder = sys.argv[1]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    config = SimpleNamespace(
        multimodal_config=None,
        enable_prompt_embeds=False,
        hf_config=SimpleNamespace(model_type="llama"),
    )
    answers = [answer(case, tokenizer, config) for case in json.load(sys.stdin)]
    print(json.dumps(answers))
