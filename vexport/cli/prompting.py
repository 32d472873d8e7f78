"""Parsers for options about tasks and prompts, with the names of lm-eval's command line.

The settings themselves are keys of a scenario's `evaluate` section.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from vexport.cli.arguments import parse_json
from vexport.cli.options import FOLDER, PATH, option
from vexport.cli.settings import Syntax, given_settings
from vexport.errors import InputError
from vexport.names import parse_source, user_text
from vexport.records import BatchSize, Scalar
from vexport.records.chosen_metric import CHOSEN_METRIC_NEED, parse_chosen_metric
from vexport.records.margin import EVERY_TASK, MarginSetting, MarginValue, parse_margin
from vexport.rules import usage as rules

if TYPE_CHECKING:
    from vexport.scenario import Evaluate

GenerationValue = Scalar | list[Scalar] | dict[str, Scalar]
_WORDS: dict[str, Scalar] = {"true": True, "false": False, "none": None}
# A key and its value: quoted text, a list, an object, or all text up to the next comma.
_PAIR = re.compile(r"""([A-Za-z_]\w*)=("[^"]*"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^,]*)(?:,|$)""")


def _generation(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, GenerationValue]:
    """Parse generation arguments as lm-eval does: K=V,... or a JSON object.

    If an argument is given twice, its last value is used.
    """
    arguments: dict[str, GenerationValue] = {}
    for value in values:
        arguments |= dict(_generation_pairs(value))
    return arguments


def _generation_pairs(text: str) -> Iterator[tuple[str, GenerationValue]]:
    if text.lstrip().startswith("{"):
        try:
            given = parse_json(text)
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is not a JSON object ({error}).") from None
        yield from cast("dict[str, GenerationValue]", given).items()
        return
    at = 0
    while at < len(text):
        pair = _PAIR.match(text, at)
        if pair is None:
            raise click.BadParameter(
                f"{text[at:]!r} does not have the form K=V,... (temperature=0,max_gen_toks=512)."
            )
        yield pair[1], _generation_value(pair[2].strip())
        at = pair.end()


def _generation_value(text: str) -> GenerationValue:
    """Parse a Python literal, true, false or none. All other values stay text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, str | int | float | list | dict) else text


def _batch_size(text: str) -> BatchSize:
    """Parse `auto` or a number of requests. A type for click."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or not int(text):
        raise click.BadParameter(f"{text!r} is neither auto nor a number of requests.")
    return int(text)


def _gates(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Parse [TASK=]METRIC[:higher|:lower][,FILTER] into a map from tasks to the rest.

    The key `*` stands for all tasks that have the metric.
    """
    gates: dict[str, str] = {}
    for value in values:
        task, _, metric = value.rpartition("=")
        try:
            parse_chosen_metric(metric)
        except ValueError:
            need = f"[TASK=]{CHOSEN_METRIC_NEED}"
            raise click.BadParameter(f"{value!r}: need {need}.") from None
        if (task or EVERY_TASK) in gates:
            which = f"task {task}" if task else "all tasks"
            raise click.BadParameter(f"the metric of {which} is given twice.")
        gates[task or EVERY_TASK] = metric
    return gates


def _margins(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> MarginSetting:
    """Return the margin for all tasks, or margins by task. `*` stands for all other tasks."""
    margins: dict[str, MarginValue] = {}
    for text in values:
        task, _, margin = text.rpartition("=")
        try:
            parsed = parse_margin(margin)
        except ValueError as error:
            raise click.BadParameter(f"{text!r}: need {error}.") from None
        if (task or EVERY_TASK) in margins:
            which = f"task {task}" if task else "all tasks"
            raise click.BadParameter(f"the margin of {which} is given twice.")
        margins[task or EVERY_TASK] = parsed.setting
    only = margins.get(EVERY_TASK)
    return only if only is not None and len(margins) == 1 else margins or None


def _tasks(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """Split values at commas into tasks. A value that is an existing path is one task."""
    names: list[str] = []
    for value in values:
        parts = [value] if Path(value).exists() else value.split(",")
        names += [user_text(part.strip()) for part in parts if part.strip()]
    return tuple(names)


EVALUATE_SYNTAXES: Mapping[str, Syntax] = {
    "tokenizer": Syntax(whole=parse_source),
    "speculative": Syntax(whole=user_text),
    "tasks": Syntax(combine=_tasks),
    "gen_kwargs": Syntax(combine=_generation),
    "gate": Syntax(combine=_gates),
    "margin": Syntax(item=click.STRING, combine=_margins),
    "batch_size": Syntax(whole=_batch_size),
    "include_path": Syntax(item=FOLDER),
    "tools": Syntax(whole=PATH),
}
chat_template_option = option(
    "--chat-template",
    "Name of the chat template to apply, if the model has several.",
    metavar="NAME",
    heading="Prompts",
)


def given_evaluation() -> dict[str, object]:
    """Return the settings of the evaluation that the user gave, by key of `Evaluate`."""
    keys = given_settings("evaluate")
    options = click.get_current_context().params
    if options["chat_template"]:
        if options["apply_chat_template"] is False:
            other, remedy = "--no-apply-chat-template", "remove one of the two"
            raise InputError.of(rules.EXCLUDED, "--chat-template", other=other, remedy=remedy)
        keys["apply_chat_template"] = options["chat_template"]
    return keys


def evaluation_settings(command: str, keys: Mapping[str, object]) -> "Evaluate":
    """Return the settings with these keys. Paths in `include_path` and `tools` are made
    absolute.

    Raises InputErrors if the settings are not valid together.
    """
    from vexport.scenario import Evaluate, problems_at

    with problems_at(command):
        settings = Evaluate.model_validate(dict(keys))
    folders = tuple(path.resolve() for path in settings.include_path)
    tools = settings.tools.resolve() if settings.tools else None
    return settings.model_copy(update={"include_path": folders, "tools": tools})
