"""Chat templates of a checkpoint, read without running any code.

The places and their order follow `from_pretrained` of tokenizers and processors in transformers
5.19, and `resolve_chat_template` in vllm/renderers/hf.py (0.32). The processor has priority over
the tokenizer.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from vexport.errors import InputError, require_working_disk
from vexport.files import digest_bytes, read_json_object
from vexport.records import Json
from vexport.rules import checkpoint as rules

DEFAULT = "default"
"""Name of the template that is used if no name is given."""
FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"
_SETTINGS = ("chat_template.json", "processor_config.json", "tokenizer_config.json")
DIGITS = 16
"""Digits of a template's SHA-256 that vexport shows."""


def chat_templates(root: Path) -> Mapping[str, str]:
    """Return a checkpoint's Jinja templates by name; a template without a name is DEFAULT.

    Raises InputError if a file cannot be read.
    """
    if files := dict(_files(root)):
        return files
    for name in _SETTINGS:
        if (file := root / name).is_file() and (
            templates := _templates_by_name(read_json_object(file).get("chat_template"))
        ):
            return templates
    return {}


def named_template_files(root: Path) -> list[str]:
    """Return the paths of the templates in the templates folder, relative to the checkpoint."""
    return [f"{_FOLDER}/{file.name}" for file in _named_files(root)]


def copy_named_templates(root: Path, folder: Path) -> None:
    """Copy the templates folder. A checkpoint's `side_files` do not include it."""
    for file in _named_files(root):
        (folder / _FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(file, folder / _FOLDER / file.name)


def template_digest(text: str) -> str:
    """Return the first digits of a template's SHA-256.

    lm-eval records all digits as `chat_template_sha`.
    """
    return digest_bytes(text.encode())[:DIGITS]


def _files(root: Path) -> Iterator[tuple[str, str]]:
    if (root / FILE).is_file():
        yield DEFAULT, _read(root / FILE)
    for file in _named_files(root):
        yield file.stem, _read(file)


def _named_files(root: Path) -> list[Path]:
    return sorted(file for file in (root / _FOLDER).glob("*.jinja") if file.is_file())


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        require_working_disk(error, file)
        raise InputError.of(rules.TEMPLATE, str(file), reason=str(error)) from None


def _templates_by_name(value: Json) -> dict[str, str]:
    """Return templates by name from a single text, a mapping, or a list of objects.

    The objects have `name` and `template`.
    """
    if isinstance(value, str):
        return {DEFAULT: value} if value else {}
    if isinstance(value, list):
        objects = [entry for entry in value if isinstance(entry, dict)]
        value = {str(entry.get("name")): entry.get("template") for entry in objects}
    named = value if isinstance(value, dict) else {}
    return {name: text for name, text in named.items() if isinstance(text, str)}
