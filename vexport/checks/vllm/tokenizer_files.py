"""Settings of a tokenizer that transformers refuses, so that vLLM does not start.

Sources: `_from_pretrained` in tokenization_utils_base.py and AutoTokenizer.from_pretrained in
models/auto/tokenization_auto.py (transformers 5.19), and AddedToken of the tokenizers library.
"""

from collections.abc import Iterator, Mapping

from vexport.checks.vllm.settings import WrongSetting
from vexport.types import Json

DECODER, NAMED = "added_tokens_decoder", "model_specific_special_tokens"
EXTRA, OLDER = "extra_special_tokens", "additional_special_tokens"
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
NO_TEXTS = (*SPECIAL, "add_bos_token", "add_eos_token")
SIDES = ("padding_side", "truncation_side")
TOKEN = 'a text, or an object with "__type": "AddedToken"'
_METHODS = """
add_special_tokens add_tokens apply_chat_template batch_decode clean_up_tokenization convert_added_tokens
convert_ids_to_tokens convert_to_native_format convert_tokens_to_ids convert_tokens_to_string decode encode
encode_message_with_chat_template from_pretrained get_added_vocab get_chat_template get_response_parser
get_special_tokens_mask get_vocab num_special_tokens_to_add pad parse_response push_to_hub
register_for_auto_class save_chat_templates save_pretrained save_vocabulary set_truncation_and_padding
tokenize train_new_from_iterator update_post_processor
"""
# Of a tokenizer, which no setting may hide.
METHODS = frozenset(_METHODS.split())


def reads_older_files(settings: Mapping[str, Json]) -> bool:
    """Whether special_tokens_map.json and added_tokens.json are read next to tokenizer_config.json."""
    return DECODER not in settings


def wrong_tokenizer_settings(settings: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """Each key that cannot be, of what `as_merged` gives."""
    yield from _class(settings)
    for key in SPECIAL:
        value = settings.get(key)
        if value is not None and not _is_token(value):
            yield WrongSetting(key=key, expected=TOKEN, got=repr(value))
    texts = [(key, token.get("content")) for key in SPECIAL if isinstance(token := settings.get(key), dict)]
    first = next((key for key, text in texts if not text), "unk_token")
    unknown = settings.get("unk_token")
    is_empty = unknown == "" or (isinstance(unknown, dict) and not unknown.get("content"))
    if is_empty and SPECIAL.index(first) < SPECIAL.index("unk_token"):  # it is looked up as the unknown one
        yield WrongSetting(key="unk_token", expected="a token with a text", got=repr(unknown))
    for key, value in settings.items():
        if key.endswith("_token") and key not in NO_TEXTS and isinstance(value, str) and not _is_token(value):
            yield WrongSetting(key=key, expected=TOKEN, got=repr(value))
        if key in METHODS:
            yield WrongSetting(key=key, expected="no such key: a tokenizer's method", got=repr(value))
        yield from _nested(key, value)
    yield from _extra(settings)
    for key in SIDES:
        if settings.get(key, "left") not in ("left", "right"):
            yield WrongSetting(key=key, expected="left or right", got=repr(settings[key]))
    if not isinstance(settings.get("split_special_tokens", False), bool):
        got = repr(settings["split_special_tokens"])
        yield WrongSetting(key="split_special_tokens", expected="true or false", got=got)
    yield from _decoder(settings)


def as_merged(settings: Mapping[str, Json], special: Mapping[str, Json]) -> dict[str, Json]:
    """tokenizer_config.json after special_tokens_map.json, whose values come first.

    Special tokens with names of their own are under NAMED.
    """
    merged = dict(settings)
    if OLDER in merged and not merged.get(EXTRA):
        merged[EXTRA] = merged.pop(OLDER)
    _name_extra(merged)
    for key, value in special.items():
        if isinstance(value, dict) and key != EXTRA:
            merged[key] = {**value, "special": True, "__type": "AddedToken"}
        elif isinstance(value, list) and key == EXTRA:
            before = merged.get(EXTRA) or []
            if isinstance(before, list | str):  # otherwise it stays, and is wrong
                merged[key] = [*before, *(_as_token(each) for each in value)]
        else:
            merged[key] = value
    _name_extra(merged)
    if EXTRA not in merged and OLDER in merged:
        merged[EXTRA] = merged.pop(OLDER)
        if not isinstance(special.get(OLDER), dict):
            _name_extra(merged, keep_wrong=True)
    return merged


def _name_extra(settings: dict[str, Json], *, keep_wrong: bool = False) -> None:
    """Further tokens as an object are tokens with names, and come before others of the same."""
    extra, before = settings.get(EXTRA), settings.get(NAMED)
    if isinstance(extra, dict):
        del settings[EXTRA]
        named = before if isinstance(before, dict) else {}
        wrong = {name: token for name, token in named.items() if not _is_token(token)}
        if extra:
            settings[NAMED] = {**named, **extra, **(wrong if keep_wrong else {})}


def wrong_added_tokens(content: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """What is wrong in added_tokens.json: texts with their ids."""
    for key, value in content.items():
        if not isinstance(value, int | float) or not _is_text(key):
            yield WrongSetting(key=key, expected="a text with its token id", got=repr(value))


def _as_token(value: Json) -> Json:
    """An entry of a list there: an object must not say `special`, which is always true."""
    if not isinstance(value, dict):
        return value
    return {**value, "special": None if "special" in value else True, "__type": "AddedToken"}


def _class(settings: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """What chooses the class, before anything else is read."""
    name, code = settings.get("tokenizer_class"), settings.get("auto_map", {})
    if not isinstance(name, str | None):
        yield WrongSetting(key="tokenizer_class", expected="the name of a class", got=repr(name))
    names = code if isinstance(code, list) else []
    if not isinstance(code, dict) and not (
        len(names) > 1 and all(isinstance(each, str | None) for each in names)
    ):
        expected = "the name of a class by its kind"
        yield WrongSetting(key="auto_map", expected=expected, got=repr(code))
    files = settings.get("fast_tokenizer_files", [])
    if not isinstance(files, str | dict | list) or (
        isinstance(files, list) and not all(isinstance(each, str) for each in files)
    ):
        yield WrongSetting(key="fast_tokenizer_files", expected="a list of names", got=repr(files))
    inputs = settings.get("init_inputs", [])
    if not isinstance(inputs, str | dict | list):
        yield WrongSetting(key="init_inputs", expected="a list", got=repr(inputs))
    templates = settings.get("chat_template")
    for each in templates if isinstance(templates, list) else ():
        if (
            not isinstance(each, dict)
            or not {"name", "template"} <= each.keys()
            or not _hashable(each["name"])
        ):
            expected = "templates with `name` and `template`"
            yield WrongSetting(key="chat_template", expected=expected, got=repr(each))


def _hashable(value: Json) -> bool:
    return not isinstance(value, list | dict)


def _extra(settings: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """Further special tokens: a list of them, or each by its name."""
    extra, named = settings.get(EXTRA), settings.get(NAMED)
    wrong = [each for each in extra if not _is_token(each)] if isinstance(extra, list) else [extra]
    if wrong and extra is not None:
        yield WrongSetting(key=EXTRA, expected=f"a list of tokens, each {TOKEN}", got=repr(wrong[0]))
    wrong = [named]
    if isinstance(named, dict) and named.get("__type") != "AddedToken":
        wrong = [each for each in named.values() if not _is_token(each)]
    if wrong and named is not None:
        yield WrongSetting(key=NAMED, expected=f"tokens by name, each {TOKEN}", got=repr(wrong[0]))


def _decoder(settings: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """Added tokens by their id."""
    value = settings.get(DECODER, {})
    if not isinstance(value, dict):
        yield WrongSetting(key=DECODER, expected="tokens by their id", got=repr(value))
        return
    for key, token in value.items():
        if not _is_id(key) or not isinstance(token, dict) or not _is_added_token(token):
            got = f"{key!r}: {token!r}"
            yield WrongSetting(key=DECODER, expected="tokens by their id", got=got)


def _nested(key: str, value: Json) -> Iterator[WrongSetting]:
    """Every object that says it is a token is made one, wherever it stands."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        if not _is_added_token(value):
            yield WrongSetting(key=key, expected="`content` as a text, flags true or false", got=repr(value))
    elif isinstance(value, dict | list) and key != DECODER:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _nested(key, each)


def _is_token(value: Json) -> bool:
    if isinstance(value, dict):
        return value.get("__type") == "AddedToken" and _is_added_token(value)
    return _is_text(value)


def _is_added_token(value: Mapping[str, Json]) -> bool:
    """What the library makes one of: keys that it does not know, it passes over."""
    if not all(map(_is_text, value)):
        return False
    flags = (value.get(flag, False) for flag in FLAGS)
    is_text = value.get("content") is None or _is_text(value["content"])
    return is_text and all(isinstance(flag, bool) for flag in flags)


def _is_text(value: Json) -> bool:
    """A text without lone surrogates, which UTF-8 does not have."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_id(key: str) -> bool:
    try:
        int(key)
    except ValueError:
        return False
    return True
