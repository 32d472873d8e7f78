"""Can vLLM read the tokenizer and the generation config, and are their tokens in the vocabulary?

A checkpoint without any tokenizer is served with another one's (`--tokenizer`): that is a warning.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from vexport.checkpoint.tokenizer import FILE as TOKENIZER
from vexport.checkpoint.tokenizer import open_tokenizer
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.checks.vllm.vocabulary import beyond
from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.types import Finding

NAME = "tokenizer"
DESCRIPTION = "vLLM starts with the tokenizer and generation_config.json, and the vocabulary has their tokens"
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
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
    yield from beyond(view, NAME)


def tokenizer_findings(root: Path) -> Iterator[Finding]:
    """Findings on the files of the tokenizer and the generation config: whether they are JSON.

    transformers judges what they say, in `load --dry`. vLLM goes on without a generation config.
    """
    if (root / TOKENIZER).is_file():
        yield from _file(root / TOKENIZER)
    for name in (SETTINGS, GENERATION):
        if (root / name).is_file():
            try:
                read_json_object(root / name)
            except InputError as problem:
                yield Finding.of(problem, check=NAME, severity="error" if name == SETTINGS else "warning")


def _file(path: Path) -> Iterator[Finding]:
    try:
        content = read_json_object(path)
        open_tokenizer(path)
    except InputError as problem:
        yield Finding.of(problem, check=NAME, severity="error")
        return
    if not isinstance(content.get("added_tokens"), list):
        yield _broken(path, "added_tokens", "a list", "no such list")


def _broken(path: Path, key: str, expected: str, got: str) -> Finding:
    return error(NAME, f"{path}: {key}", expected=expected, got=got, fix="copy the source's file")
