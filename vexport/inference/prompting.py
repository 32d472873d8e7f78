"""Choose lm-eval's settings for the prompts of both models, before an engine starts.

This module also finds differences between the models' prompts: tokens, chat templates, stop
conditions.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vexport.checkpoint.chat_template import DEFAULT, chat_templates
from vexport.errors import InputError, raise_all
from vexport.files import read_json_object
from vexport.inference.answers import ServedSession
from vexport.inference.shipped import takes_tools
from vexport.records import Json
from vexport.records.patterns import TEMPLATE_SECONDS, time_limit
from vexport.rules import prompts as rules
from vexport.rules import tools as tool_rules
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import LmEvalSettings, ResponseSettings

CONVERSATION = (
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
)
TOOL = {
    "type": "function",
    "function": {
        "name": "capital_of",
        "description": "Return the capital of a country.",
        "parameters": {
            "type": "object",
            "properties": {"country": {"type": "string"}},
            "required": ["country"],
        },
    },
}
_IGNORED_KEYS = ("transformers_version", "_from_model_config")
_MAX_SHOWN = 60


def lm_eval_settings(settings: Evaluate, models: Mapping[str, Path]) -> LmEvalSettings:
    """Return lm-eval's settings for `models`, which maps the role of each model to its folder.

    If there is a baseline, it is the first of `models`. By default, the chat template is applied if
    the models have one, but not to tasks that score plain text. Raises InputError if a model lacks
    the requested template, if only some models have a template, if the models render a conversation
    differently, or if `fewshot_as_multiturn` is set without a template.
    """
    template = _template(settings, {role: chat_templates(root) for role, root in models.items()})
    if template:
        (first, root), *others = models.items()
        for role, other in others:
            is_same = chat_templates(root) == chat_templates(other)
            tools = takes_tools(settings)
            for difference in () if is_same else template_difference(root, other, tools=tools):
                where = f"{role} {other}"
                raise InputError.of(rules.OTHER_TEMPLATE, where, difference=difference, other=first)
    elif settings.fewshot_as_multiturn:
        role, root = next(iter(models.items()))
        raise InputError.of(rules.MULTITURN, f"{role} {root}")
    multiturn = settings.fewshot_as_multiturn
    given = settings.model_dump(include={*ResponseSettings.model_fields})
    decided = {
        "apply_chat_template": template,
        "no_template_for_plain_text": bool(template) and settings.apply_chat_template is None,
        "fewshot_as_multiturn": bool(template) if multiturn is None else multiturn,
    }
    return LmEvalSettings(**{**given, **decided})


def require_tools(role: str, checkpoint: Path, settings: Evaluate) -> None:
    """Raise InputError if an engine cannot evaluate tasks with tools for a checkpoint.

    The settings must have a parser of calls, and the chat template must list the tools.
    """
    if not takes_tools(settings):
        return
    if settings.tool_call_parser is None:
        raise InputError.of(tool_rules.NO_PARSER, f"{role} {checkpoint}")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    name = settings.apply_chat_template
    template = name if isinstance(name, str) else None
    with_tools, without = (
        _rendered(tokenizer, tools=tools, template=template) for tools in (True, False)
    )
    if with_tools == without:
        raise InputError.of(tool_rules.NO_TEMPLATE, f"{role} {checkpoint}: chat template")


def _template(settings: Evaluate, templates: Mapping[str, Mapping[str, str]]) -> bool | str:
    asked = settings.apply_chat_template
    if asked is False or (asked is None and not any(templates.values())):
        return False
    name = asked if isinstance(asked, str) else DEFAULT
    raise_all(
        [_missing_template(role, name, of) for role, of in templates.items() if name not in of]
    )
    return asked if isinstance(asked, str) else True


def _missing_template(role: str, name: str, templates: Mapping[str, str]) -> InputError:
    where = f"{role}: chat template"
    if not templates:
        return InputError.of(rules.NO_TEMPLATE, where)
    return InputError.of(rules.NO_SUCH_TEMPLATE, where, name=name, names=sorted(templates))


def differences(baseline: ServedSession, candidate: ServedSession) -> Iterator[str]:
    """Yield each difference in tokens, chat template and generation_config.json as a sentence."""
    roots = baseline.checkpoint, candidate.checkpoint
    old, new = baseline.prompts.tokens, candidate.prompts.tokens
    differ = next(((x, y) for x, y in zip(old, new, strict=False) if x != y), None)
    if differ:
        before, after = map(_short, differ)
        yield f"tokenizer: a prompt has the tokens {after}, but {before} in the baseline"
    elif len(old) != len(new):
        yield (
            f"tokenizer: it can encode {len(new)} of the prompts, and the baseline's tokenizer "
            f"{len(old)}"
        )
    yield from template_difference(*roots)
    settings, others = map(_generation, roots)
    for name in sorted({*settings, *others}.difference(_IGNORED_KEYS)):
        if settings.get(name) != others.get(name):
            values = f"{others.get(name)!r}, but {settings.get(name)!r} in the baseline"
            yield f"generation_config.json: {name} is {values}"


def template_difference(old: Path, new: Path, *, tools: bool = False) -> Iterator[str]:
    """Yield a sentence if the checkpoint `new` renders a conversation differently from `old`.

    With `tools`, the conversation has a tool.
    """
    tokenizers = (AutoTokenizer.from_pretrained(root) for root in (old, new))
    before, after = (_rendered(tokenizer, tools=tools) for tokenizer in tokenizers)
    if before != after:
        at = next((i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), 0)
        yield (
            f"chat template: from character {at} on, a conversation is {_short(after[at:])}, but "
            f"{_short(before[at:])} in the baseline"
        )


def _rendered(
    tokenizer: PreTrainedTokenizerBase, *, tools: bool = False, template: str | None = None
) -> str:
    """Render a conversation as a prompt, or return the error of the template in parentheses.

    transformers renders templates in a sandbox.
    """
    if not tokenizer.chat_template:
        return "(no chat template)"
    try:
        with time_limit(TEMPLATE_SECONDS):
            return str(
                tokenizer.apply_chat_template(
                    list(CONVERSATION),
                    tokenize=False,
                    add_generation_prompt=True,
                    tools=[dict(TOOL)] if tools else None,
                    chat_template=template,
                )
            )
    except Exception as error:  # a template may raise anything
        return f"({type(error).__name__}: {error})"


def _generation(root: Path) -> Mapping[str, Json]:
    file = root / "generation_config.json"
    return read_json_object(file) if file.is_file() else {}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
