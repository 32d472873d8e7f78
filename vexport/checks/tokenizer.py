"""Can vLLM read the tokenizer and the generation config, and are their tokens in the vocabulary?

A checkpoint without any tokenizer is served with another one's (`--tokenizer`): that is a warning.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from vexport.architectures.text_config import text_config
from vexport.checkpoint.tokenizer import FILE as TOKENIZER
from vexport.checkpoint.tokenizer import open_tokenizer
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.errors import InputError
from vexport.files import read_json, read_json_object
from vexport.types import Finding, Json

NAME = "tokenizer"
DESCRIPTION = "vLLM starts with the tokenizer and generation_config.json, and the vocabulary has their tokens"
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
# Files that hold a vocabulary, or code that brings one.
VOCABULARY = re.compile(r"tokenizer\.json|tekken\.json|vocab.*|.*\.(model|tiktoken|py)$")
END = "eos_token_id"
FIX = "copy the source's tokenizer and configs"


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
    yield from _beyond(view)


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


def _beyond(view: CheckpointView) -> Iterator[Finding]:
    """Findings on token ids that are not below the config's vocab_size."""
    size = text_config(view.index.config).get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return
    yield from _ends(view, size)
    content = _object(view.index.root / TOKENIZER)
    model = content.get("model")
    largest = max(_ids(model.get("vocab") if isinstance(model, dict) else None), default=-1)
    if largest >= size:
        expected = f"token ids below vocab_size {size}"
        place = f"{view.index.root / TOKENIZER}: model.vocab"
        yield error(NAME, place, expected=expected, got=f"up to {largest}", fix=FIX)
    yield from _added(view, content, size)


def _added(view: CheckpointView, content: Mapping[str, Json], size: int) -> Iterator[Finding]:
    """Added tokens; one that no text has by itself is only a warning: Gemma 3's text models have one."""
    settings = _object(view.index.root / SETTINGS)
    used = {str(_content(value)) for key, value in settings.items() if key.endswith("_token")}
    added = content.get("added_tokens")
    tokens = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    outside = [each for each in tokens if isinstance(each.get("id"), int) and int(str(each["id"])) >= size]
    named = [each for each in outside if each.get("content") in used]
    if outside:
        first, more = (named or outside)[0], len(outside) - 1
        got = f"{first.get('content')!r} with {first['id']}" + (f" and {more} more" if more else "")
        expected, place = f"token ids below vocab_size {size}", f"{view.index.root / TOKENIZER}: added_tokens"
        yield (error if named else warning)(NAME, place, expected=expected, got=got, fix=FIX)


def _ends(view: CheckpointView, size: int) -> Iterator[Finding]:
    """What ends a text: config.json's and generation_config.json's, of which vLLM takes all."""
    generation = view.index.root / GENERATION
    places = {
        f"{generation}: {END}": _object(generation).get(END),
        f"{view.config_path}: {END}": text_config(view.index.config).get(END, view.index.config.get(END)),
    }
    for place, value in places.items():
        ends = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]
        outside = [each for each in ends if not 0 <= each < size]
        if outside:
            severity = error if len(outside) == len(ends) else warning
            expected = f"token ids from 0 to below vocab_size {size}"
            yield severity(NAME, place, expected=expected, got=str(outside[0]), fix=FIX)


def _ids(vocabulary: Json) -> Iterator[int]:
    """The ids of a vocabulary: of words by id, or a list of words in their order."""
    if isinstance(vocabulary, dict):
        yield from (each for each in vocabulary.values() if isinstance(each, int))
    elif isinstance(vocabulary, list):
        yield len(vocabulary) - 1


def _content(token: Json) -> Json:
    return token.get("content") if isinstance(token, dict) else token


def _object(path: Path) -> Mapping[str, Json]:
    """A file's object; empty where there is none, or one that another finding is about."""
    try:
        content = read_json(path) if path.is_file() else {}
    except InputError:
        return {}
    return content if isinstance(content, dict) else {}
