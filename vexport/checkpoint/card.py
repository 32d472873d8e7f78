"""The front matter of a model card: what a quantized model inherits from its source."""

from collections.abc import Mapping
from pathlib import Path

import yaml

# What stays true of a quantized model (https://huggingface.co/docs/hub/model-cards).
INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
# What the texts begin with, and how the hub names them.
LICENSES = {"Apache License Version 2.0": "apache-2.0", "MIT License": "mit"}
_FENCE = "---"
_TEXT = "tag:yaml.org,2002:str"
# Of a file that is read, and of a word.
_MOST_BYTES, _LONGEST_WORD = 1 << 16, 500


def inherited_card(root: Path) -> Mapping[str, str | tuple[str, ...]]:
    """The keys of INHERITED in the folder's README.md; none where there is no card, or no valid one.

    Without a license there, that of the folder's LICENSE file where it is one of LICENSES.
    """
    fields = dict(_front_matter(root))
    if "license" not in fields and (license_ := _license(root)):
        fields["license"] = license_
    return fields


def _license(root: Path) -> str:
    """The hub's identifier of the license whose text the folder has; empty where that is not known."""
    for name in ("LICENSE", "LICENSE.txt", "LICENSE.md"):
        if text := _beginning(root / name):
            start = " ".join(text[:500].split())
            return next((key for title, key in LICENSES.items() if title in start), "")
    return ""


def _front_matter(root: Path) -> Mapping[str, str | tuple[str, ...]]:
    """The keys of INHERITED in the folder's card."""
    first, *rest = _beginning(root / "README.md").split(f"\n{_FENCE}", 1)
    if not rest or not first.startswith(_FENCE):
        return {}
    try:  # nodes alone: making values of them takes as long as aliases and merges say
        content = yaml.compose(first.removeprefix(_FENCE), yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return {}
    nodes = content.value if isinstance(content, yaml.MappingNode) else []
    fields = {key.value: _plain(node) for key, node in nodes if key.value in INHERITED}
    return {key: value for key, value in fields.items() if value}


def _plain(node: yaml.Node) -> str | tuple[str, ...]:
    """A word, or words; nothing where it is something else."""
    if isinstance(node, yaml.SequenceNode):
        words = tuple(_word(entry) for entry in node.value)
        return words if all(words) else ()
    return _word(node)


def _word(node: yaml.Node) -> str:
    is_word = node.tag == _TEXT and len(node.value) <= _LONGEST_WORD and node.value.isprintable()
    return str(node.value) if is_word else ""


def _beginning(file: Path) -> str:
    """Of a text; nothing of what is none."""
    try:
        if not file.is_file():
            return ""
        with file.open("rb") as stream:
            return stream.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
