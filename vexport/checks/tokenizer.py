"""Can vLLM read the tokenizer and the generation config, and are their tokens in the vocabulary?

A checkpoint without any tokenizer is served with another one's (`--tokenizer`): that is a warning.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from vexport.checkpoint.tokenizer import FILE as TOKENIZER
from vexport.checkpoint.tokenizer import open_tokenizer
from vexport.checks.vllm.generation import wrong_generation
from vexport.checks.vllm.tokenizer_files import (
    as_merged,
    reads_older_files,
    wrong_added_tokens,
    wrong_tokenizer_settings,
)
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.checks.vllm.vocabulary import beyond
from vexport.errors import InputError
from vexport.files import read_json, read_json_object
from vexport.types import Finding, Json

NAME = "tokenizer"
DESCRIPTION = "vLLM starts with the tokenizer and generation_config.json, and the vocabulary has their tokens"
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
# Read only next to settings of older versions of transformers.
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"
# Files that hold a vocabulary, or code that brings one.
VOCABULARY = re.compile(r"tokenizer\.json|tekken\.json|vocab.*|.*\.(model|tiktoken|py)$")


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on the files next to the weights that vLLM starts with."""
    root = view.index.root
    yield from tokenizer_findings(root)
    names = [path.name for path in view.index.side_files]
    if not any(VOCABULARY.match(name) for name in names):
        missing = error if SETTINGS in names else warning
        got = (
            "no such file"
            if SETTINGS in names
            else "no tokenizer: `vllm serve` asks for another (--tokenizer)"
        )
        fix = "copy the source's tokenizer"
        yield missing(NAME, str(root / TOKENIZER), expected="a vocabulary", got=got, fix=fix)
    if (root / GENERATION).is_file():
        yield from generation_findings(root / GENERATION)
    yield from beyond(view, NAME)


def tokenizer_findings(root: Path) -> Iterator[Finding]:
    """Findings on the files of the tokenizer that transformers reads."""
    if (root / TOKENIZER).is_file():
        yield from _file(root / TOKENIZER)
    objects: dict[str, dict[str, Json]] = {}
    for name in (SETTINGS, SPECIAL, ADDED):
        if (root / name).is_file() and (name == SETTINGS or reads_older_files(objects.get(SETTINGS, {}))):
            try:
                objects[name] = read_json_object(root / name)
            except InputError as problem:
                yield Finding.of(problem, check=NAME, severity="error")
    settings, special = objects.get(SETTINGS, {}), objects.get(SPECIAL, {})
    for wrong in wrong_tokenizer_settings(as_merged(settings, special)):
        name = SPECIAL if wrong.key in special else SETTINGS
        yield _broken(root / name, wrong.key, wrong.expected, wrong.got)
    for wrong in wrong_added_tokens(objects.get(ADDED, {})):
        yield _broken(root / ADDED, wrong.key, wrong.expected, wrong.got)


def _file(path: Path) -> Iterator[Finding]:
    try:
        content = read_json_object(path)
        open_tokenizer(path)
    except InputError as problem:
        yield Finding.of(problem, check=NAME, severity="error")
        return
    if not isinstance(content.get("added_tokens"), list):
        yield _broken(path, "added_tokens", "a list", "no such list")


def generation_findings(path: Path) -> Iterator[Finding]:
    """Defaults of every request; vLLM goes on without them where they are no JSON.

    transformers turns syntax errors into an OSError, which vLLM catches (try_get_generation_config); values
    too deep in each other, or an integer of thousands of digits, end it.
    """
    try:
        content = read_json(path)
    except InputError as problem:
        cause = problem.__context__
        ends = isinstance(cause, (RecursionError, ValueError)) and not isinstance(
            cause, (json.JSONDecodeError, UnicodeDecodeError)
        )
        yield Finding.of(problem, check=NAME, severity="error" if ends else "warning")
        return
    if not isinstance(content, dict):
        yield error(
            NAME, str(path), expected="a JSON object", got=repr(content), fix="copy the source's file"
        )
        return
    for wrong in wrong_generation(content):
        yield _broken(path, wrong.key, wrong.expected, wrong.got)


def _broken(path: Path, key: str, expected: str, got: str) -> Finding:
    return error(NAME, f"{path}: {key}", expected=expected, got=got, fix="copy the source's file")
