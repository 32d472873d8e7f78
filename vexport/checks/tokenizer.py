"""Can vLLM read the tokenizer and the generation config, and are their tokens in the vocabulary?

A checkpoint without any tokenizer is served with another one's (`--tokenizer`): that is a warning.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from vexport.checkpoint.tokenizer import FILE as TOKENIZER
from vexport.checkpoint.tokenizer import open_tokenizer
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.checks.vllm.vocabulary import beyond
from vexport.errors import InputError
from vexport.files import read_json, read_json_object
from vexport.types import Finding, Json

NAME = "tokenizer"
DESCRIPTION = "vLLM starts with the tokenizer and generation_config.json, and the vocabulary has their tokens"
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
# What transformers reads as objects where it is there.
OBJECTS = (TOKENIZER, SETTINGS, "special_tokens_map.json", "added_tokens.json")
# Files that hold a vocabulary, or code that brings one.
VOCABULARY = re.compile(r"tokenizer\.json|tekken\.json|vocab.*|.*\.(model|tiktoken|py)$")
# What SamplingParams takes (_verify_args in vllm/sampling_params.py).
RANGES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "repetition_penalty": ("above 0", lambda value: value > 0),
    "presence_penalty": ("from -2 to 2", lambda value: -2 <= value <= 2),
    "frequency_penalty": ("from -2 to 2", lambda value: -2 <= value <= 2),
    "temperature": ("from 0 to 2", lambda value: 0 <= value <= 2),
    "top_k": ("a whole number from -1", lambda value: value >= -1 and value == int(value)),
    "top_p": ("above 0, up to 1", lambda value: 0 < value <= 1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "max_new_tokens": ("at least 1", lambda value: value >= 1),
}


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on the files next to the weights that vLLM starts with."""
    root = view.index.root
    for name in OBJECTS:
        if (root / name).is_file():
            yield from _unreadable(root / name)
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
        yield from _generation(root / GENERATION)
    yield from beyond(view, NAME)


def _unreadable(path: Path) -> Iterator[Finding]:
    try:
        content = read_json_object(path)
        if path.name == TOKENIZER:
            open_tokenizer(path)
    except InputError as problem:
        yield Finding.of(problem, check=NAME, severity="error")
        return
    if path.name == TOKENIZER and not isinstance(content.get("added_tokens"), list):
        yield _broken(path, "added_tokens", "a list", "no such list")


def _generation(path: Path) -> Iterator[Finding]:
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
    for key, (expected, is_valid) in RANGES.items():
        value = content.get(key)
        if value is not None and not (_is_number(value) and is_valid(float(str(value)))):
            yield _broken(path, key, expected, repr(value))


def _is_number(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def _broken(path: Path, key: str, expected: str, got: str) -> Finding:
    return error(NAME, f"{path}: {key}", expected=expected, got=got, fix="copy the source's file")
