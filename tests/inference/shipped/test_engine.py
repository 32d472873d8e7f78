"""`vexport eval --task tool-calls` in vLLM's engine, with vLLM's own parsers."""

import json
from pathlib import Path

import pytest

from tests.command import vexport
from tests.inference.shipped.chained import TEMPLATE, TOOL, make_model
from tests.texts import assert_contains
from vexport.inference.stored_responses import Call, FinishedText
from vexport.rules import tools as rules

GIVEN = ("--task", "tool-calls-10,tool-calls-40", "--quiet", "--gen-kwargs", "max_gen_toks=16")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three models and a file of tools."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "sound", breaks=False)
    make_model(folder / "broken", breaks=True)
    without_tools = TEMPLATE.replace("tools or []", "[]")
    make_model(folder / "no-tools", breaks=False, template=without_tools)
    (folder / "tools.json").write_text(json.dumps([TOOL]))
    return folder


@pytest.mark.vllm
def test_calls_that_break_above_40_tools_fail(models: Path, tmp_path: Path) -> None:
    given = ("--baseline", models / "sound", "--tools", models / "tools.json", "--limit", 200)
    options = ("--tool-call-parser", "hermes", "--output-dir", tmp_path / "run", "--no-attribution")
    ran = vexport("eval", models / "broken", *given, *GIVEN, *options, "--format", "json")
    assert ran.code == 1, ran.stderr
    verdict = json.loads(ran.stdout)
    below, above = verdict["tasks"]
    assert (below["outcome"], below["baseline"]["value"]) == ("PASS", 1)
    assert (above["outcome"], above["candidate"]["value"]) == ("FAIL", 0)
    assert above["faults"] == {"malformed": 200}
    assert "with 40 tools, 200 of 200 calls are malformed" in verdict["reason"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("model", "options", "parts"),
    [
        ("sound", "--tool-call-parser hermse", ["(did you mean hermes?)", rules.UNKNOWN_PARSER.id]),
        ("sound", "--tool-call-parser llama3_json", ["<|python_tag|>", rules.UNFIT_PARSER.id]),
        ("sound", "", ["no parser of tool calls", rules.NO_PARSER.id]),
        ("no-tools", "--tool-call-parser hermes", ["leaves tools out", rules.NO_TEMPLATE.id]),
    ],
)
def test_unusable_parsers_and_templates_are_refused(
    model: str, options: str, parts: list[str], models: Path, tmp_path: Path
) -> None:
    folders = ("--baseline", models / model, "--output-dir", tmp_path / "run")
    ran = vexport("eval", models / model, *folders, *GIVEN, *options.split())
    assert ran.code == 2, ran.stderr
    assert_contains(ran.stderr, *parts)
    assert not list(tmp_path.rglob("results_*.json"))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("hermes", '<tool_call> {"name": "ping", "arguments": {}} </tool_call>', ["ping({})"]),
        ("hermes", '<tool_call> {"name": "ping", "argum', []),
        ("hermes", "I cannot call tools.", []),
        ("pythonic", "[ping(a=1)]", ['ping({"a": 1})']),
    ],
)
def test_parsers_of_vllm_find_calls(parser: str, text: str, calls: list[str], models: Path) -> None:
    from transformers import AutoTokenizer

    from vexport.inference.shipped.tool_calls.parser import with_parsed_calls

    tokenizer = AutoTokenizer.from_pretrained(models / "sound")
    found = with_parsed_calls(FinishedText(text, "stop"), parser, tokenizer, [dict(TOOL)])
    assert [str(Call(*call)) for call in found.calls] == calls
    assert str(found) == ("\n".join(calls) or text)
