"""Conversations become the same prompts as in vLLM's chat endpoint."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.calibration.templates import ALL
from vexport.calibration.conversations import (
    RowError,
    content_format,
    render_conversation,
    served_messages,
)
from vexport.calibration.rows import read_row

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scenarios" / "demo" / "model"
USER = {"role": "user", "content": "what is 1 + 2 ?"}
ANSWER = {"role": "assistant", "content": "3"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}
DEVELOPER_TOOL = {"function": {"name": "add", "parameters": {"type": "object"}}, "type": "function"}
TOOLS_OF_ROW = [
    {
        "type": "function",
        "function": {"name": "add", "description": "sum", "parameters": {"type": "object"}},
    },
    {"function": {"strict": True, "name": "now", "returns": "a time"}, "owner": "us"},
]


def call(arguments: object, **others: object) -> dict[str, object]:
    function = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        **others,
    }


# Requests that vLLM's endpoint accepts, by their special feature.
REQUESTS: Mapping[str, Sequence[Mapping[str, object]]] = {
    "plain": [USER, ANSWER],
    "arguments as text": [USER, call('{"a": 1, "b": [2]}', content=""), RESULT, ANSWER],
    "content null": [USER, call('{"a": 1}', content=None), RESULT, ANSWER],
    "no content": [USER, call('{"a": 1}'), RESULT, ANSWER],
    "arguments broken": [USER, call('{"a": 1', content=None), RESULT],
    "arguments no object": [USER, call("[1]", content=None), RESULT],
    "arguments empty": [USER, call("", content=None), RESULT],
    "no calls": [USER, {**ANSWER, "tool_calls": []}],
    "calls of a user": [{**USER, "tool_calls": call("{}")["tool_calls"]}, ANSWER],
    "system": [{"role": "system", "content": "be brief"}, USER, ANSWER],
    "system parts": [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        USER,
        ANSWER,
    ],
    "billing": [{"role": "system", "content": "x-anthropic-billing-header: cch=1\nbe brief"}, USER],
    "only billing": [{"role": "system", "content": "x-anthropic-billing-header: cch=1"}, USER],
    "developer": [
        {"role": "developer", "content": "be brief", "tools": [DEVELOPER_TOOL]},
        USER,
        ANSWER,
    ],
    "late developer": [USER, ANSWER, {"role": "developer", "content": "be brief"}, USER],
    "system and developer": [
        {
            "role": "system",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        },
        {"role": "developer", "content": "three"},
        USER,
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ANSWER,
    ],
    "kinds of parts": [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "a"},
                {"type": "text", "text": "b", "cache_control": {}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "output_text", "text": "c"},
                {"type": "refusal", "refusal": "no"},
            ],
        },
    ],
    "result parts": [
        USER,
        call("{}"),
        {**RESULT, "content": [{"type": "text", "text": "3"}, {"type": "text", "text": "4"}]},
    ],
    "empty result": [USER, call("{}"), {**RESULT, "content": []}],
    "names": [{**USER, "name": "ann"}, {**ANSWER, "name": "bob"}],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "1 and 2"}],
    "reasoning of a user": [{**USER, "reasoning_content": "1 and 2"}, ANSWER],
    "two reasonings": [USER, {**ANSWER, "reasoning": "this", "reasoning_content": "that"}],
    "other keys": [{**USER, "weight": 1}, {**ANSWER, "loss": 0.5}],
    "function": [USER, {"role": "function", "name": "add", "content": "3"}],
    "own role": [USER, {"role": "critic", "content": "wrong"}],
}
FORMATS = (
    *ALL.values(),
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for c in m.content | list %}{{ c }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% "
    "endfor %}",
    "{% for m in messages %}{% for c in m.get('content') %}{{ c }}{% endfor %}{% endfor %}",
    "{% set rest = messages %}{% for m in rest %}{% for c in m['content'] %}{% endfor %}{% "
    "endfor %}",
    "{% set ns.rest = messages %}{% for m in messages %}{% for c in m['content'] %}{% endfor "
    "%}{% endfor %}",
    "{% for i, m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
    "{% macro f(x) %}{% for c in x %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ f(x=m.content) }}{% endfor %}",
    "{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ f(1) }}",
    "{% for c in content %}{% endfor %}",
    "{% if %}",
    "",
)


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return PreTrainedTokenizerFast.from_pretrained(DEMO)


@pytest.mark.vllm
def test_prompts_equal_vllms(tokenizer: object) -> None:
    """Compare messages, prompts and the templates' content formats with vLLM's code."""
    shipped = ROOT.glob(
        ".venv/lib/python3*/site-packages/vllm/transformers_utils/chat_templates/*.jinja"
    )
    templates = (*FORMATS, *(file.read_text(encoding="utf-8") for file in shipped))
    pairs = [(messages, template) for messages in REQUESTS.values() for template in ALL.values()]
    cases: list[dict[str, object]] = [{"template": template} for template in templates]
    cases += [
        {"template": template, "messages": list(messages), "tools": TOOLS_OF_ROW}
        for messages, template in pairs
    ]
    module = [sys.executable, "-m", "tests.calibration.chat_in_vllm", str(DEMO)]
    ran = subprocess.run(
        module, input=json.dumps(cases), capture_output=True, text=True, cwd=ROOT, check=True
    )
    answers = json.loads(ran.stdout.splitlines()[-1])
    for template, answer in zip(templates, answers, strict=False):
        assert content_format(template) == answer["format"], template
    for (messages, template), answer in zip(pairs, answers[len(templates) :], strict=True):
        conversation = read_row(
            {"messages": list(messages), "tools": TOOLS_OF_ROW}, None
        ).conversation
        assert conversation is not None
        if any(message["role"] == "function" for message in messages):
            continue  # the former name of the role tool, which is read as tool
        if "error" in answer:
            assert "VLLMValidationError" in answer["error"]
            with pytest.raises(RowError) as caught:
                render_conversation(tokenizer, template, conversation)  # type: ignore[arg-type]
            assert caught.value.rule.id == "calibration/turns"
            continue
        if not any(
            message["role"] == "developer" for message in messages
        ):  # vLLM changes these messages while it renders
            assert served_messages(conversation.messages, template) == answer["messages"]
        assert render_conversation(tokenizer, template, conversation) == answer["prompt"]  # type: ignore[arg-type]
