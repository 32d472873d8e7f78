"""Random files next to the weights, and what transformers, vLLM and vexport say of each.

vLLM takes 5 s to import: functions that use it do, because every test process imports this module.
"""

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tests.checkpoint.configs import JSON, sound_config
from tests.checkpoint.headers import MISTAKES
from vexport.checkpoint.index import INDEX_NAME, weight_files
from vexport.checks.tokenizer import (
    ADDED,
    GENERATION,
    SETTINGS,
    SPECIAL,
    generation_findings,
    tokenizer_findings,
)
from vexport.checks.vllm import render
from vexport.checks.vllm.generation import VALUES
from vexport.checks.vllm.tokenizer_files import DECODER, EXTRA, OLDER, SIDES
from vexport.checks.vllm.tokenizer_files import SPECIAL as SPECIAL_TOKENS
from vexport.errors import InputError
from vexport.types import Json

Files = Mapping[str, str]
TOKENIZER = "tokenizer.json"
SAMPLING = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature"),
    *("top_k", "top_p", "min_p", "max_new_tokens"),
)
TOKEN: dict[str, Json] = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True}
TOKENS: list[Json] = [
    "<s>",
    "w4",
    "new",
    "\ud800",
    None,
    TOKEN,
    {"content": "<s>"},
    {"content": 5},
    {**TOKEN, "content": 5},
    {**TOKEN, "lstrip": 1},
    {"__type": "AddedToken"},
    {"__type": "Other"},
]
LISTS: list[Json] = [
    [],
    ["<s>", "new"],
    [TOKEN],
    ["a", 5],
    [None],
    {"a": "b"},
    {"a": TOKEN},
    {"a": 5},
    TOKEN,
]
DECODERS: list[Json] = [
    {},
    {"1": TOKEN},
    {"x": TOKEN},
    {"-1": {"content": "<s>"}},
    {"1": "<s>"},
    {"400": {"content": "\ud800"}},
    {"1.5": TOKEN},
    {"5": {"content": "q", "lstrip": 0}},
    {"5": {}},
]
VALUES_OF: Mapping[str, Sequence[Json]] = {
    **dict.fromkeys((*SPECIAL_TOKENS, "image_token"), TOKENS),
    **dict.fromkeys((EXTRA, OLDER), LISTS),
    **dict.fromkeys(SIDES, ("left", "right", "up")),
    DECODER: DECODERS,
    "tokenizer_class": ("PreTrainedTokenizerFast", "TokenizersBackend", "NoSuch", ""),
    "auto_map": ({}, []),
    "chat_template": (
        "{{ messages }}",
        [{"name": "a", "template": "b"}],
        [{"name": "a"}],
        [{"name": [], "template": ""}],
    ),
    "fast_tokenizer_files": (["tokenizer.json"], ["x"], [5]),
    "split_special_tokens": (True, False),
    "init_inputs": ([],),
    "model_max_length": (8, 10**30, 1.5),
    "encode": (1,),
    "add_bos_token": (True,),
    "clean_up_tokenization_spaces": (True,),
    "nonsense": ({"a": [TOKEN]}, {"a": [{"__type": "AddedToken", "content": 5}]}),
}
SPECIAL_VALUES = {
    key: VALUES_OF[key] for key in (*SPECIAL_TOKENS, EXTRA, OLDER, *SIDES, "encode", "nonsense")
}
GENERATION_VALUES: Mapping[str, Sequence[Json]] = {
    **dict.fromkeys(VALUES, (0.5, 2, 1.5, -2, float("nan"), [2, 3], [0.5], "2")),
    "do_sample": (True, False),
    "num_beams": (1, 2, 4),
    "num_return_sequences": (1, 2, 3),
    "early_stopping": ("never", True, False),
    "cache_implementation": ("static", "hybrid", "paged", "x"),
    "watermarking_config": (
        {},
        {"bias": 1},
        {"greenlist_ratio": 2},
        {"seeding_scheme": "x"},
        {"context_width": 0},
    ),
    "suppress_tokens": ([2], [2, 3], []),
    "transformers_version": ("4.50.0",),
    "dtype": ("bfloat16",),
    "__class__": (1,),
    "nonsense": ({"dtype": 5}, {"dtype": None}),
    "validate": (1,),
    "logits_processor": (1,),
    "max_length": (20,),
}


def random_tokenizer(rng: random.Random) -> Files:
    """The files of a tokenizer, as saved by transformers 4 or 5, with up to three values of another kind."""
    settings: dict[str, Json] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    special: dict[str, Json] = {"bos_token": {"content": "<s>", "lstrip": False}}
    _change(settings, VALUES_OF, rng)
    _change(special, SPECIAL_VALUES, rng)
    added = {
        rng.choice(("<s>", "new", "\ud800")): rng.choice((7, 400, -1, *JSON))
        for _ in range(rng.randint(0, 2))
    }
    files = {SETTINGS: _text(settings, rng)}
    if rng.random() < 0.4:
        files[SPECIAL] = _text(special, rng)
    if rng.random() < 0.2:
        files[ADDED] = _text(added, rng)
    if rng.random() < 0.2:
        files[TOKENIZER] = _spoiled(_sound_tokenizer(), rng)
    return files


def random_generation(rng: random.Random) -> Files:
    """A generation_config.json with up to three values of another kind."""
    content: dict[str, Json] = {"eos_token_id": 2, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    _change(content, GENERATION_VALUES, rng)
    return {GENERATION: _text(content, rng)}


def random_index(rng: random.Random) -> Files:
    """An index of two files with up to two mistakes."""
    names = {name: rng.choice(("a.safetensors", "b.safetensors")) for name in ("x", "y", "z")}
    content: dict[str, Json] = {"metadata": {"total_size": 12}, "weight_map": {**names}}
    text = json.dumps(content)
    for _ in range(rng.choice((0, 1, 1, 2))):
        text = rng.choice((*MISTAKES, _rename))(text, rng)
    return {INDEX_NAME: text}


def _rename(text: str, rng: random.Random) -> str:
    """Another name of a file."""
    other = rng.choice(
        ("./a.safetensors", "../a.safetensors", "/a.safetensors", "c.safetensors", "x/../a.safetensors", "")
    )
    return text.replace(rng.choice(("a.safetensors", "b.safetensors")), other, 1)


def _change(content: dict[str, Json], values: Mapping[str, Sequence[Json]], rng: random.Random) -> None:
    for key in rng.sample([*values], rng.choice((0, 1, 1, 2, 3))):
        content[key] = rng.choice(JSON if rng.random() < 0.3 else values[key])


def _text(content: object, rng: random.Random) -> str:
    text = json.dumps(content)
    return _spoiled(text, rng) if rng.random() < 0.1 else text


def _spoiled(text: str, rng: random.Random) -> str:
    return rng.choice(MISTAKES)(text, rng)


@cache
def _sound_tokenizer() -> str:
    """A tokenizer.json of few words, in which a mistake hits something."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "w4": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer.to_str()


_PIECES = r"""
{% for message in messages %}~{% endfor %}~{% if messages[0].role == 'system' %}~{% else %}~{% endif %}
{{ message.content }}~{{ messages[0]['content'] }}~{{ bos_token }}~{{ eos_token }}
{{ messages | tojson }}~{{ messages | tojson(indent=2) }}~{{ messages | tojson(default=1) }}
{{ raise_exception('no') }}~{{ cycler }}~{% generation %}~{% endgeneration %}~{{ documents | length }}
{{ messages.append(1) }}~{% break %}~{{ ns.x }}~{{ ''.__class__.__mro__ }}~{% set ns = namespace(x=1) %}
{% set ns.x = 2 %}~{% include 'a' %}~{% macro m(a) %}~{% endmacro %}~{{ m(1) }}~{{ 1/0 }}~{{ tools[0] }}
{% if tools %}~{{ strftime_now('%Y') | length }}~{{- 'a' -}}~{# no #}~{{~}}~{% do messages.pop() %}
{{ undefined.x }}~{{ messages[5].content }}~{{ 'a' * 3 }}~{{ 'a' | nope }}~{{ message.content | trim }}
{{ add_generation_prompt }}~{{ message.nothing.more }}~\ud800~é~{{ lipsum() }}~{% x %}
{{ messages[1:] | list }}~{{ range(5) | list }}~{{ self }}~{% extends 'a' %}~{% block a %}~{% endblock %}
{{ loop }}
"""
PIECES = _PIECES.strip().replace("\n", "~").split("~")
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"


def random_template(rng: random.Random) -> str:
    """A chat template, most of them with something in it that is wrong."""
    pieces = [CHAT[:40], CHAT[40:]] if rng.random() < 0.5 else []
    for _ in range(rng.randint(0, 5)):
        pieces.insert(rng.randint(0, len(pieces)), rng.choice(PIECES))
    return "".join(pieces)


def template_disagreement(template: str) -> str | None:
    """Where transformers renders what a user says, and `check` finds an error, or the other way round."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = render.conversations(render.USER, parts=False)["user"]
    ours: object
    try:
        outcome = render.render(render.compiled(template), messages, tokens)
        ours = outcome["error"] or outcome["has_user"]
    except Exception as error:
        ours = render.words(error)
    try:
        texts, _ = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=True, **tokens
        )
    except Exception as error:
        theirs = f"refuses ({error!r:.200})"
        return None if isinstance(ours, str) else f"{template!r}: transformers {theirs}, vexport {ours}"
    agree = ours == (render.USER in texts[0])
    return None if agree else f"{template!r}: transformers {texts[0]!r}, vexport {ours}"


def write_files(files: Files, folder: Path) -> None:
    """The files of a case, and none of the case before."""
    folder.mkdir(exist_ok=True)
    for name in (SETTINGS, SPECIAL, ADDED, TOKENIZER, GENERATION, INDEX_NAME):
        (folder / name).unlink(missing_ok=True)
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(sound_config("llama"))
    for name, text in files.items():
        (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))


def tokenizer_disagreement(files: Files, folder: Path) -> str | None:
    """Where one of transformers and `check` refuses a tokenizer and the other does not."""
    write_files({TOKENIZER: _sound_tokenizer(), **files}, folder)
    ours = [finding.where + ": " + finding.got for finding in tokenizer_findings(folder)]
    try:
        AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        return None if ours else f"{files}: transformers refuses ({error!r:.300}), vexport takes it"
    return f"{files}: transformers takes it, vexport: {ours}" if ours else None


def generation_disagreement(files: Files, folder: Path) -> str | None:
    """Where vLLM would not start or would refuse every request, and `check` has no error, or the reverse."""
    write_files(files, folder)
    findings = generation_findings(folder / GENERATION)
    wrong = [finding for finding in findings if finding.severity == "error"]
    ours = [f"{finding.where}: {finding.got}" for finding in wrong]
    try:
        _sampling(folder)
    except Exception as error:
        return None if ours else f"{files}: vLLM refuses ({error!r:.300}), vexport takes it"
    # Refused on purpose: a token id that is none, which vLLM compares with those that it makes.
    return (
        f"{files}: vLLM takes it, vexport: {ours}"
        if any("eos_token_id" not in each for each in ours)
        else None
    )


def _sampling(folder: Path) -> None:
    """As ModelConfig.get_diff_sampling_param and a request (vllm/config/model.py)."""
    from vllm.sampling_params import SamplingParams
    from vllm.transformers_utils.config import try_get_generation_config

    config = try_get_generation_config(str(folder), trust_remote_code=False)
    content = {} if config is None else config.to_diff_dict()
    asked = {key: content[key] for key in SAMPLING if content.get(key) is not None}
    if "max_new_tokens" in asked:
        asked["max_tokens"] = asked.pop("max_new_tokens")
    SamplingParams.from_optional(**asked).update_from_generation_config(content, eos_token_id=2)


def index_disagreement(files: Files, folder: Path) -> str | None:
    """Where vLLM reads other files than vexport, or one refuses and the other does not."""
    from vllm.model_executor.model_loader.weight_utils import filter_duplicate_safetensors_files

    write_files(files, folder)
    for name in ("a.safetensors", "b.safetensors"):
        if not (folder / name).exists():
            (folder / name).write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    ours: set[str] | str
    try:
        ours = {str(path) for path in weight_files(folder)}
    except InputError as error:
        ours = f"refuses: {error}"
    found = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    try:
        theirs = set(filter_duplicate_safetensors_files(found, str(folder), INDEX_NAME))
    except Exception as error:
        return None if isinstance(ours, str) else f"{files}: vLLM refuses ({error!r:.300}), vexport {ours}"
    return None if theirs == ours else f"{files}: vLLM {theirs}, vexport {ours}"
