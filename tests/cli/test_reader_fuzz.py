"""Damaged files of every kind are input errors.

They cause no traceback, no internal error, and no hang. The random seeds are fixed.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models import Good
from vexport.api.reading import history
from vexport.checkpoint.index import read_header, read_index
from vexport.cli.entry import cli, default_map
from vexport.config_files import load_toml
from vexport.errors import VexportError
from vexport.files import from_json
from vexport.inference.stored_responses import StoredResponses, answer_from_json
from vexport.inference.tasks import read_tasks
from vexport.judge.accepted_settings import accepted_settings
from vexport.judge.accepting import accept_results
from vexport.judge.verdict import decide
from vexport.outputs.digests import listed_digests, recorded_digests
from vexport.outputs.manifest import MANIFEST, recorded
from vexport.reports import render
from vexport.reports.run_record import Report
from vexport.scenario import read_scenario
from vexport.scenario.llmcompressor import read_recipe
from vexport.scores.readers.accepted import read_accepted

ROUNDS = 50
DEMO = Path(__file__).parents[2] / "scenarios"
REPORT = Path(__file__).parents[1] / "reports" / "report.json"
VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    float("nan"),
    10**400,
    "",
    "\ud800",
    [],
    {},
    [[]],
    {"": None},
    "re:[",
    "../x",
    "inf",
    "0-99999999999999999999",
    "@digits",
    "@levels",
    "@doubled",
)
# Contents that Python cannot write as JSON, by the text in their place.
RAW = {
    b'"@digits"': b"9" * 5000,
    b'"@levels"': b"[" * 5000 + b"]" * 5000,
    b'"@doubled"': b'{"a": 1, "a": 2}, "score": 0, "task": "b", "score": 1, "doc_id": 7',
}
# Lines that are no objects, or not complete.
LINES = (
    *(b"5\n", b"null\n", b"[1]\n", b'[["k", {}]]\n', b"\n", b"\0\n", b'{"a": '),
    *(b"[" * 5000 + b"\n", b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"\n"),
)
RECIPE = """
default_stage:
  default_modifiers:
    QuantizationModifier: {targets: [Linear], scheme: FP8_DYNAMIC, ignore: [lm_head, 're:.*mlp.*']}
    GPTQModifier:
      ignore: [lm_head]
      config_groups:
        group_0:
          targets: ['re:.*mlp.*']
          weights: {num_bits: 4, type: int, symmetric: true, strategy: group, group_size: 128}
"""
TOML = '[check]\ntp = [1, 2]\nstrict = true\n[plan]\nignore = ["re:x"]\nscheme = "W4A16"\n'
ROW = {
    "doc_id": 0,
    "doc": {"question": "1 + 1"},
    "target": "2",
    "arguments": [["1 + 1", {}]],
    "resps": [["2"]],
    "filtered_resps": ["2"],
    "filter": "none",
    "metrics": ["exact_match"],
    "doc_hash": "a",
    "prompt_hash": "b",
    "target_hash": "c",
    "exact_match": 1.0,
}
PLAIN = {
    **{"task": "sums", "id": 7, "score": 1, "seed": 0, "answer": "2", "finish_reason": "stop"},
    "higher_is_better": True,
}
REVIEW = {
    "index": 7,
    "messages": [{"role": "user", "content": "1 + 1"}],
    "target": ["2"],
    "sample_score": {
        **{"sample_id": None, "group_id": None, "generation_index": 0},
        "score": {
            **{"value": {"acc": 1.0}, "main_score_name": "acc", "status": "success"},
            **{"prediction": "2", "extracted_prediction": "2"},
        },
    },
}
ANSWERS = {"a prompt": {"text": "2", "finish_reason": "stop"}}
RESULTS = {
    "results": {"sums": {"alias": "sums", "exact_match,none": 1.0, "exact_match_stderr,none": 0.0}},
    "group_subtasks": {"sums": []},
    "configs": {"sums": {"task": "sums", "output_type": "generate_until", "metric_list": []}},
    "versions": {"sums": 1},
    "n-shot": {"sums": 0},
    "higher_is_better": {"sums": {"exact_match": True}},
    "n-samples": {"sums": {"original": 1, "effective": 1}},
    "config": {"model": "vllm", "model_args": {}, "limit": None},
}


def damaged(text: bytes, chance: random.Random) -> bytes:
    """Return the bytes with some parts changed, removed, repeated or cut off."""
    data = bytearray(text)
    for _ in range(chance.choice((1, 1, 3, 10))):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((1, 4, 40)))
        action = chance.randrange(5)
        if action == 0:
            data[start:end] = bytes(chance.randrange(256) for _ in range(end - start))
        elif action == 1:
            del data[start:end]
        elif action == 2:
            data[start:start] = data[start:end] * chance.choice((1, 50))
        elif action == 3:
            data[start:start] = chance.choice(
                (b"{", b"[", b"]", b'"', b":", b"\n", b"&a ", b"*a", b"!!int ", b"\0")
            )
        else:
            del data[start:]
    return bytes(data)


def places(
    value: object,
) -> Iterator[tuple[dict[object, object], object] | tuple[list[object], int]]:
    """Yield each container in a JSON value, with each of its keys."""
    if isinstance(value, dict):
        for key, inner in list(value.items()):
            yield value, key
            yield from places(inner)
    elif isinstance(value, list):
        for number, inner in enumerate(list(value)):
            yield value, number
            yield from places(inner)


def replaced(text: bytes, chance: random.Random) -> bytes:
    """Return JSON with one value removed, or replaced by a value of another type."""
    value = json.loads(text)
    container, key = chance.choice(list(places(value)))
    if chance.random() < 0.2:
        del container[key]  # type: ignore[arg-type]
    else:
        container[key] = chance.choice(VALUES)  # type: ignore[call-overload]
    text = json.dumps(value).encode("utf-8", "surrogatepass")
    for word, raw in RAW.items():
        text = text.replace(word, raw)
    return text


def replaced_line(text: bytes, chance: random.Random) -> bytes:
    """Return JSON lines with a value of one line replaced, or with a line that is no object."""
    lines = text.splitlines(keepends=True)
    at = chance.randrange(len(lines))
    odd = chance.choice(LINES) if chance.random() < 0.3 else replaced(lines[at], chance) + b"\n"
    return b"".join((*lines[:at], odd, *lines[at + 1 :]))


def problem_of(read: Callable[[], object]) -> VexportError | None:
    """Return the error of a reader for a file, or None if the file is read.

    Other exceptions pass through.
    """
    try:
        read()
    except VexportError as error:
        return error
    return None


def header_of(text: bytes) -> bytes:
    """Return the JSON of a safetensors header with its length in front."""
    return struct.pack("<Q", len(text)) + text


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, good: Good
) -> dict[str, tuple[Path, Callable[[], object]]]:
    """Return a sound file of each kind, and its reader."""
    root = tmp_path_factory.mktemp("fuzz")
    model = shutil.copytree(good("W8A8"), root / "model")
    names = [name for name in read_header(model / "model.safetensors")]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "header.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (root / "r.yaml").write_text(RECIPE)
    (root / "vexport.toml").write_text(TOML)
    shutil.copy(DEMO / "demo-nvfp4.yaml", root / "s.yaml")
    task = shutil.copytree(DEMO / "demo" / "tasks", root / "tasks") / "addition.yaml"
    shutil.copy(REPORT, root / "report.json")
    for side in ("old", "new"):
        (root / side).mkdir()
        (root / side / "results_2026-01-01T00-00-00.000000.json").write_text(json.dumps(RESULTS))
        (root / side / "samples_sums_2026-01-01T00-00-00.000000.jsonl").write_text(
            json.dumps(ROW) + "\n"
        )
    accepted = root / "accepted.json"
    accept_results(root / "old", accepted, {})
    (root / MANIFEST).write_text('"report.json"\n"a/b"\n')
    (root / "sums.txt").write_text(f"{'0' * 64}  model.safetensors\n")

    def judge() -> object:
        return decide(root / "old", root / "new", margin=0.02, alpha=0.05, gate={})

    def read_journal() -> object:
        responses = StoredResponses(root / "answers-1.jsonl")
        return [answer_from_json(answer) for answer in responses.values()]

    for name, row in (("plain", PLAIN), ("reviews", REVIEW)):
        rows = json.dumps(row) + "\n" + json.dumps(row | {"id": 8, "index": 8}) + "\n"
        for side in ("old", "new"):
            (root / name / side).mkdir(parents=True)
            (root / name / side / "sums.jsonl").write_text(rows)
    (root / "answers-1.jsonl").write_text(f"{json.dumps(ANSWERS)}\n{json.dumps(ANSWERS)}\n")

    def judge_harness(name: str) -> Callable[[], object]:
        sides = [root / name / side / "sums.jsonl" for side in ("old", "new")]
        return lambda: decide(*sides, margin=0.02, alpha=0.05, gate={})

    def judge_accepted() -> object:
        accepted_settings(read_accepted(accepted))
        history([accepted, REPORT])
        return decide(accepted, root / "old", margin=0.02, alpha=0.05, gate={})

    def options() -> object:
        load_toml(root / "vexport.toml")
        return default_map(cli)

    return {
        "index": (model / "model.safetensors.index.json", lambda: read_index(model)),
        "header": (root / "header.safetensors", lambda: read_header(root / "header.safetensors")),
        "recipe": (root / "r.yaml", lambda: read_recipe(root / "r.yaml")),
        "scenario": (root / "s.yaml", lambda: read_scenario(root / "s.yaml")),
        "vexport.json": (model / "vexport.json", lambda: read_scenario(model / "vexport.json")),
        "digests": (model / "vexport.json", lambda: recorded_digests(model)),
        "sums": (root / "sums.txt", lambda: listed_digests(root / "sums.txt")),
        "task": (task, lambda: read_tasks([str(task)]).write(root / "resolved")),
        "options": (root / "vexport.toml", options),
        "results": (root / "new" / "results_2026-01-01T00-00-00.000000.json", judge),
        "samples": (root / "new" / "samples_sums_2026-01-01T00-00-00.000000.jsonl", judge),
        "accepted": (accepted, lambda: read_accepted(accepted)),
        "judged baseline": (accepted, judge_accepted),
        "JSON lines": (root / "plain" / "new" / "sums.jsonl", judge_harness("plain")),
        "reviews": (root / "reviews" / "new" / "sums.jsonl", judge_harness("reviews")),
        "journal": (root / "answers-1.jsonl", read_journal),
        "manifest": (root / MANIFEST, lambda: recorded(root)),
        "report": (root / "report.json", lambda: from_json(Report, root / "report.json")),
    }


KINDS = (
    *(
        "index",
        "header",
        "recipe",
        "scenario",
        "vexport.json",
        "digests",
        "sums",
        "task",
        "options",
    ),
    *("results", "samples", "accepted", "manifest", "report"),
    *("judged baseline", "JSON lines", "reviews", "journal"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_input_errors(
    kind: str, files: dict[str, tuple[Path, Callable[[], object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = files[kind]
    monkeypatch.chdir(file.parent)
    assert problem_of(read) is None
    sound, chance = file.read_bytes(), random.Random(kind)
    is_json = file.suffix in (".json", ".jsonl")
    if kind == "header":
        (length,) = struct.unpack("<Q", sound[:8])
        data, sound_json = sound[8 + length :], sound[8 : 8 + length]
    try:
        for number in range(ROUNDS):
            if kind == "header":
                change = replaced if number % 2 else damaged
                text = header_of(change(sound_json, chance)) + data
            else:
                replace = replaced_line if file.suffix == ".jsonl" else replaced
                text = (replace if is_json and number % 2 else damaged)(sound, chance)
            file.write_bytes(text)
            problem = problem_of(read)
            assert problem is None or problem.exit_code in (1, 2, 3), (text[:2000], problem)
    finally:
        file.write_bytes(sound)


def test_tampered_reports_are_input_errors(tmp_path: Path) -> None:
    """A report is shown, or refused with the place of its error."""
    from tests.command import vexport

    sound, chance = REPORT.read_bytes(), random.Random(0)
    for _ in range(25):
        (tmp_path / "report.json").write_bytes(replaced(sound, chance))
        ran = vexport(
            "report", tmp_path, "--format", chance.choice(("html", "text", "markdown", "junit"))
        )
        assert ran.code in (0, 1, 2, 3), ran.stderr
        assert "internal error" not in ran.stderr
    assert render(from_json(Report, REPORT), "text")
