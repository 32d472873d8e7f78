"""Options that say how lm-eval asks the models, under the names of lm-eval's command line."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from vexport.cli.options import POSITIVE, Count, stacked
from vexport.records import BatchSize, Scalar

GenerationValues = dict[str, Scalar | list[Scalar] | dict[str, Scalar]]
_WORDS: dict[str, Scalar] = {"true": True, "false": False, "none": None}
# A key's value: quoted text, a list or an object, or whatever comes before the next comma.
_PAIR = re.compile(r"""([A-Za-z_]\w*)=("[^"]*"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^,]*)(?:,|$)""")

# Beyond any task; of larger numbers a float no longer tells one from the next.
MOST_DOCUMENTS = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The settings of lm-eval for both models, under the names of lm-eval's command line."""

    num_fewshot: int | None
    apply_chat_template: bool | None
    chat_template: str | None
    fewshot_as_multiturn: bool | None
    system_instruction: str | None
    gen_kwargs: GenerationValues
    seeds: int
    max_gen_toks: int | None
    think_end_token: str | None
    enable_thinking: bool | None
    include_path: tuple[Path, ...]
    batch_size: BatchSize
    limit: int | float | None

    def require_consistent(self) -> None:
        """UsageError where options do not go together."""
        if self.chat_template and self.apply_chat_template is False:
            raise click.UsageError("--chat-template names a template, --no-apply-chat-template applies none.")
        if self.fewshot_as_multiturn and self.apply_chat_template is False:
            raise click.UsageError(
                "--fewshot-as-multiturn needs a chat template: drop --no-apply-chat-template."
            )
        if self.seeds > 1 and not self.gen_kwargs.get("temperature"):
            raise click.UsageError("--seeds needs answers that differ: --gen-kwargs temperature=0.6.")
        if self.enable_thinking and not self.think_end_token:
            raise click.UsageError(
                "--enable-thinking needs --think-end-token, to cut the thinking off answers."
            )


def _generation(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> GenerationValues:
    """Generation arguments as lm-eval takes them: K=V,... or a JSON object; a later one wins."""
    arguments: GenerationValues = {}
    for value in values:
        arguments |= dict(_generation_pairs(value))
    return arguments


def _generation_pairs(text: str) -> Iterator[tuple[str, Scalar | list[Scalar] | dict[str, Scalar]]]:
    if text.lstrip().startswith("{"):
        try:
            yield from json.loads(text).items()
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is not a JSON object ({error}).") from None
        return
    at = 0
    while at < len(text):
        pair = _PAIR.match(text, at)
        if pair is None:
            raise click.BadParameter(f"{text[at:]!r} is not K=V,... like temperature=0,max_gen_toks=512.")
        yield pair[1], _generation_value(pair[2].strip())
        at = pair.end()


def _generation_value(text: str) -> Scalar | list[Scalar] | dict[str, Scalar]:
    """A Python literal, true, false or none; everything else is text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, str | int | float | list | dict) else text


def _documents(text: str) -> int | float:
    """A number of documents, or a share of them below 1. A type for click."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= MOST_DOCUMENTS or number >= 1 and number != int(number):
        raise click.BadParameter(f"{text!r} is neither a number of documents nor a share below 1.")
    return number if number < 1 else int(number)


def _batch_size(text: str) -> BatchSize:
    """`auto` or a number of requests. A type for click."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or not int(text):
        raise click.BadParameter(f"{text!r} is neither auto nor a number of requests.")
    return int(text)


prompting_options = stacked(
    click.option("--num-fewshot", type=Count(0), metavar="N", help="Examples in each prompt."),
    click.option(
        "--apply-chat-template/--no-apply-chat-template",
        default=None,
        help="Apply the chat template [default: where there is one].",
    ),
    click.option("--chat-template", metavar="NAME", help="Which of several chat templates to apply."),
    click.option(
        "--fewshot-as-multiturn/--no-fewshot-as-multiturn",
        default=None,
        help="Examples as turns [default: with a chat template].",
    ),
    click.option("--system-instruction", metavar="TEXT", help="System prompt."),
    click.option(
        "--gen-kwargs",
        multiple=True,
        metavar="K=V,...",
        callback=_generation,
        help="Replace the tasks' generation arguments; repeatable.",
    ),
    click.option(
        "--seeds",
        type=POSITIVE,
        default=1,
        metavar="N",
        help="Sampled answers to each document [default: 1].",
    ),
    click.option(
        "--max-gen-toks",
        type=POSITIVE,
        metavar="N",
        help="Most new tokens where a task sets none [default: 256].",
    ),
    click.option("--think-end-token", metavar="TEXT", help="Score only what follows it, such as </think>."),
    click.option(
        "--enable-thinking/--no-enable-thinking",
        default=None,
        help="Handed to the chat template [default: left to it].",
    ),
    click.option(
        "--include-path",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        multiple=True,
        metavar="DIR",
        help="Folder with more lm-eval tasks; repeatable.",
    ),
    click.option(
        "--batch-size",
        type=_batch_size,
        default="auto",
        metavar="N|auto",
        help="Requests that vLLM is given at once [default: auto, all].",
    ),
    click.option(
        "--limit",
        type=_documents,
        metavar="N",
        help="Use the first N documents of each task, below 1 a share of them.",
    ),
)
