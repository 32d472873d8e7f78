"""Settings of an evaluation: read them from lm-eval's results, and compare two evaluations.

Every setting is compared, unless `_SHAPES` says that it cannot change a score. A name that vexport
does not know counts. lm-eval records the arguments that were given. If one side does not give an
argument, the default in lm-eval's signature is compared (`generated/lm_eval.json`), or the argument
is shown as not given. Versions, seeds and devices are circumstances: they are compared if both
sides recorded them.

lm-eval 0.4.13 writes these files in evaluator.py and loggers/evaluation_tracker.py.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from vexport.foreign import mapping_in
from vexport.inference.added_keys import UNTEMPLATED
from vexport.inference.fingerprint import (
    COMPILATION,
    EMULATED,
    ENDPOINT,
    MODEL,
    REVISION,
    Fingerprint,
)
from vexport.records import Json, Prompting, device_words
from vexport.records.values import join_limited

ARGUMENT = "argument "
"""Start of the name of a setting that is an argument of lm-eval's model (`model_args`)."""
BACK_END = "back end"
TASK_HASH = "task hash of "
CHAT_TEMPLATE, SYSTEM_INSTRUCTION = "chat template", "system instruction"
MULTITURN, FEWSHOT = "few-shot as multiturn", "few-shot examples of "
GEN_KWARGS = "gen kwargs"
DEFAULT_LENGTH = 256
"""lm-eval's maximum of new tokens if neither the task nor the model's arguments set it."""
_DEFAULTS = {
    CHAT_TEMPLATE: "not applied",
    SYSTEM_INSTRUCTION: "none",
    GEN_KWARGS: "the tasks' own",
}
"""Values of settings that lm-eval records only if they are used."""
MAX_NAMED = 3
"""Maximum number of tasks that a sentence names. Further tasks are only counted."""
DIGITS = 16
"""Digits of a SHA-256 that vexport shows."""

_SHAPES: Mapping[str, Sequence[str]] = {
    "secret": (
        "*api_key",
        "*auth_token",
        "*credentials",
        "hf_token",
        "token",
        "header",
        "password",
    ),
    "model": (MODEL, REVISION, EMULATED, "revision"),
    "place": (
        # Parallel sizes.
        *("*parallel_size", "tp_size", "dp_size", "pp_size", "ep_size", "devices", "num_nodes"),
        *("nnodes", "num_concurrent", "parallelize"),
        # Share of the memory, and numbers of requests at once.
        *("gpu_memory_utilization", "mem_fraction_static", "max_memory_per_gpu", "max_cpu_memory"),
        *("max_num_seqs", "batch_size", "max_batch_size", "micro_batch_size"),
        # Devices and addresses.
        *("device", "base_url", ENDPOINT),
    ),
    "arithmetic": (
        *("lm-eval", "transformers", "vexport", "vllm", "torch", "platform", "processor"),
        *(COMPILATION, "environment", "engine_args", "random seed", "numpy seed", "torch seed"),
        *("seed", "dtype", "quantization", "softmax_dtype", "mixed_precision_dtype", "precision"),
        *("autogptq", "gptqmodel", "kv_cache_dtype", "enforce_eager", "load_format"),
        *("logits_cache", "enable_prefix_caching", "enable_chunked_prefill", "block_size"),
        *("chunked_prefill_size", "max_num_batched_tokens", "attention_backend", "tp_plan"),
        *("attn_implementation", "compilation_config", "distributed_executor_backend"),
        *("swap_space", "cpu_offload_gb", "offload_folder", "download_dir", "cache_dir"),
        *("trust_remote_code", "use_fast_tokenizer", "timeout", "max_retries"),
        *("verify_certificate", "ca_cert_path"),
    ),
}
"""What a setting shapes, as patterns of names. All other settings shape prompts or responses.

- `secret`: nothing. These arguments are never stored, because reports show settings. Addresses
  (`base_url`) are not stored either, because they may contain a password.
- `model`: the model itself, which is what two evaluations compare. lm-eval's `model_names` belong
  here, too.
- `place`: where and how fast the model runs.
- `arithmetic`: neither prompts nor the generation, only the arithmetic and the transport. Their
  changes share one line. Each other change, also of an unknown setting, has a line of its own.

Only `arithmetic` and `responses` are compared.
"""
_TOKENIZERS = ("tokenizer", "tokenizer_path")
_VERSION_KEYS = {"lm-eval": "lm_eval_version", "transformers": "transformers_version"}
_CONFIG_KEYS = ("limit", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
_TASK_KEYS = {"version of ": "versions", FEWSHOT: "n-shot", TASK_HASH: "task_hashes"}
_OF_TASK = (*_TASK_KEYS, f"{GEN_KWARGS} of ")
# Tokens that end thinking: Qwen3, DeepSeek-R1, GLM and SmolLM3; Magistral; Seed-OSS; gpt-oss.
_TORCH_NAME = re.compile(r"torch\.\w+")
_THINK_ENDS = ("</think>", "[/THINK]", "</seed:think>", "<|channel|>final<|message|>")


def changed_names(old: Fingerprint, new: Fingerprint) -> list[str]:
    """Return the names of the settings with different values in the two fingerprints.

    If `gen_kwargs` changed, changed generation arguments of single tasks are skipped, because
    `gen_kwargs` sets them.
    """
    names = [name for name in dict.fromkeys((*old, *new)) if _differs(old, new, name)]
    follows = f"{GEN_KWARGS} of " if GEN_KWARGS in names else None
    return [name for name in names if not (follows and name.startswith(follows))]


def changes(old: Fingerprint, new: Fingerprint, *, where: tuple[str, str]) -> Iterator[str]:
    """Yield a sentence for each change of prompts or generation, and one for all other changes.

    `where` names the two sides.
    """
    shaping, others = list[str](), list[str]()
    for name in changed_names(old, new):
        values = f"{_shown(old, name)} {where[0]}, {_shown(new, name)} {where[1]}"
        sentence = f"{display_name(name)}: {values}"
        (shaping if _shapes(name) == "responses" else others).append(sentence)
    yield from shaping
    if others:
        yield "; ".join(others)


def changes_by_task(
    sides: Mapping[str, tuple[Fingerprint, Fingerprint]], *, where: tuple[str, str]
) -> Iterator[str]:
    """Yield the sentences of `changes` for several tasks. `sides` maps each task to its settings.

    The two settings of tasks from the same two files are the same objects. A sentence that does not
    hold for all tasks begins with their names.
    """
    files: dict[tuple[int, int], list[str]] = {}
    for task, (old, new) in sides.items():
        files.setdefault((id(old), id(new)), []).append(task)
    tasks: dict[str, list[str]] = {}
    for names in files.values():
        for sentence in changes(*sides[names[0]], where=where):
            tasks.setdefault(sentence, []).extend(names)
    for sentence, names in tasks.items():
        prefix = "" if len(names) == len(sides) else f"{join_limited(names, ', ', MAX_NAMED)}: "
        yield prefix + sentence


def changed_settings(old: Fingerprint, new: Fingerprint, task: str) -> list[str]:
    """Return all changed settings of a task.

    Settings that change the task's prompts come first, with both values.
    """
    names = [name for name in changed_names(old, new) if _task_of(name) in (None, task)]
    shaping = (CHAT_TEMPLATE, SYSTEM_INSTRUCTION, MULTITURN, f"{FEWSHOT}{task}")
    prompts = [name for name in names if name in shaping]
    return [
        *(f"{name} ({_shown(new, name)}, the baseline's: {_shown(old, name)})" for name in prompts),
        *(display_name(name) for name in names if name not in shaping),
    ]


def without_model(fingerprint: Fingerprint) -> Fingerprint:
    """Return the settings without the model's name, which is often a path on one machine."""
    names = {f"{ARGUMENT}{name}" for name in _table()["model_names"]}
    return {name: value for name, value in fingerprint.items() if name not in names}


def display_name(name: str) -> str:
    """Return the name of a setting as in lm-eval: without `ARGUMENT`."""
    return name.removeprefix(ARGUMENT)


def _differs(old: Fingerprint, new: Fingerprint, name: str) -> bool:
    if name == BACK_END:
        back_ends = {_back_end(old), _back_end(new)}
        return len(back_ends) > 1 and None not in back_ends
    if not _is_comparable(old, new, name):
        return False
    if display_name(name) in _TOKENIZERS:
        values = (_tokenizer(old, name, other=new), _tokenizer(new, name, other=old))
    else:
        values = (_value(old, name), _value(new, name))
    old_value, new_value = values
    # The texts come first, because NaN does not equal NaN.
    is_same = old_value == new_value or _comparable(old_value) == _comparable(new_value)
    return not is_same and _shapes(name) in ("responses", "arithmetic")


def _is_comparable(old: Fingerprint, new: Fingerprint, name: str) -> bool:
    """Return True if both sides recorded a setting, or if a missing value has a meaning."""
    if name.startswith(ARGUMENT):
        bare = display_name(name)
        return not (bare in old and bare in new)  # The engine recorded the value that it used.
    if name in old and name in new:
        return True
    if name.startswith(f"{GEN_KWARGS} of "):
        return all(f"{FEWSHOT}{_task_of(name)}" in side for side in (old, new))
    return name in _DEFAULTS


@cache
def _shapes(name: str) -> str:
    """Return what a setting shapes: a key of `_SHAPES`, or `responses`."""
    bare = display_name(name)
    if bare in _table()["model_names"]:
        return "model"
    kinds = (
        kind for kind, names in _SHAPES.items() if any(fnmatchcase(bare, each) for each in names)
    )
    return next(kinds, "responses")


def _task_of(name: str) -> str | None:
    """Return the task of a setting of a single task, or None for other settings."""
    starts = (start for start in _OF_TASK if name.startswith(start))
    return next((name.removeprefix(start) for start in starts), None)


def _value(side: Fingerprint, name: str) -> str | None:
    """Return the value that a side gives, else its default, else None."""
    value = side.get(name, _default(side, name))
    return None if value == "none" else value


def _shown(side: Fingerprint, name: str) -> str:
    if name in side:
        return side[name]
    default = _default(side, name)
    if default is None:
        return "not given"
    return f"{default} (default)" if name.startswith(ARGUMENT) else default


def _default(side: Fingerprint, name: str) -> str | None:
    if not name.startswith(ARGUMENT):
        return _DEFAULTS.get(name)
    defaults = _table()["defaults"].get(_back_end(side) or "", {})
    default = defaults.get(display_name(name))
    return None if default is None else _argument_text(default)


def _back_end(side: Fingerprint) -> str | None:
    """Return the name of lm-eval's model class, or None if it is unknown.

    If lm-eval got a model that was built before, it may record the model's name instead.
    """
    recorded = side.get(BACK_END)
    if recorded is None or same_path(recorded) == _own_model(side):
        return None
    known: str = _table()["classes"].get(recorded, recorded)
    return known


def _own_model(side: Fingerprint) -> str | None:
    names = ("pretrained", *_table()["model_names"])
    given = (side[name] for each in names if (name := f"{ARGUMENT}{each}") in side)
    return next(map(same_path, given), None)


def _tokenizer(side: Fingerprint, name: str, *, other: Fingerprint) -> str | None:
    """Return the tokenizer of a side. It is None if neither side names another than its model's."""
    given = [same_path(each.get(name, "none")) for each in (side, other)]
    own = [_own_model(each) for each in (side, other)]
    if all(value in ("none", model) for value, model in zip(given, own, strict=True)):
        return None
    return own[0] if given[0] == "none" else given[0]


@cache
def _table() -> dict[str, Any]:
    """Return lm-eval's model classes by their names, and the defaults of their arguments."""
    file = files("vexport.scores").joinpath("generated", "lm_eval.json")
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table


def device_of(fingerprint: Fingerprint) -> str:
    """Return the device that ran the model, or its server's address, or "" if neither is recorded.

    The device has the form of EngineInfo.device.
    """
    if "platform" not in fingerprint:
        return fingerprint.get(ENDPOINT, "")
    return device_words(
        fingerprint["platform"],
        fingerprint.get("processor", ""),
        emulated=fingerprint.get(EMULATED) == "True",
        compilation=fingerprint.get(COMPILATION, ""),
    )


def unseparated_thinking(content: Mapping[str, Json]) -> str | None:
    """Return a warning if the chat template allows thinking that is not removed from responses."""
    template, arguments = content.get("chat_template"), _arguments(content)
    configs = mapping_in(content, "configs")
    generates = any(
        mapping_in(configs, task).get("output_type") == "generate_until" for task in configs
    )
    off = str(arguments.get("enable_thinking")).lower() == "false"
    if not isinstance(template, str) or not generates or off or arguments.get("think_end_token"):
        return None
    token = next((token for token in _THINK_ENDS if token in template), None)
    return token and (
        f"the chat template has {token}: if the model thinks, its thinking is scored as part of "
        f"the response; set --think-end-token '{token}' and enough --max-gen-toks, or "
        f"--no-enable-thinking"
    )


def recorded_prompting(content: Mapping[str, Json], tasks: Sequence[str]) -> Prompting:
    """Return the settings of the prompts, as a results file records them."""
    template, arguments = _sha(content, "chat_template_sha"), _arguments(content)
    generation = {
        name: text
        for name, value in arguments.items()
        if _shapes(name) == "responses" and (text := _argument_text(value)) != "none"
    }
    if given := _named(mapping_in(content, "config").get("gen_kwargs")):
        generation["gen_kwargs"] = _argument_text(given)
    counts, plain = mapping_in(content, "n-shot"), mapping_in(content, "config").get(UNTEMPLATED)
    return Prompting(
        chat_template=template,
        system_instruction=_sha(content, "system_instruction_sha"),
        num_fewshot={task: count for task in tasks if isinstance(count := counts.get(task), int)},
        fewshot_as_multiturn=template is not None and bool(content.get("fewshot_as_multiturn")),
        generation=generation,
        untemplated=tuple(map(str, plain)) if isinstance(plain, list) else (),
    )


def recorded_fingerprint(content: Mapping[str, Json], tasks: Sequence[str]) -> Fingerprint:
    """Return everything in a results file that could change a score, by name."""
    prompting, config = recorded_prompting(content, tasks), mapping_in(content, "config")
    settings: dict[str, Json] = {name: content.get(key) for name, key in _VERSION_KEYS.items()}
    if prompting.chat_template:
        settings[CHAT_TEMPLATE] = f"sha {prompting.chat_template}"
        settings[MULTITURN] = prompting.fewshot_as_multiturn
    if prompting.system_instruction:
        settings[SYSTEM_INSTRUCTION] = f"sha {prompting.system_instruction}"
    settings |= {name.replace("_", " "): config.get(name) for name in _CONFIG_KEYS}
    settings[BACK_END] = config.get("model")
    if overrides := _named(config.get("gen_kwargs")):
        settings[GEN_KWARGS] = _argument_text(overrides)
    for name, value in _arguments(content).items():
        if name != "base_url" and _shapes(name) != "secret":
            settings[f"{ARGUMENT}{name}"] = _argument_text(value)
    for task in tasks:
        settings |= {
            f"{name}{task}": mapping_in(content, key).get(task) for name, key in _TASK_KEYS.items()
        }
        given = mapping_in(content, "configs", task).get("generation_kwargs")
        settings[f"{GEN_KWARGS} of {task}"] = _text(given) if given else None
    return {name: _text(value) for name, value in settings.items() if value is not None}


def model_of(content: Mapping[str, Json]) -> str:
    """Return the name of the evaluated model with its revision, or "" if it is not recorded."""
    arguments = _arguments(content)
    names = [
        f"{name} {same_path(str(arguments[name]))}"
        for name in _table()["model_names"]
        if name in arguments
    ]
    if not names:
        return same_path(str(content.get("model_name") or ""))
    revision = arguments.get("revision")
    return ", ".join([*names, *([] if revision in (None, "main") else [f"revision {revision}"])])


def recorded_time(content: Mapping[str, Json]) -> str:
    """Return the time at which lm-eval began (`date`, in seconds since 1970), or "" without one."""
    seconds = content.get("date")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        return ""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return ""


def question_settings(fingerprint: Fingerprint, task: str) -> Fingerprint:
    """Return the settings that shape the questions and the scoring of a task or group.

    A fingerprint does not record which tasks belong to a group. Therefore the result for a group
    contains the hashes of all tasks.
    """
    is_group = f"{TASK_HASH}{task}" not in fingerprint
    return {
        name: value
        for name, value in fingerprint.items()
        if (_shapes(name) != "arithmetic" and _task_of(name) in (None, task))
        or (is_group and name.startswith(TASK_HASH))
    }


def _arguments(content: Mapping[str, Json]) -> dict[str, Json]:
    return _named(mapping_in(content, "config").get("model_args"))


def _named(arguments: Json) -> dict[str, Json]:
    """Return arguments by name.

    Older versions of lm-eval stored them as a string, `name=value,name=value`.
    """
    if isinstance(arguments, str):
        pairs = (part.partition("=") for part in arguments.split(",") if part.strip())
        return {name.strip(): _scalar(value) for name, _, value in pairs}
    return arguments if isinstance(arguments, dict) else {}


def _sha(content: Mapping[str, Json], key: str) -> str | None:
    value = content.get(key)
    return value[:DIGITS] if isinstance(value, str) and value else None


def _text(value: Json) -> str:
    plain = _plain(value)
    if isinstance(plain, dict | list):
        return json.dumps(plain, sort_keys=True, ensure_ascii=False)
    return str(plain)


def _argument_text(value: Json) -> str:
    """Return the value of an argument, spelled in one way.

    lm-eval records text (`True`, `0.90`) or JSON (`true`, `0.9`), depending on the call.
    """
    plain = _plain(value, _scalar)
    if plain is None or isinstance(plain, str):
        return "none" if plain is None else plain
    return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def _plain(value: Json, read: Callable[[str], Json] = str) -> Json:
    """Return a value with each number in it, at any depth, spelled in one way.

    `read` converts texts. Texts with spaces around them are kept, because they may be stop texts.
    """
    if isinstance(value, dict):
        return {name: _plain(member, read) for name, member in value.items()}
    if isinstance(value, list):
        return [_plain(member, read) for member in value]
    if isinstance(value, str) and value == value.strip():
        value = read(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _comparable(text: str | None) -> Json:
    """Return a value that equals the values with the same meaning.

    True equals 1 and False equals 0 at any depth, as in Python, because a switch may be recorded
    as a number. A path may end in a slash.
    """
    if text is None:
        return None
    with suppress(ValueError, RecursionError):
        found: Json = json.loads(text.lower() if text in ("True", "False") else text)
        return found
    return same_path(text)


def same_path(text: str) -> str:
    """Return a path without the slash at its end."""
    return text.rstrip("/") or text


def _scalar(text: str) -> Json:
    """Return the value that lm-eval reads from an argument on its command line.

    torch prints its types with its name: `torch.bfloat16` is `bfloat16`.
    """
    if _TORCH_NAME.fullmatch(text):
        return text.removeprefix("torch.")
    words: dict[str, Json] = {"true": True, "false": False, "none": None, "null": None}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text
