"""Values of generation_config.json that transformers or vLLM refuses.

Sources: GenerationConfig.__init__ and validate (transformers 5.19, generation/configuration_utils.py), which
vLLM calls at its start (try_get_generation_config); SamplingParams._verify_args and
update_from_generation_config (vllm/sampling_params.py) for every request.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeGuard

from vexport.checks.vllm.settings import WrongSetting
from vexport.types import Json

_CACHES = """
dynamic hybrid hybrid_chunked offloaded offloaded_hybrid offloaded_hybrid_chunked offloaded_static paged
quantized sliding_window static
"""
CACHES = frozenset(_CACHES.split())
_NO_KEYS = """
__class__ __dict__ assistant_model dict_dtype_to_str extra_output_flags logits_processor streamer synced_gpus
negative_prompt_attention_mask negative_prompt_ids prefix_allowed_tokens_fn stopping_criteria to_dict
to_diff_dict to_json_string update validate
"""
# Arguments of `generate`, and names by which transformers calls the object itself.
NO_KEYS = frozenset(_NO_KEYS.split())
WATERMARK = frozenset({"greenlist_ratio", "bias", "hashing_key", "seeding_scheme", "context_width"})
Number = int | float


def _ids(value: Json) -> bool:
    return isinstance(value, int) or (
        isinstance(value, list) and all(isinstance(each, int) for each in value)
    )


def _suppressible(value: Json) -> bool:
    """What transformers makes a set of."""
    return isinstance(value, str | dict) or (
        isinstance(value, list) and not any(isinstance(each, list | dict) for each in value)
    )


def _watermark(value: Json) -> bool:
    if not isinstance(value, dict) or value.keys() - WATERMARK:
        return False
    ratio, width = value.get("greenlist_ratio", 0.25), value.get("context_width", 1)
    return (
        value.get("seeding_scheme", "lefthash") in ("lefthash", "selfhash")
        and isinstance(ratio, Number)
        and 0 <= ratio <= 1
        and isinstance(width, Number)
        and width >= 1
    )


def _within(low: float, high: float, *, above: bool = False) -> Callable[[Json], bool]:
    """Numbers of a range; `above` leaves its lower end out."""

    def is_within(value: Json) -> bool:
        return _is_number(value) and low <= float(value) <= high and not (above and value == low)

    return is_within


def _is_number(value: Json) -> TypeGuard[float]:
    try:
        return isinstance(value, Number) and math.isfinite(value)
    except OverflowError:
        return False


# What a value that is there and not null has to be.
VALUES: Mapping[str, tuple[str, Callable[[Json], bool]]] = {
    "repetition_penalty": ("above 0", _within(0, math.inf, above=True)),
    "presence_penalty": ("from -2 to 2", _within(-2, 2)),
    "frequency_penalty": ("from -2 to 2", _within(-2, 2)),
    "temperature": ("from 0 to 2", _within(0, 2)),
    "top_k": ("a whole number from -1", lambda value: isinstance(value, int) and value >= -1),
    "top_p": ("above 0, up to 1", _within(0, 1, above=True)),
    "min_p": ("from 0 to 1", _within(0, 1)),
    "max_new_tokens": ("at least 1", lambda value: isinstance(value, Number) and not value < 1),
    "eos_token_id": ("a token id, or a list of them", _ids),
    "pad_token_id": ("a token id", lambda value: isinstance(value, Number)),
    "suppress_tokens": ("a list of token ids", _suppressible),
    "num_return_sequences": ("a number", lambda value: isinstance(value, Number)),
    "early_stopping": (
        "true, false or 'never'",
        lambda value: isinstance(value, bool | int | float | str) and value in (True, False, "never"),
    ),
    "cache_implementation": (
        f"one of {', '.join(sorted(CACHES))}",
        lambda value: isinstance(value, str) and value in CACHES,
    ),
    "assistant_ensemble_weight": (
        "above 0, below 1",
        lambda value: isinstance(value, Number) and 0 < value < 1,
    ),
    "watermarking_config": ("the settings of a watermark", _watermark),
    "compile_config": ("none: a file cannot hold one", lambda value: False),
}


def wrong_generation(content: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """Each value with which vLLM would not start, or would refuse every request."""
    for key, (expected, is_valid) in VALUES.items():
        value = content.get(key)
        if value is not None and not is_valid(value):
            yield WrongSetting(key=key, expected=expected, got=repr(value))
    for key in content:
        if key in NO_KEYS:
            expected = "no such key: transformers uses the name itself"
            yield WrongSetting(key=key, expected=expected, got=repr(content[key]))
    yield from _dtypes(content)
    yield from _sequences(content)
    yield from _suppressed(content)


def _dtypes(content: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """`dtype` is taken for that of torch at every level, unless it is a text."""
    for key, value in content.items():
        if key == "dtype" and not isinstance(value, str | None) and "." not in str(value):
            yield WrongSetting(key=key, expected="the name of a dtype", got=repr(value))
        elif isinstance(value, dict):
            yield from _dtypes(value)


def _sequences(content: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """More than one answer needs sampling, or as many beams."""
    count, beams = content.get("num_return_sequences"), content.get("num_beams")
    if not isinstance(count, Number) or not count > 1:
        return
    if beams is None or beams == 1:
        if not content.get("do_sample"):
            expected = "1 without do_sample or num_beams"
            yield WrongSetting(key="num_return_sequences", expected=expected, got=repr(count))
    elif not isinstance(beams, Number) or count > beams:
        expected = f"at most num_beams {beams!r}"
        yield WrongSetting(key="num_return_sequences", expected=expected, got=repr(count))


def _suppressed(content: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """A token that is forced and suppressed at once; forced ones are looked at only then."""
    suppressed = content.get("suppress_tokens")
    if not isinstance(suppressed, list):
        return
    for key in ("forced_bos_token_id", "forced_eos_token_id"):
        value = content.get(key)
        forced = value if isinstance(value, list) else [value]
        if value is not None and not _ids(value):
            yield WrongSetting(key=key, expected="a token id, or a list of them", got=repr(value))
        elif value is not None and forced and all(each in suppressed for each in forced):
            yield WrongSetting(key=key, expected="a token outside suppress_tokens", got=repr(value))
