"""The front matter of a model card: what a quantized model inherits from its source."""

from collections.abc import Mapping
from pathlib import Path

import yaml

# What stays true of a quantized model (https://huggingface.co/docs/hub/model-cards).
INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
# What the texts begin with, and how the hub names them.
LICENSES = {"Apache License Version 2.0": "apache-2.0", "MIT License": "mit"}
_FENCE = "---"


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
        try:
            start = " ".join((root / name).read_text(encoding="utf-8")[:500].split())
        except (OSError, UnicodeDecodeError):
            continue
        return next((key for title, key in LICENSES.items() if title in start), "")
    return ""


def _front_matter(root: Path) -> Mapping[str, str | tuple[str, ...]]:
    """The keys of INHERITED in the folder's card."""
    try:
        text = (root / "README.md").read_text(encoding="utf-8")
        first, *rest = text.split(f"\n{_FENCE}", 1)
        content = yaml.safe_load(first.removeprefix(_FENCE)) if rest and first.startswith(_FENCE) else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    if not isinstance(content, dict):
        return {}
    fields = {key: _plain(content.get(key)) for key in INHERITED}
    return {key: value for key, value in fields.items() if value}


def _plain(value: object) -> str | tuple[str, ...]:
    """A word, or words; nothing where it is something else."""
    if isinstance(value, list):
        return tuple(value) if all(isinstance(entry, str) for entry in value) else ()
    return value if isinstance(value, str) else ""
