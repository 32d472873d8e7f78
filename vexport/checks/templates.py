"""Does the chat template parse, and does it render a conversation, in bounded time?"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.types import Finding, Json

NAME = "templates"
DESCRIPTION = "the chat template, where there is one, parses and renders conversations"
SETTINGS, FILE, OLDER_FILE = "tokenizer_config.json", "chat_template.jinja", "chat_template.json"
FOLDER, KEY = "additional_chat_templates", "chat_template"
# Not imported: jinja takes longer than all of a small check.
RENDER = Path(__file__).parent / "vllm" / "render.py"
# By the clock, on a busy machine; the process itself ends after two seconds of the processor.
SECONDS = 60.0
# What a longer text than this is, is no template.
LONGEST = 1 << 20
PLAIN = "user"
FIX = "copy the source's chat template"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on every template that vLLM can be asked for."""
    settings = _settings(view.index.root / SETTINGS)
    tokens = {key: str(_text(value)) for key, value in settings.items() if key.endswith("_token") and value}
    for place, template in _templates(view.index.root, settings):
        if not isinstance(template, str) or len(template) > LONGEST:
            got = (
                f"a text of {len(template)} characters" if isinstance(template, str) else repr(template)[:80]
            )
            yield error(NAME, place, expected="a template of jinja", got=got, fix=FIX)
        elif template:
            yield from _judged(place, _answer(template, tokens))


def _settings(path: Path) -> Mapping[str, Json]:
    """What stands in tokenizer_config.json; the family of the tokenizer says what is wrong with it."""
    try:
        return read_json_object(path) if path.is_file() else {}
    except InputError:
        return {}


def _text(token: Json) -> Json:
    return token.get("content") if isinstance(token, dict) else token


def _templates(root: Path, settings: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    """Every template with its place: a file comes before the key of the settings, which then is not read."""
    files = [root / FILE, *sorted((root / FOLDER).glob("*.jinja"))]
    for path in files:
        if path.is_file():
            yield str(path), path.read_text(encoding="utf-8", errors="replace")
    if not files[0].is_file():
        yield from _named(f"{root / SETTINGS}: {KEY}", settings.get(KEY))
        yield from _named(f"{root / OLDER_FILE}: {KEY}", _settings(root / OLDER_FILE).get(KEY))


def _named(place: str, value: Json) -> Iterator[tuple[str, Json]]:
    """One template, or a list of them with names."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        for each in value:
            if isinstance(each, dict):
                yield f"{place}.{each.get('name')}", each.get("template")
    elif value is not None:
        yield place, value


def _answer(template: str, tokens: Mapping[str, str]) -> Mapping[str, Json] | str:
    """What the process that renders says, or how it ended without an answer."""
    command = [sys.executable, "-I", str(RENDER)]
    request = json.dumps({"template": template, "tokens": dict(tokens)})
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end after {SECONDS:g} s"
    if done.returncode or not done.stdout:
        return "no end after 2 s of the processor, or more memory than a template may take"
    answer: Mapping[str, Json] = json.loads(done.stdout)
    return answer


def _judged(place: str, answer: Mapping[str, Json] | str) -> Iterator[Finding]:
    if isinstance(answer, str):
        yield error(NAME, place, expected="a template that renders in no time", got=answer, fix=FIX)
        return
    outcomes = answer.get("rendered")
    if not isinstance(outcomes, dict):
        yield error(NAME, place, expected="a template that parses", got=str(answer.get("syntax")), fix=FIX)
        return
    failed = {name: each for name, each in outcomes.items() if isinstance(each, dict) and each["error"]}
    plain = outcomes.get(PLAIN)
    if PLAIN in failed:
        got = str(failed[PLAIN]["error"])
        yield error(NAME, place, expected="a template that renders what a user asks", got=got, fix=FIX)
        return
    if isinstance(plain, dict) and not plain["has_user"]:
        got = "a prompt without the user's words"
        yield error(NAME, place, expected="a template that renders what a user asks", got=got, fix=FIX)
    broken = {name: str(each["error"]) for name, each in failed.items() if not each["refused"]}
    if broken:
        first, expected = (
            next(iter(broken)),
            "a template that renders every turn, or refuses it in its own words",
        )
        yield warning(NAME, place, expected=expected, got=f"{broken[first]} ({first})", fix=FIX)
