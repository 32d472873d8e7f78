"""What differs between two models before either computes: tokens, chat template, when to stop."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vexport.engine.prompts import Prompts
from vexport.evaluation.drift import Scored
from vexport.files import read_json_object
from vexport.types import Json

CONVERSATION = (
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
)
_NOTES = ("transformers_version", "_from_model_config")
_SHOWN = 60


def differences(baseline: Scored, candidate: Scored) -> Iterator[str]:
    """Yield a sentence for each thing that makes the candidate read, or end, unlike the baseline."""
    roots = baseline.checkpoint, candidate.checkpoint
    yield from _other_tokens(baseline.prompts, candidate.prompts)
    yield from other_template(*roots)
    yield from _other_settings(*map(_generation, roots))


def _other_tokens(old: Prompts, new: Prompts) -> Iterator[str]:
    if old.tokens == new.tokens:
        return
    for before, after in zip(old.tokens, new.tokens, strict=False):
        if before != after:
            yield f"tokenizer: a prompt becomes the tokens {_short(after)}, the baseline's {_short(before)}"
            return
    yield f"tokenizer: it knows {len(new.tokens)} of the prompts, the baseline's {len(old.tokens)}"


def other_template(old: Path, new: Path) -> Iterator[str]:
    """Yield a sentence where the checkpoint `new` renders a conversation unlike `old`."""
    before, after = (_rendered(AutoTokenizer.from_pretrained(root)) for root in (old, new))
    if before != after:
        at = next((i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), 0)
        yield (
            f"chat template: a conversation becomes {_short(after[at:])} from character {at} on, "
            f"the baseline's {_short(before[at:])}"
        )


def _rendered(tokenizer: PreTrainedTokenizerBase) -> str:
    """A conversation as the model would read it; transformers renders templates in a sandbox."""
    if not tokenizer.chat_template:
        return "(no chat template)"
    try:
        return str(
            tokenizer.apply_chat_template(list(CONVERSATION), tokenize=False, add_generation_prompt=True)
        )
    except Exception as error:  # a template may raise anything
        return f"({type(error).__name__}: {error})"


def _generation(root: Path) -> Mapping[str, Json]:
    file = root / "generation_config.json"
    return read_json_object(file) if file.is_file() else {}


def _other_settings(old: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[str]:
    for name in sorted({*old, *new}.difference(_NOTES)):
        if old.get(name) != new.get(name):
            yield f"generation_config.json: {name} is {new.get(name)!r}, the baseline's {old.get(name)!r}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
