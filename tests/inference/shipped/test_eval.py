"""`vexport eval --task tool-calls` against servers, and refusals before a model is asked."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.command import ROOT, Ran, vexport
from tests.inference.calling import CallingServer, broken_from, call
from tests.inference.replying import replying
from tests.texts import assert_contains
from vexport.rules import tools as rules

DEMO = ROOT / "scenarios" / "demo" / "model"
TASKS = "tool-calls-10,tool-calls-40"
OWN = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "description": "Paint a wall.",
            "parameters": {
                "type": "object",
                "properties": {"color": {"enum": ["red", "blue"]}, "wall": {"type": "integer"}},
                "required": ["color", "wall"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """Addresses of servers: one is right, two break from 40 tools on, one never calls."""

    def cut(tools: int, number: int, name: str, arguments: str) -> dict[str, object]:
        is_cut = tools >= 40 and number % 3 == 0
        return call(name, arguments[:-2] if is_cut else arguments, "length" if is_cut else "stop")

    def silent(tools: int, number: int, name: str, arguments: str) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": f"{name}?"}, "finish_reason": "stop"}

    faults = {"right": CallingServer(), "broken": CallingServer(broken_from(40, 3))}
    faults |= {"cut": CallingServer(cut), "silent": CallingServer(silent)}
    with ExitStack() as stack:
        yield {name: stack.enter_context(replying(each.reply)) for name, each in faults.items()}


def evaluated(candidate: str, baseline: str, folder: Path, *options: object) -> Ran:
    given = ["--baseline", baseline, "--tokenizer", DEMO, "--output-dir", folder, "--quiet"]
    return vexport("eval", candidate, *given, *options, "--format", "json")


def test_calls_that_break_above_40_tools_fail(servers: dict[str, str], tmp_path: Path) -> None:
    ran = evaluated(
        servers["broken"], servers["right"], tmp_path / "run", "--task", TASKS, "--limit", 150
    )
    assert ran.code == 1, ran.stderr
    verdict = json.loads(ran.stdout)[0] if ran.stdout.startswith("[") else json.loads(ran.stdout)
    below, above = verdict["tasks"]
    assert [below["task"], above["task"]] == TASKS.split(",")
    assert [below["outcome"], above["outcome"]] == ["PASS", "FAIL"]
    count = above["changes"]["right_to_wrong"]
    assert above["faults"] == {"malformed": count}
    assert below["faults"] == {}
    assert f"with 40 tools, {count} of 150 calls are malformed that were right" in verdict["reason"]
    shown = {other["metric"]: other["candidate"] for other in above["also"]}
    assert shown["right_tool"] == shown["complete"] == 1
    assert shown["well_formed"] == shown["equal_arguments"] == pytest.approx(1 - count / 150)


def test_few_calls_and_cut_calls_are_inconclusive(servers: dict[str, str], tmp_path: Path) -> None:
    few = ("--task", TASKS, "--limit", 15)
    ran = evaluated(servers["right"], servers["right"], tmp_path / "few", *few)
    assert ran.code == 3, ran.stderr
    assert all(task["needed"]["documents"] > 15 for task in json.loads(ran.stdout)["tasks"])
    cut = ("--task", "tool-calls-40", "--margin", "0.5", "--limit", 60)
    ran = evaluated(servers["cut"], servers["right"], tmp_path / "cut", *cut)
    counts = json.loads(ran.stdout)["tasks"][0]["answers"]["candidate"]
    assert counts["cut"] == counts["lost"] > 0


def test_baseline_without_calls_is_inconclusive(servers: dict[str, str], tmp_path: Path) -> None:
    options = ("--task", "tool-calls-1", "--limit", 20)
    ran = evaluated(servers["silent"], servers["silent"], tmp_path / "run", *options)
    assert ran.code == 3
    assert_contains(ran.stdout, "the baseline scores 0%")


def test_own_tools_and_accepted_baseline(servers: dict[str, str], tmp_path: Path) -> None:
    file, accepted = tmp_path / "own.json", tmp_path / "accepted.json"
    file.write_text(json.dumps(OWN))
    common = ("--tokenizer", DEMO, "--quiet")
    given = ("--task", "tool-calls-40", "--tools", file, "--limit", 30, "--accept", accepted)
    ran = vexport("eval", servers["right"], *given, *common, "--output-dir", tmp_path / "first")
    assert ran.code == 0, ran.stderr
    samples = next((tmp_path / "first").rglob("samples_tool-calls-40_*.jsonl"))
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert {json.loads(row["doc"]["call"])["name"] for row in rows} == {"paint"}
    later = ("--against", accepted, *common)
    ran = vexport("eval", servers["broken"], *later, "--output-dir", tmp_path / "second")
    assert ran.code == 1, ran.stderr
    assert "malformed" in ran.stdout
    file.write_text(json.dumps(OWN).replace("wall", "fence"))
    ran = vexport("eval", servers["right"], *later, "--output-dir", tmp_path / "third")
    assert ran.code == 2
    assert "questions changed" in ran.stderr


def test_server_without_tools_is_refused(tmp_path: Path) -> None:
    server = CallingServer()

    def reply(path: str, body: dict[str, object]) -> object:
        if path.endswith("/chat/completions"):
            from tests.inference.replying import Sent

            words = '"auto" tool choice requires --enable-auto-tool-choice'
            return Sent(content={"error": {"message": words}}, status=400)
        return server.reply(path, body)

    with replying(reply) as url:  # type: ignore[arg-type]
        ran = evaluated(url, url, tmp_path / "run", "--task", "tool-calls-1", "--limit", 2)
    assert ran.code == 2
    assert_contains(ran.stderr, "--enable-auto-tool-choice", rules.REFUSED.id)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--task tool-calls --tools bad.json", ["[0].function.parameters.properties.a.type"]),
        ("--task tool-calls --tools missing.json", ["missing.json"]),
        ("--task gsm8k --tools own.json", ["need the task tool-calls"]),
        ("--task gsm8k --tool-call-parser hermes", ["need the task tool-calls"]),
        (
            "--task tool-calls --no-apply-chat-template",
            ["--apply-chat-template", "lists the tools"],
        ),
        ("--task tool-calls-7", ["tool-calls-7"]),
        ("--task tool-calls,tool-calls-40", ["a second task tool-calls-40"]),
        ("--task tool-calls --margin tool-call=0.1", ["tool-calls-1"]),
        ("--task gsm8k --include-path folder", ["the name tool-calls", "mine.yaml"]),
        ("--task folder/mine.yaml", ["the name tool-calls"]),
        ("--task tool-calls", ["no parser of tool calls", "--tool-call-parser hermes"]),
    ],
)
def test_mistakes_are_refused_before_a_model_is_asked(
    options: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    schema = {"type": "object", "properties": {"a": {"type": "strin"}}}
    bad = [{"type": "function", "function": {"name": "a", "parameters": schema}}]
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    (tmp_path / "own.json").write_text(json.dumps(OWN))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "data.jsonl").write_text('{"q": "a", "a": "b"}\n')
    (tmp_path / "folder" / "mine.yaml").write_text(
        "task: tool-calls\ndataset_path: json\ndataset_kwargs: {data_files: {test: data.jsonl}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: q\ndoc_to_target: a\n"
    )
    ran = vexport("eval", DEMO, "--baseline", DEMO, *options.split())
    assert ran.code == 2, ran.stderr
    assert_contains(ran.stderr, *parts)
