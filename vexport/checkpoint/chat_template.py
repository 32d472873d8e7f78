"""The chat templates of a checkpoint, read without running any code.

Places and their order: `from_pretrained` of tokenizers and processors in transformers 5.19, and
`resolve_chat_template` in vllm/renderers/hf.py (0.32), which asks the processor before the
tokenizer.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from vexport.errors import InputError, require_working_disk
from vexport.files import digest_bytes, read_json_object
from vexport.records import Json

DEFAULT = "default"
"""The template that is used where none is named."""
FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"
_SETTINGS = ("chat_template.json", "processor_config.json", "tokenizer_config.json")
DIGITS = 16
"""Of a template's SHA-256, as vexport shows it."""


def chat_templates(root: Path) -> Mapping[str, str]:
    """The Jinja texts of a checkpoint's templates by name; one without a name is DEFAULT.

    Raises InputError for a file that cannot be read.
    """
    if files := dict(_files(root)):
        return files
    for name in _SETTINGS:
        if (file := root / name).is_file() and (
            templates := _named(read_json_object(file).get("chat_template"))
        ):
            return templates
    return {}


def named_template_files(root: Path) -> list[str]:
    """Return the paths of the templates in their own folder, relative to the checkpoint."""
    return [f"{_FOLDER}/{file.name}" for file in _named_files(root)]


def copy_named_templates(root: Path, folder: Path) -> None:
    """Copy the templates in their own folder, which is not among a checkpoint's `side_files`."""
    for file in _named_files(root):
        (folder / _FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(file, folder / _FOLDER / file.name)


def template_digest(text: str) -> str:
    """The first digits of a template's SHA-256; lm-eval records all of them as
    `chat_template_sha`.
    """
    return digest_bytes(text.encode())[:DIGITS]


def _files(root: Path) -> Iterator[tuple[str, str]]:
    if (root / FILE).is_file():
        yield DEFAULT, _read(root / FILE)
    for file in _named_files(root):
        yield file.stem, _read(file)


def _named_files(root: Path) -> list[Path]:
    """The templates in their own folder; what is no file, as a device, is none."""
    return sorted(file for file in (root / _FOLDER).glob("*.jinja") if file.is_file())


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        require_working_disk(error, file)
        fix = "copy the source's file"
        raise InputError(str(file), got=str(error), need="a readable template", fix=fix) from None


def _named(value: Json) -> dict[str, str]:
    """One text, or several as a mapping or as a list of objects with `name` and `template`."""
    if isinstance(value, str):
        return {DEFAULT: value} if value else {}
    if isinstance(value, list):
        objects = [entry for entry in value if isinstance(entry, dict)]
        value = {str(entry.get("name")): entry.get("template") for entry in objects}
    named = value if isinstance(value, dict) else {}
    return {name: text for name, text in named.items() if isinstance(text, str)}
