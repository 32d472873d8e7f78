"""Tokenizers and generation settings with which vLLM 0.32 was seen to start, or to refuse to."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from tests.command import vexport
from tests.models import Good, write_tokenizer
from tests.mutations.edits import Change, file_bytes, spoiled
from vexport.checks import check_checkpoint
from vexport.records import Json

TOKENIZER, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


def written(name: str, content: Json) -> Change:
    return raw(name, json.dumps(content).encode())


def raw(name: str, content: bytes) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return apply


def changed(change: Callable[[dict[str, Json]], object]) -> Change:
    def apply(folder: Path) -> None:
        content = json.loads((folder / TOKENIZER).read_text())
        change(content)
        (folder / TOKENIZER).write_text(json.dumps(content))

    return apply


def without(*names: str) -> Change:
    def apply(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return apply


REFUSED: list[tuple[str, Change]] = [
    (TOKENIZER, without(TOKENIZER)),
    (f"{TOKENIZER}:1", file_bytes(TOKENIZER, lambda data: b"")),
    (TOKENIZER, changed(lambda content: content.pop("model"))),
    (f"{TOKENIZER}: added_tokens", changed(lambda content: content.pop("added_tokens"))),
    (SETTINGS, written(SETTINGS, [])),
]
# What transformers judges, and `load --dry` with it.
JUDGED_BY_TRANSFORMERS: list[Change] = [
    written(GENERATION, {"num_return_sequences": 2}),
    written(SETTINGS, {"eos_token": {"content": "</s>"}}),
    written(SETTINGS, {"added_tokens_decoder": {"one": {}}}),
]
STARTED: list[Change] = [
    without(SETTINGS),
    without(TOKENIZER, SETTINGS),
    written(SETTINGS, {"tokenizer_class": "NoSuchTokenizer"}),
    written(GENERATION, {"eos_token_id": [2, 3], "temperature": 0.6, "top_k": 20, "do_sample": True}),
    raw(GENERATION, b"{,"),
    written("special_tokens_map.json", {"eos_token": {"content": "</s>", "lstrip": False}}),
]


def errors(good: Path, folder: Path, change: Change) -> list[str]:
    """The places of the errors in a checkpoint with a tokenizer that is then changed."""
    spoiled(good, folder, write_tokenizer)
    change(folder)
    findings = check_checkpoint(str(folder)).findings
    return [one.where.replace(f"{folder}/", "") for one in findings if one.severity == "error"]


@pytest.mark.parametrize(
    ("places", "change"),
    [*(([where], change) for where, change in REFUSED), *(([], change) for change in STARTED)],
)
def test_vllm_starts_without_findings(good: Good, tmp_path: Path, places: list[str], change: Change) -> None:
    assert errors(good("W8A8"), tmp_path / "changed", change) == places


@pytest.mark.vllm
def test_the_dry_load_asks_transformers(good: Good, tmp_path: Path) -> None:
    folders = [copytree(good("W8A8"), tmp_path / str(number)) for number in range(4)]
    for folder in folders:
        write_tokenizer(folder)
    for folder, change in zip(folders[1:], JUDGED_BY_TRANSFORMERS, strict=True):
        change(folder)
    ran = vexport("load", "--dry", *folders, "--tp", "1", "--sm", "90", "--format", "json", "--quiet")
    assert [report["ok"] for report in json.loads(ran.stdout)] == [True, False, False, False]
