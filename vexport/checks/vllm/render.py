"""Render a chat template in its own process: `python -I render.py`, a JSON request in, a JSON answer out.

A template is a program of whoever made the checkpoint: its memory and time are bounded, and jinja's sandbox
keeps it from everything but its arguments. Only jinja and the standard library are imported here.
The environment is transformers' (_compile_jinja_template in utils/chat_template_utils.py).
"""

import json
import resource
import sys
from typing import NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 29
# Of the processor, whatever else runs; real templates take milliseconds.
SECONDS = 2
USER = "hello from the user"


class Generation(Extension):
    """transformers' block around what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        """The block's content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def conversations(content: str, *, parts: bool) -> dict[str, list[dict[str, object]]]:
    """What is rendered, the plainest first; with `parts` each content is a list of parts, as for pictures."""

    def said(role: str, text: str, **more: object) -> dict[str, object]:
        return {"role": role, "content": [{"type": "text", "text": text}] if parts else text, **more}

    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    user, answer = said("user", content), said("assistant", "an answer")
    return {
        "user": [user],
        "user, assistant and user": [user, answer, user],
        "system and user": [said("system", "be brief"), user],
        "tool": [
            user,
            said("assistant", "", tool_calls=[call]),
            said("tool", "2", name="add", tool_call_id="call00000"),
        ],
    }


def main() -> None:
    """Answer with {"syntax": message} or {name of a conversation: {"error", "kind", "has_user"}}."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    request = json.load(sys.stdin)
    try:
        template = compiled(request["template"])
    except Exception as error:  # of jinja, or of Python, which compiles what jinja writes
        print(json.dumps({"syntax": words(error)}))
        return
    print(json.dumps({"rendered": rendered(template, request["tokens"])}))


def compiled(template: str) -> jinja2.Template:
    """As transformers compiles it, but for the time of day."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: "2026-01-01"
    return environment.from_string(template)


def to_json(
    x: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter, whose arguments templates name."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> NoReturn:
    """What a template calls for a conversation that its model was not trained on."""
    raise jinja2.TemplateError(message)


def rendered(template: jinja2.Template, tokens: dict[str, str]) -> dict[str, dict[str, object]]:
    """How each conversation fares; one that fails as text is tried as parts."""
    texts, parts = conversations(USER, parts=False), conversations(USER, parts=True)
    return {
        name: outcome
        if (outcome := render(template, texts[name], tokens))["has_user"]
        else max(outcome, render(template, parts[name], tokens), key=lambda each: bool(each["has_user"]))
        for name in texts
    }


def render(
    template: jinja2.Template, messages: list[dict[str, object]], tokens: dict[str, str]
) -> dict[str, object]:
    """One conversation: the error, whether the template raised it itself, and whether the user is heard."""
    try:
        text = template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **tokens
        )
    except Exception as error:  # whatever a template does wrong
        return {"error": words(error), "refused": type(error) is jinja2.TemplateError, "has_user": False}
    return {"error": "", "refused": False, "has_user": USER in text}


def words(error: Exception) -> str:
    """An error with its class and, of the syntax, its line."""
    line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"{type(error).__name__}: {str(error)[:200]}{line}"


if __name__ == "__main__":
    main()
