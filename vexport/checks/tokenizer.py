"""Check that the tokenizer, processor and chat template that vLLM needs exist and are JSON.

`load --dry` checks the contents of these files with transformers. A missing tokenizer is only a
warning, because vLLM can serve the checkpoint with another model's tokenizer (`--tokenizer`). It is
an error if tokenizer_config.json exists, because then the checkpoint should have a tokenizer.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from vexport.architectures import transformers_models
from vexport.checkpoint.chat_template import DEFAULT, FILE, chat_templates
from vexport.checkpoint.index import TOKENIZER_FILES
from vexport.checks.vllm.view import CheckpointView
from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.records import Finding, Severity
from vexport.rules import tokenizer as rules

TOKENIZER = "tokenizer.json"
DESCRIPTION = (
    "vLLM finds the files that it needs at startup: a valid tokenizer, its settings, a processor"
)
SETTINGS = "tokenizer_config.json"
# vLLM starts without a generation config if it cannot read the file.
JSON_FILES: Mapping[str, Severity] = {
    TOKENIZER: "error",
    SETTINGS: "error",
    "generation_config.json": "warning",
}
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
MISTRAL = "tekken.json"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on the files next to the weights that vLLM needs at startup."""
    root = view.index.root
    for name, severity in JSON_FILES.items():
        if (root / name).is_file():
            yield from _invalid_file(root / name, severity)
    names = [path.name for path in view.index.side_files]
    has_tokenizer = any(TOKENIZER_FILES.match(name) for name in names)
    yield from _processor(view, names, is_needed=has_tokenizer)
    if has_tokenizer:
        yield from _template(root, names)
        return
    place = str(root / TOKENIZER)
    if SETTINGS in names:
        yield Finding.at(rules.LOST_TOKENIZER, place, settings=SETTINGS)
    else:
        yield Finding.at(rules.NO_TOKENIZER, place)


def _processor(view: CheckpointView, names: Sequence[str], *, is_needed: bool) -> Iterator[Finding]:
    """Report a missing processor config of a multimodal transformers class.

    vLLM reads the file at startup (get_processor and get_image_processor in
    transformers_utils/processor.py). Models with Mistral's tokenizer (tekken.json) need no such
    file.
    """
    kind = str(view.index.config.get("model_type"))
    if (
        not view.model.architecture.language_model
        or transformers_models(kind, view.model.version) is None
        or MISTRAL in names
    ):
        return
    if not any(name in names for name in PROCESSORS):
        rule = rules.NO_PROCESSOR if is_needed else rules.NO_PROCESSOR.as_warning
        where = str(view.index.root / PROCESSORS[0])
        yield Finding.at(rule, where, files=PROCESSORS, model=view.model.class_name)


def _template(root: Path, names: Sequence[str]) -> Iterator[Finding]:
    """Report a missing chat template, without which `/v1/chat/completions` refuses requests.

    vLLM uses a template with a name only if a request or `--chat-template` names it.

    Source: resolve_chat_template in vllm/renderers/hf.py.
    """
    try:
        has_template = DEFAULT in chat_templates(root)
    except InputError:
        return
    if not has_template and MISTRAL not in names:
        yield Finding.at(rules.NO_CHAT_TEMPLATE, str(root / FILE))


def _invalid_file(path: Path, severity: Severity) -> Iterator[Finding]:
    try:
        content = read_json_object(path)
        if path.name == TOKENIZER:
            open_tokenizer(path)
    except InputError as problem:
        yield Finding.of(problem, check="tokenizer", claim="refused", severity=severity)
        return
    if path.name == TOKENIZER and not isinstance(content.get("added_tokens"), list):
        yield Finding.at(rules.NO_ADDED_TOKENS, f"{path}: added_tokens")


def open_tokenizer(path: Path) -> Tokenizer:
    """Open a tokenizer file. Raises InputError with the library's message if that fails."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain Exception
        raise InputError.of(rules.UNREADABLE, str(path), reason=str(error)) from error
