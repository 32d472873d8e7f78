"""Check that the tokenizer, processor and chat template that vLLM needs exist and are JSON.

`load --dry` checks the contents of these files with transformers. A missing tokenizer is only a
warning, because vLLM can serve the checkpoint with another model's tokenizer (`--tokenizer`). It is
an error if tokenizer_config.json exists, because then the checkpoint should have a tokenizer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from vexport.architectures import transformers_models
from vexport.checkpoint.index import TOKENIZER_FILES
from vexport.checks.vllm.findings import error, info, warning
from vexport.checks.vllm.view import CheckpointView
from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.records import Finding, Severity

NAME = "tokenizer"
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
FIX = "copy the source's tokenizer"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")
MISTRAL = "tekken.json"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on the files next to the weights that vLLM needs at startup."""
    root = view.index.root
    for name, severity in JSON_FILES.items():
        if (root / name).is_file():
            yield from _invalid_file(root / name, severity)
    names = [path.name for path in view.index.side_files]
    has_tokenizer = any(TOKENIZER_FILES.match(name) for name in names)
    yield from _processor(view, names, error if has_tokenizer else warning)
    if has_tokenizer:
        yield from _template(root, names)
        return
    place, expected = str(root / TOKENIZER), "a tokenizer"
    if SETTINGS in names:
        yield error(
            NAME,
            place,
            claim="refused",
            expected=expected,
            got="no such file",
            fix=FIX,
            loader_faults=(),
        )
    else:
        got = "no tokenizer: `vllm serve` needs the option --tokenizer"
        yield warning(NAME, place, claim=None, expected=expected, got=got, fix=FIX)


def _processor(
    view: CheckpointView, names: Sequence[str], finding: Callable[..., Finding]
) -> Iterator[Finding]:
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
        processors, name = " or ".join(PROCESSORS), view.model.class_name
        expected = f"{processors}, which {name} needs for images, sound or video"
        got = "neither file: vLLM only starts with --language-model-only"
        fix = "copy the source's files"
        found = finding(
            NAME,
            str(view.index.root / PROCESSORS[0]),
            claim="refused",
            expected=expected,
            got=got,
            fix=fix,
        )
        yield replace(found, loader_faults=())


def _template(root: Path, names: Sequence[str]) -> Iterator[Finding]:
    """Report a missing chat template, without which `/v1/chat/completions` refuses requests.

    Source: resolve_chat_template in vllm/renderers/hf.py.
    """
    settings = root / SETTINGS
    try:
        in_settings = settings.is_file() and "chat_template" in read_json_object(settings)
    except InputError:
        return
    if not in_settings and MISTRAL not in names and not any(name in names for name in TEMPLATES):
        expected = "a chat template, if the model is used for chat"
        got = "no chat template: vLLM can complete text, but refuses chat requests"
        fix = "copy the source's chat template, or serve the model with --chat-template"
        yield info(NAME, str(root / TEMPLATES[0]), claim=None, expected=expected, got=got, fix=fix)


def _invalid_file(path: Path, severity: Severity) -> Iterator[Finding]:
    """Report a file that is not valid JSON, or not a valid tokenizer if it is tokenizer.json."""
    try:
        content = read_json_object(path)
        if path.name == TOKENIZER:
            open_tokenizer(path)
            if not isinstance(content.get("added_tokens"), list):
                raise InputError(
                    f"{path}: added_tokens",
                    got="no such list",
                    need="a list of added tokens",
                    fix=FIX,
                )
    except InputError as problem:
        yield Finding.of(problem, check=NAME, claim="refused", severity=severity)


def open_tokenizer(path: Path) -> Tokenizer:
    """Open a tokenizer file. Raises InputError with the library's message if that fails."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain Exception
        got = f"a file that the tokenizers library cannot open: {error}"
        raise InputError(
            str(path), got=got, need="a valid tokenizer", fix="copy the source's file"
        ) from error
