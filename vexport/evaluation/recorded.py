"""What a results file of lm-eval (evaluator.py, loggers/evaluation_tracker.py, 0.4.13) tells of its run."""

import json
from collections.abc import Iterator, Mapping, Sequence

from vexport.evaluation.fingerprint import (
    CHAT_TEMPLATE,
    FEWSHOT,
    GEN_KWARGS,
    MULTITURN,
    SYSTEM_INSTRUCTION,
    TASK_HASH,
)
from vexport.types import Json, Prompting

_DIGITS = 16
"""Of a SHA-256, as vexport shows it."""
_PLAIN = {"lm-eval": "lm_eval_version", "transformers": "transformers_version"}
_CONFIGURED = ("limit", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
_ANSWERS = ("max_gen_toks", "think_end_token", "enable_thinking", "chat_template_args")
_ENGINE = ("dtype", "max_model_len", "quantization", "kv_cache_dtype", "enforce_eager", "add_bos_token")
_OF_TASKS = {"version of ": "versions", FEWSHOT: "n-shot", TASK_HASH: "task_hashes"}
# What ends thinking: Qwen3, DeepSeek-R1, GLM and SmolLM3; Magistral; Seed-OSS; gpt-oss.
_THINK_ENDS = ("</think>", "[/THINK]", "</seed:think>", "<|channel|>final<|message|>")


def unseparated_thinking(content: Mapping[str, Json]) -> str | None:
    """A warning where the applied chat template has a place for thinking that nothing cuts off answers."""
    template, arguments = content.get("chat_template"), _arguments(content)
    kinds = [_mapping(_mapping(content, "configs"), task) for task in _mapping(content, "configs")]
    generates = any(kind.get("output_type") == "generate_until" for kind in kinds)
    off = str(arguments.get("enable_thinking")).lower() == "false"
    if not isinstance(template, str) or not generates or off or arguments.get("think_end_token"):
        return None
    for token in _THINK_ENDS:
        if token in template:
            return (
                f"the chat template has {token}: if the model thinks, its thinking is scored as part of the "
                f"answer; set --think-end-token '{token}' and enough --max-gen-toks, or --no-enable-thinking"
            )
    return None


def recorded_prompting(content: Mapping[str, Json], tasks: Sequence[str]) -> Prompting:
    """How the documents of a results file were asked."""
    template, arguments = _sha(content, "chat_template_sha"), _arguments(content)
    generation = {name: _text(value) for name in _ANSWERS if (value := arguments.get(name)) is not None}
    if given := _mapping(content, "config").get("gen_kwargs"):
        generation["gen_kwargs"] = _text(given)
    counts = _mapping(content, "n-shot")
    return Prompting(
        chat_template=template,
        system_instruction=_sha(content, "system_instruction_sha"),
        num_fewshot={task: count for task in tasks if isinstance(count := counts.get(task), int)},
        fewshot_as_multiturn=template is not None and bool(content.get("fewshot_as_multiturn")),
        generation=generation,
    )


def recorded_fingerprint(content: Mapping[str, Json], tasks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Everything in a results file that could change a score, by name."""
    prompting, config, arguments = (
        recorded_prompting(content, tasks),
        _mapping(content, "config"),
        _arguments(content),
    )
    settings: dict[str, Json] = {name: content.get(key) for name, key in _PLAIN.items()}
    if prompting.chat_template:
        settings |= {
            CHAT_TEMPLATE: f"sha {prompting.chat_template}",
            MULTITURN: prompting.fewshot_as_multiturn,
        }
    if prompting.system_instruction:
        settings[SYSTEM_INSTRUCTION] = f"sha {prompting.system_instruction}"
    settings |= {name.replace("_", " "): config.get(name) for name in _CONFIGURED}
    settings |= {name.replace("_", " "): arguments.get(name) for name in _ENGINE}
    settings |= {name.replace("_", " "): value for name, value in prompting.generation.items()}
    for task in tasks:
        settings |= {f"{name}{task}": _mapping(content, key).get(task) for name, key in _OF_TASKS.items()}
        given = _mapping(_mapping(content, "configs"), task).get("generation_kwargs")
        settings[f"{GEN_KWARGS} of {task}"] = _text(given) if given else None
    yield from ((name, _text(value)) for name, value in settings.items() if value is not None)


def _arguments(content: Mapping[str, Json]) -> Mapping[str, Json]:
    """The model's arguments: an object, or text as older lm-evals were given."""
    arguments = _mapping(content, "config").get("model_args")
    if isinstance(arguments, str):
        pairs = (part.partition("=") for part in arguments.split(","))
        return {name: value for name, _, value in pairs}
    return arguments if isinstance(arguments, dict) else {}


def _sha(content: Mapping[str, Json], key: str) -> str | None:
    value = content.get(key)
    return value[:_DIGITS] if isinstance(value, str) and value else None


def _text(value: Json) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False) if isinstance(value, dict) else str(value)


def _mapping(content: Mapping[str, Json], key: str) -> dict[str, Json]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}
