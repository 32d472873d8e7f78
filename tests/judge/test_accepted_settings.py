"""Settings of an accepted baseline are defaults of later calls.

Contradicting options are refused.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import JsonValue

from tests.command import vexport
from tests.texts import assert_contains, breaks
from vexport.errors import InputError
from vexport.judge.accepted_settings import settings_to_store, with_accepted_settings
from vexport.rules import baseline as rules
from vexport.scenario import Evaluate, Serve
from vexport.scores.readers.accepted import read_accepted

LINE = "0-3"
TASK = {
    "metric": "exact_match",
    "filter": "none",
    "higher_is_better": True,
    "documents": 4,
    "score": 0.75,
    "scores": {LINE: "1101"},
    "questions": {LINE: "abcdefghijkl"},
    "endings": {},
}
YAML = "task: sums\noutput_type: generate_until\n"


def baseline(
    folder: Path,
    settings: Mapping[str, JsonValue] | None,
    fingerprint: Mapping[str, str] | None = None,
) -> Path:
    """Write an accepted baseline of the task `sums`, whose YAML file is next to it."""
    (folder / "sums.yaml").write_text(YAML)
    content = {
        "vexport_baseline": 1,
        "settings": settings,
        "fingerprint": {"few-shot examples of sums": "2"} | dict(fingerprint or {}),
        "groups": {},
        "tasks": {"sums": TASK},
    }
    if settings is None:
        del content["settings"]
    file = folder / "accepted.json"
    file.write_text(json.dumps(content))
    return file


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


STORED: Mapping[str, JsonValue] = {
    "tasks": ["sums.yaml"],
    "limit": 4,
    "num_fewshot": 2,
    "apply_chat_template": False,
    "system_instruction": "Be brief.",
    "gen_kwargs": {"temperature": 0},
    "max_gen_toks": 9,
    "think_end_token": "</think>",
    "enable_thinking": True,
    "seed": 3,
    "max_model_len": 64,
    "dtype": "float16",
}


def test_settings_are_defaults(tmp_path: Path) -> None:
    file = baseline(tmp_path, STORED)
    measured = with_accepted_settings({"margin": 0.1}, Serve(), file, command="eval")
    assert measured.keys["margin"] == 0.1
    evaluate = Evaluate.model_validate(measured.keys)
    assert settings_to_store(evaluate, measured.serve, file) == STORED
    assert set(measured.filled) == set(STORED)


def test_given_settings_are_stored(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "baselines").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(YAML)
    evaluate = Evaluate(tasks=("tasks/sums.yaml", "gsm8k"), limit=4, include_path=(Path("tasks"),))
    file = tmp_path / "baselines" / "accepted.json"
    stored = settings_to_store(evaluate, Serve(max_model_len=32), file)
    assert stored == {
        "tasks": ["../tasks/sums.yaml", "gsm8k"],
        "include_path": ["../tasks"],
        "limit": 4,
        "max_model_len": 32,
    }


@pytest.mark.parametrize(
    ("options", "got", "need"),
    [
        ("--limit 3", "--limit: got 3", "need 4"),
        ("--limit 0.5", "--limit: got 0.5", "need 4"),
        ("--num-fewshot 5", "--num-fewshot: got 5", "need 2"),
        ("--apply-chat-template", "--apply-chat-template: got true", "need false"),
        ("--chat-template tools", "--apply-chat-template: got tools", "need false"),
        ("--system-instruction Hello", "--system-instruction: got Hello", "need Be brief."),
        ("--gen-kwargs temperature=1", '"temperature": 1', '"temperature": 0'),
        ("--max-gen-toks 256", "--max-gen-toks: got 256", "need 9"),
        ("--think-end-token X", "--think-end-token: got X", "need </think>"),
        ("--no-enable-thinking", "--enable-thinking: got false", "need true"),
        ("--fewshot-as-multiturn", "--fewshot-as-multiturn: got true", "need false"),
        ("--seeds 4", "--seeds: got 4", "need 1"),
        ("--gate acc", "--gate: got sums=acc", "need sums=exact_match,none"),
        ("--max-model-len 128", "--max-model-len: got 128", "need 64"),
        ("--dtype bfloat16", "--dtype: got bfloat16", "need float16"),
    ],
)
def test_contradictions_are_refused(options: str, got: str, need: str, tmp_path: Path) -> None:
    file = baseline(tmp_path, STORED)
    for name in ("--against", "--baseline"):
        ran = vexport("eval", "no-such-checkpoint", name, file, *options.split())
        assert ran.code == 2
        (error,) = ran.errors
        assert_contains(error, got, need, "leave it out")
    assert not (tmp_path / "runs").exists()


def test_contradictions_are_reported_at_once(tmp_path: Path) -> None:
    file = baseline(tmp_path, STORED)
    options = ("--limit", 3, "--num-fewshot", 5, "--dtype", "bfloat16")
    ran = vexport("eval", "no-such-checkpoint", "--against", file, *options)
    assert ran.code == 2
    assert len(ran.errors) == 3


@pytest.mark.parametrize(
    ("settings", "fingerprint", "given"),
    [
        (STORED, {}, dict(STORED) | {"tasks": ("sums.yaml",)}),
        ({}, {}, {"limit": 4}),
        ({}, {}, {"limit": 1000}),
        ({"limit": 10}, {}, {"limit": 20}),
        ({}, {}, {"num_fewshot": 2, "max_gen_toks": 256, "seed": 0, "seeds": 1}),
        ({}, {}, {"apply_chat_template": False, "fewshot_as_multiturn": False}),
        ({}, {"chat template": "sha 1"}, {"apply_chat_template": True}),
        ({}, {}, {"gate": {"sums": "exact_match"}}),
        ({}, {}, {"gate": {"*": "exact_match,none"}}),
        ({}, {}, {"margin": 0.5, "alpha": 0.1, "concurrency": 3, "tokenizer": "t"}),
    ],
)
def test_same_effect_is_accepted(
    settings: dict[str, JsonValue],
    fingerprint: dict[str, str],
    given: dict[str, object],
    tmp_path: Path,
) -> None:
    file = baseline(tmp_path, {"tasks": ["sums.yaml"], **settings}, fingerprint)
    keys = {key: value for key, value in given.items() if key not in ("max_model_len", "dtype")}
    measured = with_accepted_settings(keys, Serve(), file, command="eval")
    assert {key: measured.keys[key] for key in keys if key != "tasks"} == {
        key: value for key, value in keys.items() if key != "tasks"
    }


@pytest.mark.parametrize(
    ("given", "need"),
    [
        ({"limit": 3}, "all documents"),
        ({"num_fewshot": 0}, "2"),
        ({"apply_chat_template": True}, "false"),
        ({"max_gen_toks": 9}, "256"),
        ({"system_instruction": "Hello"}, "none"),
        ({"enable_thinking": False}, "none"),
        ({"gen_kwargs": {"temperature": 0}}, "none"),
        ({"seed": 1}, "0"),
    ],
)
def test_unset_settings_mean_defaults(given: dict[str, object], need: str, tmp_path: Path) -> None:
    file = baseline(tmp_path, {"tasks": ["sums.yaml"]})
    with breaks(rules.OTHER_SETTING, need):
        with_accepted_settings(given, Serve(), file, command="eval")


def test_recorded_settings_are_compared(tmp_path: Path) -> None:
    """Results of lm-eval that were made elsewhere have only recorded settings."""
    recorded = {
        "limit": "4",
        "gen kwargs": '{"min_p": 0.5, "temperature": 0}',
        "argument max_gen_toks": "9",
        "argument enable_thinking": "true",
        "system instruction": "sha 0123456789abcdef",
    }
    file = baseline(tmp_path, {"tasks": ["sums.yaml"]}, recorded)
    given: dict[str, object] = {
        "limit": 4,
        "gen_kwargs": {"temperature": 0, "min_p": 0.5},
        "max_gen_toks": 9,
        "enable_thinking": True,
        "think_end_token": "</think>",
        "system_instruction": "Be brief.",
    }
    with breaks(rules.OTHER_SETTING, "think_end_token", "</think>", "none"):
        with_accepted_settings(given, Serve(), file, command="eval")
    del given["think_end_token"]
    measured = with_accepted_settings(given, Serve(), file, command="eval")
    assert measured.filled == {"tasks": ["sums.yaml"]}
    for key, value in (("limit", 5), ("max_gen_toks", 8), ("gen_kwargs", {"temperature": 1})):
        with pytest.raises(InputError, match=f"eval: {key}"):
            with_accepted_settings({**given, key: value}, Serve(), file, command="eval")


def test_missing_tasks_are_refused(tmp_path: Path, llama: Path) -> None:
    ran = vexport("eval", llama, "--against", baseline(tmp_path, {"tasks": ["gone.yaml"]}))
    assert ran.code == 2
    assert_contains(ran.errors[0], "gone.yaml", "[file/missing]")
    ran = vexport("eval", llama, "--against", baseline(tmp_path, None))
    assert ran.code == 2
    assert_contains(ran.errors[0], "task sums", "[tasks/no-such-task]")


@pytest.mark.parametrize(
    "settings",
    [{"limit": -3}, {"tasks": "sums"}, {"tasks": [3]}, {"gen_kwargs": [1]}, {"seed": {}}],
)
def test_damaged_settings_are_refused(settings: dict[str, JsonValue], tmp_path: Path) -> None:
    file = baseline(tmp_path, {"tasks": ["sums.yaml"], **settings})
    ran = vexport("eval", "model", "--against", file)
    assert ran.code == 2
    assert "accepted.json: settings" in ran.errors[0]
    assert "internal" not in ran.stderr


def test_missing_baseline_is_named(tmp_path: Path) -> None:
    ran = vexport("eval", "model", "--against", tmp_path / "gone.json")
    assert ran.code == 2
    assert_contains(ran.errors[0], "gone.json")


@pytest.mark.vllm
def test_accepted_results_are_compared_without_options(
    lm_eval_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lm_eval_runs)
    tasks = [
        word for name in ("sums", "choices", "near") for word in ("--task", f"tasks/{name}.yaml")
    ]
    file = tmp_path / "accepted.json"
    trust = "--trust-remote-code"
    made = vexport(
        "eval", "baseline", *tasks, trust, "--accept", file, "--output-dir", tmp_path / "first"
    )
    assert made.code == 0, made.stderr
    assert_contains(made.stdout, "sums (exact_match,none) 98.8%", "of 400 documents")
    assert f"next  vexport eval CHECKPOINT --against {file}" in made.stdout
    again = ("--accept", tmp_path / "again.json", "--output-dir", tmp_path / "again")
    as_json = vexport("eval", "baseline", *tasks, trust, *again, "--format", "json")
    assert as_json.code == 0, as_json.stderr
    assert as_json.stdout == ""
    assert "accepted:" in as_json.stderr
    stored = read_accepted(file).settings
    assert stored is not None
    paths = stored["tasks"]
    assert isinstance(paths, list)
    assert [Path(str(path)).stem for path in paths] == ["sums", "choices", "near"]
    ran = vexport("eval", "worse", "--against", file, trust, "--output-dir", tmp_path / "second")
    assert ran.code == 1, ran.stderr
    assert ran.stdout.startswith("FAIL")
    # The results do not contain the checkpoint's path, so the command has a placeholder.
    remedy = "vexport eval CHECKPOINT --baseline SOURCE"
    assert_contains(ran.stdout, "cause", "an accepted baseline has no weights", remedy)
    assert_contains(ran.stdout, "Candidate")
    page = (tmp_path / "second" / "report.html").read_text()
    assert_contains(
        page, "an accepted baseline has no weights", f"<code>{remedy} --task TASK</code>"
    )
    assert re.search(r"accepted 20\d\d-\d\d-\d\d \d\d:\d\d UTC, sha256", page)
    assert "note: settings from" in ran.stderr
    report = json.loads((tmp_path / "second" / "report.json").read_text())
    assert report["verdict"]["warnings"] == []
    alone = vexport("report", tmp_path / "first")
    assert_contains(alone.errors[0], "vexport eval", "--accept FILE", "vexport report FILE")
    shown = vexport("report", file)
    assert_contains(shown.stdout, f"{file} (accepted baseline)")
    assert "Regressed" not in shown.stdout
    limited = ("--against", file, trust, "--limit", 100, "--output-dir", tmp_path / "third")
    refused = vexport("eval", "worse", *limited)
    assert refused.code == 2
    assert_contains(refused.errors[0], "--limit: got 100", "all documents", "400")
