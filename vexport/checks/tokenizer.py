"""Are the tokenizer's files there, and are they JSON? What they say transformers judges, in `load --dry`.

A checkpoint without any tokenizer is served with another one's (`--tokenizer`): that is a warning.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from vexport.checkpoint.tokenizer import FILE as TOKENIZER
from vexport.checkpoint.tokenizer import open_tokenizer
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.types import Finding, Severity

NAME = "tokenizer"
DESCRIPTION = "a vocabulary is there and opens; the tokenizer's settings and the generation config are JSON"
SETTINGS = "tokenizer_config.json"
# vLLM starts without a generation config that it cannot read.
JSON_FILES: Mapping[str, Severity] = {
    TOKENIZER: "error",
    SETTINGS: "error",
    "generation_config.json": "warning",
}
# Files that hold a vocabulary, or code that brings one.
VOCABULARY = re.compile(r"tokenizer\.json|tekken\.json|vocab.*|.*\.(model|tiktoken|py)$")
FIX = "copy the source's tokenizer"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on the files next to the weights that vLLM starts with."""
    root = view.index.root
    for name, severity in JSON_FILES.items():
        if (root / name).is_file():
            yield from _file(root / name, severity)
    names = [path.name for path in view.index.side_files]
    if any(VOCABULARY.match(name) for name in names):
        return
    place, expected = str(root / TOKENIZER), "a vocabulary"
    if SETTINGS in names:
        yield error(NAME, place, expected=expected, got="no such file", fix=FIX)
    else:
        got = "no tokenizer: `vllm serve` asks for another (--tokenizer)"
        yield warning(NAME, place, expected=expected, got=got, fix=FIX)


def _file(path: Path, severity: Severity) -> Iterator[Finding]:
    try:
        content = read_json_object(path)
        if path.name == TOKENIZER:
            open_tokenizer(path)
            if not isinstance(content.get("added_tokens"), list):
                raise InputError(f"{path}: added_tokens", got="no such list", need="a list", fix=FIX)
    except InputError as problem:
        yield Finding.of(problem, check=NAME, severity=severity)
