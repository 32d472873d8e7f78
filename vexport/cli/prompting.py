"""Options that say how both models are asked, under the names of lm-eval's command line, and what
decides.

All are named like the keys of a scenario's `evaluate`.
"""

import ast
import json
import re
from collections.abc import Iterator

import click

from vexport.cli.options import FOLDER, POSITIVE, Count, Real, option, stacked, switch
from vexport.records import BatchSize, Scalar
from vexport.records.accuracy import DEFAULT_CONCURRENCY, REQUEST_SECONDS

ABOVE_ZERO = Real(0, min_open=True)
GenerationValue = Scalar | list[Scalar] | dict[str, Scalar]
_WORDS: dict[str, Scalar] = {"true": True, "false": False, "none": None}
# A key's value: quoted text, a list or an object, or whatever comes before the next comma.
_PAIR = re.compile(r"""([A-Za-z_]\w*)=("[^"]*"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^,]*)(?:,|$)""")


def _generation(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, GenerationValue]:
    """Generation arguments as lm-eval takes them: K=V,... or a JSON object; a later one wins."""
    arguments: dict[str, GenerationValue] = {}
    for value in values:
        arguments |= dict(_generation_pairs(value))
    return arguments


def _generation_pairs(text: str) -> Iterator[tuple[str, GenerationValue]]:
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
            raise click.BadParameter(
                f"{text[at:]!r} is not K=V,... like temperature=0,max_gen_toks=512."
            )
        yield pair[1], _generation_value(pair[2].strip())
        at = pair.end()


def _generation_value(text: str) -> GenerationValue:
    """A Python literal, true, false or none; everything else is text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, str | int | float | list | dict) else text


def _batch_size(text: str) -> BatchSize:
    """`auto` or a number of requests. A type for click."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or not int(text):
        raise click.BadParameter(f"{text!r} is neither auto nor a number of requests.")
    return int(text)


def _gates(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """TASK -> METRIC[,FILTER]; without a task it is for all that have it."""
    gates: dict[str, str] = {}
    for value in values:
        task, _, metric = value.rpartition("=")
        if not metric or (task or "*") in gates:
            raise click.BadParameter(
                f"{value!r} is not [TASK=]METRIC[,FILTER], or its task is given twice."
            )
        gates[task or "*"] = metric
    return gates


prompting_options = stacked(
    option("--num-fewshot", "Examples in each prompt.", Count(0), "N"),
    switch("--apply-chat-template", "Apply the chat template [default: where there is one]."),
    option("--chat-template", "Which of several chat templates to apply.", metavar="NAME"),
    switch("--fewshot-as-multiturn", "Examples as turns [default: with a chat template]."),
    option("--system-instruction", "System prompt.", metavar="TEXT"),
    option(
        "--gen-kwargs",
        "Replace the tasks' generation arguments; repeatable.",
        metavar="K=V,...",
        multiple=True,
        callback=_generation,
    ),
    option("--seeds", "Sampled answers to each document [default: 1].", POSITIVE, "N", default=1),
    option(
        "--max-gen-toks", "Most new tokens where a task sets none [default: 256].", POSITIVE, "N"
    ),
    option("--think-end-token", "Score only what follows it, such as </think>.", metavar="TEXT"),
    switch("--enable-thinking", "Handed to the chat template [default: left to it]."),
    option(
        "--include-path",
        "Folder with more lm-eval tasks; repeatable.",
        FOLDER,
        "DIR",
        multiple=True,
    ),
    option(
        "--batch-size",
        "Requests that vLLM is given at once [default: auto, all].",
        _batch_size,
        "N|auto",
        default="auto",
    ),
    option(
        "--limit",
        "Use the first N documents of each task, below 1 a share of them.",
        ABOVE_ZERO,
        "N",
    ),
)
verdict_options = stacked(
    option(
        "--margin",
        "Acceptable loss: 0.02 is 2 points.",
        Real(0, 1, max_open=True),
        "M",
        default=0.02,
        shown=True,
    ),
    option(
        "--alpha",
        "Accepted probability of a wrong PASS.",
        Real(0, 0.5, min_open=True, max_open=True),
        "A",
        default=0.05,
        shown=True,
    ),
    option(
        "--gate",
        "Metric that decides; repeatable [default: exact_match, else acc].",
        metavar="[TASK=]METRIC[,FILTER]",
        multiple=True,
        callback=_gates,
    ),
)
drift_options = stacked(
    option(
        "--kl-limit",
        "Warn, with --text fail, above this mean KL [default: 0.1].",
        ABOVE_ZERO,
        "NATS",
    ),
    option("--nll-limit", "The same for the rise of the NLL [default: 0.05].", ABOVE_ZERO, "NATS"),
)
served_options = stacked(
    option("--tokenizer", "Folder or ORG/NAME of a served model's tokenizer.", metavar="T"),
    option("--model", "The model, where a server has several.", metavar="NAME"),
    option("--baseline-model", "The same for the baseline [default: --model].", metavar="NAME"),
    option(
        "--concurrency",
        "Requests under way at a server.",
        click.IntRange(1, 4096),
        "N",
        default=DEFAULT_CONCURRENCY,
        shown=True,
    ),
    option(
        "--request-timeout",
        "Longest time for one answer of a server [default: 300].",
        ABOVE_ZERO,
        "S",
        default=REQUEST_SECONDS,
    ),
    option(
        "--retry-seconds",
        "How long a server that fails is tried again [default: 300].",
        Real(0),
        "S",
        default=REQUEST_SECONDS,
    ),
)
