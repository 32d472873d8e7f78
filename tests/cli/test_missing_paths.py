"""A missing path or a file without text is reported within a second, before torch is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT, vexport
from tests.texts import assert_contains

TASK = ROOT / "scenarios" / "demo" / "tasks" / "addition.yaml"
RULES = "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\n"
# MODEL stands for a checkpoint, TASK for a task. Nothing is at `gone`.
COMMANDS = (
    "plan gone --scheme FP8_DYNAMIC",
    "plan gone",
    "plan source.yaml",
    "quantize gone out --scheme FP8_DYNAMIC",
    "quantize MODEL out --scheme W4A16 --calibration gone.jsonl",
    "quantize MODEL out --recipe gone.yaml",
    "check gone",
    "check gone --source MODEL",
    "check MODEL --source gone",
    "check MODEL --digests gone",
    "load gone",
    "load --dry gone",
    "eval gone --baseline MODEL --task TASK",
    "eval MODEL --baseline gone --task TASK",
    "eval MODEL --baseline MODEL --task gone.yaml",
    "eval MODEL --baseline MODEL --text gone.txt",
    "eval MODEL --against gone.json",
    "eval http://localhost:1/v1 --baseline gone --task TASK",
    "run gone.yaml",
    "run source.yaml",
    "run data.yaml",
    "run tasks.yaml",
    "compare gone --schemes FP8_DYNAMIC",
    "compare MODEL --schemes FP8_DYNAMIC --scenario gone.yaml",
    "compare gone --serve kv_cache_dtype=fp8 --serve {} --task TASK",
    "load gone gone2",
    "report gone",
    "verdict gone gone",
    "repair gone out",
    "repair MODEL out --source gone",
)
# Files and a folder that contain no text, with a part of the error.
WITHOUT_TEXT = {
    "binary.jsonl": "[calibration/text]",
    "binary.txt": "[calibration/text]",
    "empty.jsonl": "an empty file",
    "empty.txt": "an empty file",
    "numbers.json": "a number instead of a JSON object",
    "object.json": "the keys a, b",
    "pretty.json": "a JSON object that spans several lines",
    "program.jsonl": "invalid JSON, column 1",
    "folder": "a folder without data files",
}
READING = (
    "eval MODEL --baseline MODEL --text {}",
    "compare MODEL --serve {{}} --serve max_num_seqs=1 --text {}",
    "quantize MODEL out --scheme W4A16 --rounding gptq --calibration {}",
    "plan MODEL --scheme W4A16 --rounding gptq --calibration {}",
)
READING_FIRST = [READING[0].format(name) for name in WITHOUT_TEXT]
READING_TEXT = [
    *READING_FIRST,
    *(each.format("binary.txt") for each in READING[1:]),
    "run text.yaml",
]
# Runs the commands in one process. Each answer has the exit code, the errors, and whether torch is
# imported by then.
SCRIPT = """
import json, sys
from tests.command import vexport
from tests.texts import assert_contains
answers = []
for words in json.loads(sys.argv[1]):
    ran = vexport(*words)
    answers.append([ran.code, ran.errors, "torch" in sys.modules])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    folder = tmp_path_factory.mktemp("missing")
    (folder / "source.yaml").write_text(f"name: a\nsource: gone\n{RULES}")
    (folder / "data.yaml").write_text(
        f"name: a\nsource: {llama}\n{RULES}calibration: {{data: gone.jsonl}}\n"
    )
    (folder / "tasks.yaml").write_text(
        f"name: a\nsource: {llama}\n{RULES}evaluate: {{tasks: [gone.yaml]}}\n"
    )
    (folder / "text.yaml").write_text(
        f"name: a\nsource: {llama}\n{RULES}calibration: {{data: binary.txt}}\n"
    )
    contents = {
        "binary.jsonl": bytes(range(256)),
        "binary.txt": bytes(range(256)),
        "empty.jsonl": b"",
        "empty.txt": b"",
        "numbers.json": b"[1, 2]",
        "object.json": b'{"a": 1, "b": 2}',
        "pretty.json": b'{\n "a": 1,\n "b": 2\n}',
        "program.jsonl": b'import sys\n"a" "b"\nsys.exit(1)\n',
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    named = {"MODEL": str(llama), "TASK": str(TASK)}
    words = [
        [named.get(word, word) for word in command.split()]
        for command in (*COMMANDS, *READING_TEXT)
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(words)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip([*COMMANDS, *READING_TEXT], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_path(command: str, answers: dict[str, list[object]]) -> None:
    code, errors, has_torch = answers[command]
    assert code == 2
    assert isinstance(errors, list)
    assert errors
    assert all("gone" in error for error in errors)
    assert not has_torch


@pytest.mark.parametrize("command", READING_TEXT)
def test_file_without_text(command: str, answers: dict[str, list[object]]) -> None:
    code, errors, has_torch = answers[command]
    (name,) = [name for name in WITHOUT_TEXT if name in command] or ["binary.txt"]
    assert code == 2
    assert isinstance(errors, list)
    (error,) = errors
    assert name in error
    assert WITHOUT_TEXT[name] in error
    assert not has_torch


def test_each_missing_path_is_named(answers: dict[str, list[object]]) -> None:
    errors = answers["verdict gone gone"][1]
    assert isinstance(errors, list)
    assert len(errors) == 1, "the same path twice"


def test_unknown_user_fails_one_row(llama: Path) -> None:
    ran = vexport("check", "~nosuch/x", llama, "--static", "--format", "json")
    assert ran.code == 2
    assert [report["ok"] for report in json.loads(ran.stdout)] == [False, True]
    (line,) = ran.errors
    assert_contains(line, "~nosuch/x", "checkpoint/no-folder")
