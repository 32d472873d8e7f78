"""Metadata of a source's model card that also apply to a quantized checkpoint."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from vexport.config_files import parse_yaml
from vexport.errors import InputError

# Metadata that also apply to a quantized model (https://huggingface.co/docs/hub/model-cards).
INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
# Maximum number of bytes read from a card, and of characters in a word.
_MAX_BYTES, _LONGEST_WORD = 1 << 16, 500


def inherited_card(root: Path) -> Mapping[str, str | tuple[str, ...]]:
    """Return the keys of INHERITED in the folder's README.md, or {} if it is no valid card."""
    file = root / "README.md"
    first, *rest = _beginning(file).split("\n---", 1)
    if not rest or not first.startswith("---"):
        return {}
    try:
        content = parse_yaml(first.removeprefix("---"), file)
    except InputError:
        return {}
    fields = content if isinstance(content, dict) else {}
    words = {key: _words(fields.get(key)) for key in INHERITED}
    return {key: value for key, value in words.items() if value}


def _words(value: object) -> str | tuple[str, ...]:
    if isinstance(value, list):
        return tuple(value) if all(_is_word(each) for each in value) else ()
    return str(value) if _is_word(value) else ""


def _is_word(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_WORD and value.isprintable()


def _beginning(file: Path) -> str:
    with suppress(OSError):
        if file.is_file():  # a pipe would block
            with file.open("rb") as stream:
                return stream.read(_MAX_BYTES).decode("utf-8", errors="replace")
    return ""
