"""Fingerprint of an evaluated model: circumstances that may change its responses.

The file is next to lm-eval's results, which do not contain these circumstances.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from vexport.checkpoint.chat_template import DEFAULT, chat_templates, template_digest
from vexport.checkpoint.chat_template import FILE as TEMPLATE_FILE
from vexport.checkpoint.hub import pinned_name
from vexport.checkpoint.index import weight_files
from vexport.files import digest_file, read_json_object, write_text
from vexport.outputs.manifest import record
from vexport.records import EngineInfo
from vexport.version import __version__

Fingerprint = Mapping[str, str]
"""Maps the name of a circumstance (`vllm`, `dtype`, `task hash of gsm8k`) to its value in words."""

FILE = "fingerprint.json"
MODEL = "model"
ENDPOINT = "endpoint"
REVISION = "model's revision on the hub"
TEMPLATE = "model's chat template"
EMULATED = "emulated kernels"
"""Key of the emulated kernels.

They depend on the scheme, so a model and its quantized version have different values. The report
lists emulated kernels as blind spots.
"""
COMPILATION = "compilation"
_DIGESTED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    TEMPLATE_FILE,
)


def engine_fingerprint(root: Path, engine: EngineInfo) -> Fingerprint:
    """Return the fingerprint of a checkpoint's files and of the engine that ran it."""
    pinned = pinned_name(root)
    return ({REVISION: pinned} if pinned else {}) | {
        MODEL: model_digest(root),
        TEMPLATE: template_of(root),
        "vexport": __version__,
        "vllm": engine.vllm,
        "torch": engine.torch,
        "platform": engine.platform,
        "processor": engine.processor,
        "dtype": engine.dtype,
        **({COMPILATION: engine.compilation} if engine.compilation else {}),
        EMULATED: str(engine.emulated),
        **engine.settings,
    }


def model_digest(root: Path) -> str:
    """Return a digest of the contents of a checkpoint's weights, config and tokenizer.

    It is a SHA-256, shortened to 16 digits.
    """
    files = [
        *weight_files(root),
        *(file for name in _DIGESTED_FILES if (file := root / name).is_file()),
    ]
    lines = sorted(f"{file.name} {digest_file(file)}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def template_of(root: Path) -> str:
    """Return the digest of the default chat template.

    If there are templates but no default, the digest covers all templates. Returns "none" if the
    model has no template.
    """
    templates = chat_templates(root)
    return (
        template_digest(templates.get(DEFAULT) or str(sorted(templates.items())))
        if templates
        else "none"
    )


def write_fingerprint(folder: Path, fingerprint: Fingerprint) -> None:
    """Write a fingerprint next to lm-eval's results."""
    record(folder / FILE)
    write_text(folder / FILE, json.dumps(fingerprint, indent=2, ensure_ascii=False) + "\n")


def read_fingerprint(folder: Path) -> Fingerprint:
    """Read the fingerprint in a folder. It is empty if the folder has no such file."""
    if not (folder / FILE).is_file():
        return {}
    return {name: str(value) for name, value in read_json_object(folder / FILE).items()}
