"""Runs with different prompts: errors, warnings, and the cause that they name."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from tests.command import vexport
from tests.evaluation.make import edit_results
from vexport.evaluation.accepted import accept_results

Changes = Mapping[str, object]
TEMPLATE = {
    "chat_template": "{{ x }}",
    "chat_template_sha": "ab12" * 16,
    "fewshot_as_multiturn": True,
}


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
    prompts = (
        "a prompt that continues after 0 characters with '<|user|> 0 + 0 =', the "
        "baseline's with '0 + 0 ='"
    )
    assert prompts in done.stderr
    differs = "chat template (sha ab12ab12ab12ab12, the baseline's: not applied)"
    assert f"also different: {differs}" in done.stderr
    accept_results(old, tmp_path / "accepted.json", {})
    done = vexport("verdict", tmp_path / "accepted.json", new)
    assert done.code == 2
    assert differs in done.stderr


def test_fewshot_explains_different_prompts(pair: tuple[Path, Path]) -> None:
    old, new = pair
    change_run(new, {"n-shot/sums": 2, "system_instruction_sha": "cd" * 32}, prompts="1 + 1 = 2 ")
    done = vexport("verdict", old, new)
    assert done.code == 2
    assert "system instruction (sha cdcdcdcdcdcdcdcd, the baseline's: none)" in done.stderr
    assert "few-shot examples of sums (2, the baseline's: 0)" in done.stderr


def test_equal_prompts_are_compared_despite_template(pair: tuple[Path, Path]) -> None:
    """If the prompts are equal, another chat template is only a warning."""
    old, new = pair
    change_run(new, TEMPLATE)
    done = vexport("verdict", old, new, "--format", "json")
    assert done.code == 0
    verdict = json.loads(done.stdout)
    warning = "chat template: not applied in the baseline, sha ab12ab12ab12ab12 in the results"
    assert warning in verdict["warnings"]
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
    assert "task sums: got no samples" in done.stderr
    assert "evaluate again with --log_samples" in done.stderr


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (
            dict.fromkeys(
                ("config/gen_kwargs", "configs/sums/generation_kwargs"), {"temperature": 0.7}
            ),
            'gen kwargs: the tasks\' own in the baseline, {"temperature": 0.7} in the results',
        ),
        (
            {"configs/sums/generation_kwargs": {"max_gen_toks": 9}},
            'in the baseline, {"max_gen_toks": 9} in the results',
        ),
        (
            {"config/model_args": "pretrained=x,think_end_token=</think>"},
            "think end token: none in the baseline, </think> in the results",
        ),
        (
            {"config/model_args": {"pretrained": "x", "max_gen_toks": 1024}},
            "max gen toks: 256 in the baseline, 1024 in the results",
        ),
        ({"config/gen_kwargs": {}}, None),
    ],
    ids=["gen_kwargs", "task", "thinking", "length", "lm-eval's command line"],
)
def test_generation_settings_warn(
    changes: Changes, warning: str | None, pair: tuple[Path, Path]
) -> None:
    change_run(pair[1], changes)
    warnings = warnings_of(pair)
    assert len(warnings) == bool(warning)
    assert all(str(warning) in line for line in warnings)


def test_verdict_shows_prompting(pair: tuple[Path, Path]) -> None:
    shot = {
        "n-shot/sums": 2,
        "n-shot/near": 2,
        "n-shot/choices": 2,
        "config/gen_kwargs": {"temperature": 0},
    }
    for folder in pair:
        change_run(folder, {**TEMPLATE, **shot})
    expected = (
        'chat template: applied (sha ab12ab12), 2-shot as multiturn, gen_kwargs {"temperature": 0}'
    )
    done = vexport("verdict", *pair)
    assert done.code == 0
    assert expected in " ".join(done.stdout.split())


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
    thinks = "the chat template has </think>: if the model thinks"
    assert [thinks in line for line in warnings_of(pair)] == [True] * warned
