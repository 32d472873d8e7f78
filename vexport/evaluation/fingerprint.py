"""What could change a score: named, so that a change of it can be named."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter

from vexport.checkpoint.chat_template import DEFAULT, chat_templates, template_digest
from vexport.checkpoint.chat_template import FILE as TEMPLATE_FILE
from vexport.checkpoint.hub.names import pinned_name
from vexport.checkpoint.index import weight_files
from vexport.files import digest_file, read_json_object, write_text
from vexport.types import EngineInfo, device_words
from vexport.version import __version__

Fingerprint = Mapping[str, str]
"""Name of a circumstance (`vllm`, `dtype`, `task hash of gsm8k`) -> its value in words."""

FILE = "fingerprint.json"
"""Next to lm-eval's results: what lm-eval does not record."""
MODEL = "model"
REVISION = "model's revision on the hub"
TASK_HASH = "task hash of "
CHAT_TEMPLATE, SYSTEM_INSTRUCTION = "chat template", "system instruction"
MULTITURN, FEWSHOT = "few-shot as multiturn", "few-shot examples of "
GEN_KWARGS = "gen kwargs"
_ABSENT = {
    CHAT_TEMPLATE: "not applied",
    SYSTEM_INSTRUCTION: "none",
    GEN_KWARGS: "the tasks' own",
    "max gen toks": "256",
    "think end token": "none",
    "enable thinking": "left to the chat template",
}
"""What it means where lm-eval, or an accepted baseline, tells nothing of it: lm-eval's defaults."""
EMULATED = "emulated kernels"
"""Follows from the scheme, so that a model and its quantized one differ in it: the blind spots say so."""
COMPILATION = "compilation"
_BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    TEMPLATE_FILE,
)


def changed_names(old: Fingerprint, new: Fingerprint) -> list[str]:
    """What both sides tell, and tell differently."""
    names = [*old, *(name for name in _ABSENT if name in new and name not in old)]
    differ = [name for name in names if name in {*new, *_ABSENT} and _value(old, name) != _value(new, name)]
    follows = f"{GEN_KWARGS} of " if GEN_KWARGS in differ else None
    return [name for name in differ if not (follows and name.startswith(follows))]


def changes(old: Fingerprint, new: Fingerprint, *, where: tuple[str, str]) -> tuple[str, ...]:
    """A sentence for each change; `where` names the sides."""
    return tuple(
        f"{name}: {_value(old, name)} {where[0]}, {_value(new, name)} {where[1]}"
        for name in changed_names(old, new)
    )


def causes(old: Fingerprint, new: Fingerprint, task: str) -> list[str]:
    """Everything that differs, what makes the task's prompts differ first and with both values."""
    names = [name for name in changed_names(old, new) if name != MODEL]
    shaping = (CHAT_TEMPLATE, SYSTEM_INSTRUCTION, MULTITURN, f"{FEWSHOT}{task}")
    prompts = [
        f"{name} ({_value(new, name)}, the baseline's: {_value(old, name)})"
        for name in names
        if name in shaping
    ]
    return [*prompts, *(name for name in names if name not in shaping)]


def _value(side: Fingerprint, name: str) -> str:
    return side.get(name, _ABSENT.get(name, "none"))


def engine_fingerprint(root: Path, engine: EngineInfo) -> Fingerprint:
    """Of a checkpoint's bytes and what ran it."""
    pinned = pinned_name(root)
    return ({REVISION: pinned} if pinned else {}) | {
        MODEL: model_digest(root),
        "model's chat template": _template_digest(root),
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


def device_of(fingerprint: Fingerprint) -> str:
    """What ran the model, as EngineInfo.device; empty where that is not known."""
    if "platform" not in fingerprint:
        return ""
    return device_words(
        fingerprint["platform"],
        fingerprint.get("processor", ""),
        emulated=fingerprint.get(EMULATED) == "True",
        compilation=fingerprint.get(COMPILATION, ""),
    )


def model_digest(root: Path) -> str:
    """SHA-256, shortened to 16 digits, of a checkpoint's weights, config and tokenizer by content."""
    files = [*weight_files(root), *(file for name in _BESIDE_WEIGHTS if (file := root / name).is_file())]
    lines = sorted(f"{file.name} {digest_file(file)}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _template_digest(root: Path) -> str:
    """Of the template that is used where none is named, else of all of them."""
    templates = chat_templates(root)
    if not templates:
        return "none"
    return template_digest(templates.get(DEFAULT) or str(sorted(templates.items())))


def write_fingerprint(folder: Path, fingerprint: Fingerprint) -> None:
    """Put it next to lm-eval's results."""
    write_text(folder / FILE, TypeAdapter(Fingerprint).dump_json(fingerprint, indent=2).decode() + "\n")


def read_fingerprint(folder: Path) -> Fingerprint:
    """What `write_fingerprint` wrote; nothing in a folder made elsewhere."""
    if not (folder / FILE).is_file():
        return {}
    return {name: str(value) for name, value in read_json_object(folder / FILE).items()}
