"""Metadata of a source's model card that also apply to a quantized checkpoint."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import yaml

# Metadata that also apply to a quantized model (https://huggingface.co/docs/hub/model-cards).
INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
# First words of license texts, and the hub's identifiers.
LICENSES = {"Apache License Version 2.0": "apache-2.0", "MIT License": "mit"}
_TEXT = "tag:yaml.org,2002:str"
# Maximum number of bytes read from a file, and of characters in a word.
_MAX_BYTES, _LONGEST_WORD = 1 << 16, 500


def inherited_card(root: Path) -> Mapping[str, str | tuple[str, ...]]:
    """Return the keys of INHERITED in the folder's README.md, or {} if it is no valid card.

    If the card has no license, the license of the folder's LICENSE file is added if it is in
    LICENSES.
    """
    fields = _source_fields(_beginning(root / "README.md"))
    texts = (_beginning(root / name) for name in ("LICENSE", "LICENSE.txt", "LICENSE.md"))
    start = " ".join(next(filter(None, texts), "")[:500].split())
    known = [license_ for title, license_ in LICENSES.items() if title in start]
    return {"license": known[0], **fields} if known else fields


def _source_fields(card: str) -> Mapping[str, str | tuple[str, ...]]:
    first, *rest = card.split("\n---", 1)
    if not rest or not first.startswith("---"):
        return {}
    try:  # only nodes: constructing values could take very long with aliases and merges
        content = yaml.compose(first.removeprefix("---"), yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return {}
    nodes = content.value if isinstance(content, yaml.MappingNode) else []
    fields = {key.value: _plain(node) for key, node in nodes if key.value in INHERITED}
    return {key: value for key, value in fields.items() if value}


def _plain(node: yaml.Node) -> str | tuple[str, ...]:
    """Return the text of a scalar, or the texts of a list. Return "" or () for other nodes."""
    if isinstance(node, yaml.SequenceNode):
        words = tuple(_word(entry) for entry in node.value)
        return words if all(words) else ()
    return _word(node)


def _word(node: yaml.Node) -> str:
    is_word = node.tag == _TEXT and len(node.value) <= _LONGEST_WORD and node.value.isprintable()
    return str(node.value) if is_word else ""


def _beginning(file: Path) -> str:
    with suppress(OSError):
        if file.is_file():
            with file.open("rb") as stream:
                return stream.read(_MAX_BYTES).decode("utf-8", errors="replace")
    return ""
