"""Runs with different prompts: errors, warnings, and the cause that they name."""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from tests.command import vexport
from tests.scores.make import edit_results
from tests.texts import assert_contains
from vexport.judge.accepting import accept_results

Changes = Mapping[str, object]
TEMPLATE = {
    "chat_template": "{{ x }}",
    "chat_template_sha": "ab12" * 16,
    "fewshot_as_multiturn": True,
}


# In the results: sha ab12ab12ab12ab12. In the baseline: no template.
TEMPLATE_DIFFERS = r"chat template \(sha (ab12){4}, [^)]*baseline's: not applied\)"


def change_run(folder: Path, changes: Changes, *, prompts: str | None = None) -> None:
    """Change settings of prompts in a run's results.

    `prompts`, if given, is put before each prompt.
    """

    def change(content: dict[str, Any]) -> None:
        for name, value in changes.items():
            *path, last = name.split("/")
            reduce(getitem, path, content)[last] = value

    edit_results(folder, change)
    for answers in folder.rglob("samples_*.jsonl"):
        if prompts is not None:
            rows = [
                prefixed(prompts, json.loads(line)) for line in answers.read_text().splitlines()
            ]
            answers.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prefixed(start: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with a longer prompt, and the prompt's hash."""
    for arguments in row["arguments"].values():
        arguments["arg_0"] = start + arguments["arg_0"]
    prompt = row["arguments"]["gen_args_0"]["arg_0"]
    return row | {"prompt_hash": hashlib.sha256(prompt.encode()).hexdigest()}


@pytest.fixture
def pair(lm_eval_runs: Path, tmp_path: Path) -> tuple[Path, Path]:
    old, new = (
        Path(shutil.copytree(lm_eval_runs / "twin", tmp_path / name)) for name in ("old", "new")
    )
    return old, new


def warnings_of(pair: tuple[Path, Path]) -> list[str]:
    done = vexport("verdict", *pair, "--format", "json")
    assert done.code == 0
    warnings: list[str] = json.loads(done.stdout)["warnings"]
    return warnings


def test_chat_template_explains_different_prompts(pair: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = pair
    change_run(new, TEMPLATE, prompts="<|user|> ")
    done = vexport("verdict", old, new)
    assert done.code == 2
    assert_contains(done.stderr, "task sums", "after 0 characters")
    assert_contains(done.stderr, "with '<|user|> 0 + 0 ='", "baseline's with '0 + 0 ='")
    assert re.search(TEMPLATE_DIFFERS, done.stderr)
    accept_results(old, tmp_path / "accepted.json", {})
    done = vexport("verdict", tmp_path / "accepted.json", new)
    assert done.code == 2
    assert re.search(TEMPLATE_DIFFERS, done.stderr)


def test_fewshot_explains_different_prompts(pair: tuple[Path, Path]) -> None:
    old, new = pair
    change_run(new, {"n-shot/sums": 2, "system_instruction_sha": "cd" * 32}, prompts="1 + 1 = 2 ")
    done = vexport("verdict", old, new)
    assert done.code == 2
    assert re.search(r"system instruction \(sha (cd){8}, [^)]*baseline's: none\)", done.stderr)
    assert re.search(r"few-shot examples of sums \(2, [^)]*baseline's: 0\)", done.stderr)


def test_equal_prompts_are_compared_despite_template(pair: tuple[Path, Path]) -> None:
    """If the prompts are equal, another chat template is only a warning."""
    old, new = pair
    change_run(new, TEMPLATE)
    done = vexport("verdict", old, new, "--format", "json")
    assert done.code == 0
    verdict = json.loads(done.stdout)
    (warning,) = verdict["warnings"]
    assert re.search(r"^chat template\b.*not applied .*baseline, .* (ab12){4} ", warning)
    assert verdict["prompting"] == {
        "chat_template": "ab12ab12ab12ab12",
        "system_instruction": None,
        "num_fewshot": {"sums": 0, "choices": 0, "near": 0},
        "fewshot_as_multiturn": True,
        "generation": {},
        "untemplated": [],
    }


def test_missing_samples_are_refused(pair: tuple[Path, Path]) -> None:
    for answers in pair[1].rglob("samples_sums_*.jsonl"):
        answers.unlink()
    done = vexport("verdict", *pair)
    assert done.code == 2
    assert_contains(done.stderr, "task sums: ", "[results/no-samples]")


@pytest.mark.parametrize(
    ("changes", "setting", "baseline", "results"),
    [
        (
            dict.fromkeys(
                ("config/gen_kwargs", "configs/sums/generation_kwargs"), {"temperature": 0.7}
            ),
            "gen kwargs",
            "the tasks' own",
            '{"temperature": 0.7}',
        ),
        (
            {"configs/sums/generation_kwargs": {"max_gen_toks": 9}},
            "sums",
            "}",
            '{"max_gen_toks": 9}',
        ),
        (
            {"config/model_args": "pretrained=x,think_end_token=</think>"},
            "think_end_token",
            "not given",
            "</think>",
        ),
        (
            {"config/model_args": {"pretrained": "x", "max_gen_toks": 1024}},
            "max_gen_toks",
            "not given",
            "1024",
        ),
    ],
    ids=["gen_kwargs", "task", "thinking", "length"],
)
def test_generation_settings_warn(
    changes: Changes, setting: str, baseline: str, results: str, pair: tuple[Path, Path]
) -> None:
    change_run(pair[1], changes)
    (warning,) = warnings_of(pair)
    assert_contains(warning, setting, f"{baseline} in the baseline", f"{results} in the results")


def test_empty_generation_arguments_do_not_warn(pair: tuple[Path, Path]) -> None:
    """lm-eval's command line records an empty object if no arguments are given."""
    change_run(pair[1], {"config/gen_kwargs": {}})
    assert warnings_of(pair) == []


def test_verdict_shows_prompting(pair: tuple[Path, Path]) -> None:
    shot = {
        "n-shot/sums": 2,
        "n-shot/near": 2,
        "n-shot/choices": 2,
        "config/gen_kwargs": {"temperature": 0},
    }
    for folder in pair:
        change_run(folder, {**TEMPLATE, **shot})
    done = vexport("verdict", *pair)
    assert done.code == 0
    assert_contains(done.stdout, "chat template: applied (sha ab12ab12)", "2-shot as multiturn")
    assert_contains(done.stdout, 'gen_kwargs {"temperature": 0}')


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ({}, True),
        ({"think_end_token": "</think>"}, False),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True}, True),
    ],
)
def test_uncut_thinking_warns(arguments: Changes, warned: bool, pair: tuple[Path, Path]) -> None:
    for folder in pair:
        template = {**TEMPLATE, "chat_template": "{{ x }}<think></think>"}
        change_run(folder, {**template, "config/model_args": {"pretrained": "x", **arguments}})
    warnings = warnings_of(pair)
    assert len(warnings) == warned
    for warning in warnings:
        assert_contains(warning, "chat template", "--think-end-token '</think>'")
