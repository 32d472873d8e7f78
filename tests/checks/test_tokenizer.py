"""Tokenizers and generation settings. vLLM 0.32 was seen to start with them, or to refuse them."""

import json
from pathlib import Path
from shutil import copytree

import pytest

from tests.command import vexport
from tests.models import Good, errors, write_tokenizer
from tests.mutations.edits import Change, all_of, file_bytes, json_file, spoiled, without_files
from vexport.checks import check_checkpoint
from vexport.records import Json

TOKENIZER, SETTINGS, GENERATION = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)


def write_json(name: str, content: Json) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).write_text(json.dumps(content))

    return apply


REFUSED: list[tuple[str, Change]] = [
    (TOKENIZER, without_files(TOKENIZER)),
    (f"{TOKENIZER}:1", file_bytes(TOKENIZER, lambda data: b"")),
    (TOKENIZER, json_file(TOKENIZER, lambda content: content.pop("model"))),
    (
        f"{TOKENIZER}: added_tokens",
        json_file(TOKENIZER, lambda content: content.pop("added_tokens")),
    ),
    (SETTINGS, write_json(SETTINGS, [])),
]
# Errors that only transformers finds, and so only `load --dry`.
JUDGED_BY_TRANSFORMERS: list[Change] = [
    write_json(GENERATION, {"num_return_sequences": 2}),
    write_json(SETTINGS, {"eos_token": {"content": "</s>"}}),
    write_json(SETTINGS, {"added_tokens_decoder": {"one": {}}}),
]
ACCEPTED: list[Change] = [
    without_files(SETTINGS),
    without_files(TOKENIZER, SETTINGS),
    write_json(SETTINGS, {"tokenizer_class": "NoSuchTokenizer"}),
    write_json(
        GENERATION, {"eos_token_id": [2, 3], "temperature": 0.6, "top_k": 20, "do_sample": True}
    ),
    all_of(write_json(GENERATION, {}), file_bytes(GENERATION, lambda data: b"{,")),
    write_json("special_tokens_map.json", {"eos_token": {"content": "</s>", "lstrip": False}}),
]


@pytest.mark.parametrize(
    ("places", "change"),
    [*(([where], change) for where, change in REFUSED), *(([], change) for change in ACCEPTED)],
)
def test_tokenizer_findings(good: Good, tmp_path: Path, places: list[str], change: Change) -> None:
    """There are no findings if vLLM starts."""
    folder = spoiled(good("W8A8"), tmp_path / "changed", all_of(write_tokenizer, change))
    assert [error.where.replace(f"{folder}/", "") for error in errors(folder)] == places


def test_missing_tokenizer_names_option(good: Good) -> None:
    (finding,) = (
        each for each in check_checkpoint(str(good("W8A8"))).findings if each.check == "tokenizer"
    )
    assert finding.where == f"{good('W8A8') / 'tokenizer.json'}"
    assert (finding.severity, finding.rule) == ("warning", "tokenizer/no-tokenizer")


@pytest.mark.vllm
def test_dry_load_uses_transformers(good: Good, tmp_path: Path) -> None:
    folders = [copytree(good("W8A8"), tmp_path / str(number)) for number in range(4)]
    for folder in folders:
        write_tokenizer(folder)
    for folder, change in zip(folders[1:], JUDGED_BY_TRANSFORMERS, strict=True):
        change(folder)
    ran = vexport(
        "load", "--dry", *folders, "--tp", "1", "--sm", "90", "--format", "json", "--quiet"
    )
    assert [report["ok"] for report in json.loads(ran.stdout)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("name", "template", "found"),
    [
        ("tokenizer_config.json", "{{ messages }}", False),
        ("processor_config.json", "{{ messages }}", False),
        ("tokenizer_config.json", None, True),
        ("tokenizer_config.json", [{"name": "rag", "template": "{{ messages }}"}], True),
    ],
)
def test_chat_template_in_settings(
    good: Good, tmp_path: Path, name: str, template: Json, found: bool
) -> None:
    change = all_of(write_tokenizer, write_json(name, {"chat_template": template}))
    changed = spoiled(good("FP8"), tmp_path / "changed", change)
    rules = {each.rule for each in check_checkpoint(str(changed)).findings}
    assert ("tokenizer/no-chat-template" in rules) is found
