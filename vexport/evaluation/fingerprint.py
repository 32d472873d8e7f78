"""Read the settings that lm-eval's results files record, and find changes between two of them.

lm-eval 0.4.13 writes these files in evaluator.py and loggers/evaluation_tracker.py.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from vexport.inference.added_keys import UNTEMPLATED
from vexport.inference.fingerprint import COMPILATION, EMULATED, ENDPOINT, MODEL, Fingerprint
from vexport.records import Json, Prompting, device_words

TASK_HASH = "task hash of "
CHAT_TEMPLATE, SYSTEM_INSTRUCTION = "chat template", "system instruction"
MULTITURN, FEWSHOT = "few-shot as multiturn", "few-shot examples of "
GEN_KWARGS = "gen kwargs"
MAX_GEN_TOKS, THINK_END_TOKEN = "max gen toks", "think end token"
ENABLE_THINKING = "enable thinking"
DEFAULT_LENGTH = 256
"""lm-eval's maximum of new tokens if neither the task nor the model's arguments set it."""
_DEFAULTS = {
    CHAT_TEMPLATE: "not applied",
    SYSTEM_INSTRUCTION: "none",
    GEN_KWARGS: "the tasks' own",
    MAX_GEN_TOKS: str(DEFAULT_LENGTH),
    THINK_END_TOKEN: "none",
    ENABLE_THINKING: "left to the chat template",
}
"""lm-eval's defaults.

They apply if the results or the accepted baseline do not record the setting.
"""
DIGITS = 16
"""Digits of a SHA-256 that vexport shows."""
_VERSION_KEYS = {"lm-eval": "lm_eval_version", "transformers": "transformers_version"}
_CONFIG_KEYS = ("limit", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
_ANSWER_KEYS = ("max_gen_toks", "think_end_token", "enable_thinking", "chat_template_args")
_ENGINE_KEYS = (
    "dtype",
    "max_model_len",
    "quantization",
    "kv_cache_dtype",
    "enforce_eager",
    "add_bos_token",
)
_QUESTIONS = (
    *(CHAT_TEMPLATE, SYSTEM_INSTRUCTION, MULTITURN, GEN_KWARGS, MAX_GEN_TOKS, THINK_END_TOKEN),
    *(ENABLE_THINKING, "chat template args", "limit", "fewshot seed"),
)
_TASK_KEYS = {"version of ": "versions", FEWSHOT: "n-shot", TASK_HASH: "task_hashes"}
# Tokens that end thinking: Qwen3, DeepSeek-R1, GLM and SmolLM3; Magistral; Seed-OSS; gpt-oss.
_THINK_ENDS = ("</think>", "[/THINK]", "</seed:think>", "<|channel|>final<|message|>")


def changed_names(old: Fingerprint, new: Fingerprint) -> list[str]:
    """Return the names of the settings with different values in the two fingerprints.

    If a fingerprint lacks a setting, lm-eval's default from `_DEFAULTS` is compared instead.
    Settings without a default are compared only if both fingerprints contain them. If `gen_kwargs`
    changed, changed generation arguments of single tasks are skipped, because `gen_kwargs` sets
    them.
    """
    names = [*old, *(name for name in _DEFAULTS if name in new and name not in old)]
    differ = [
        name
        for name in names
        if name in {*new, *_DEFAULTS} and _value(old, name) != _value(new, name)
    ]
    follows = f"{GEN_KWARGS} of " if GEN_KWARGS in differ else None
    return [name for name in differ if not (follows and name.startswith(follows))]


def changes(old: Fingerprint, new: Fingerprint, *, where: tuple[str, str]) -> tuple[str, ...]:
    """Return a sentence for each change. `where` names the two sides."""
    names = changed_names(old, new)
    return tuple(
        f"{name}: {_value(old, name)} {where[0]}, {_value(new, name)} {where[1]}" for name in names
    )


def changed_settings(old: Fingerprint, new: Fingerprint, task: str) -> list[str]:
    """Return all changed settings, except the digest of the model.

    Settings that change the task's prompts come first, with both values.
    """
    names = [name for name in changed_names(old, new) if name != MODEL]
    shaping = (CHAT_TEMPLATE, SYSTEM_INSTRUCTION, MULTITURN, f"{FEWSHOT}{task}")
    prompts = [name for name in names if name in shaping]
    return [
        *(f"{name} ({_value(new, name)}, the baseline's: {_value(old, name)})" for name in prompts),
        *(name for name in names if name not in shaping),
    ]


def _value(side: Fingerprint, name: str) -> str:
    return side.get(name, _DEFAULTS.get(name, "none"))


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
        name: _text(value) for name in _ANSWER_KEYS if (value := arguments.get(name)) is not None
    }
    if given := mapping_in(content, "config").get("gen_kwargs"):
        generation["gen_kwargs"] = _text(given)
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
    named = {
        **{name: config.get(name) for name in _CONFIG_KEYS},
        **{name: _arguments(content).get(name) for name in _ENGINE_KEYS},
        **prompting.generation,
    }
    settings |= {name.replace("_", " "): value for name, value in named.items()}
    for task in tasks:
        settings |= {
            f"{name}{task}": mapping_in(content, key).get(task) for name, key in _TASK_KEYS.items()
        }
        given = mapping_in(mapping_in(content, "configs"), task).get("generation_kwargs")
        settings[f"{GEN_KWARGS} of {task}"] = _text(given) if given else None
    return {name: _text(value) for name, value in settings.items() if value is not None}


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
    own = (
        f"{TASK_HASH}{task}",
        f"{FEWSHOT}{task}",
        f"version of {task}",
        f"{GEN_KWARGS} of {task}",
    )
    return {
        name: value
        for name, value in fingerprint.items()
        if name in (*own, *_QUESTIONS) or (is_group and name.startswith(TASK_HASH))
    }


def _arguments(content: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return the model's arguments by name.

    Older versions of lm-eval stored them as a string, `name=value,name=value`.
    """
    arguments = mapping_in(content, "config").get("model_args")
    if isinstance(arguments, str):
        pairs = (part.partition("=") for part in arguments.split(","))
        return {name: value for name, _, value in pairs}
    return arguments if isinstance(arguments, dict) else {}


def _sha(content: Mapping[str, Json], key: str) -> str | None:
    value = content.get(key)
    return value[:DIGITS] if isinstance(value, str) and value else None


def _text(value: Json) -> str:
    return (
        json.dumps(value, sort_keys=True, ensure_ascii=False)
        if isinstance(value, dict)
        else str(value)
    )


def mapping_in(content: Mapping[str, Json], key: str) -> dict[str, Json]:
    """Return the object under a key of a results file.

    Return an empty object for any other value.
    """
    value = content.get(key)
    return value if isinstance(value, dict) else {}
