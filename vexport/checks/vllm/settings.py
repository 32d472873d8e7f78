"""Values of config.json that a plain decoder computes with: what cannot be meant."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vexport.architectures.text_config import TEXT_CONFIGS, text_config
from vexport.types import Json

# Of trained models 1e-8 to 1e-5.
LARGEST_EPSILON = 0.01
# get_rope (vllm/model_executor/layers/rotary_embedding/__init__.py); "su" and "mrope" are older names.
ROPES = frozenset(
    {
        "default",
        "dynamic",
        "linear",
        "llama3",
        "longrope",
        "mrope",
        "ntk",
        "openpangu",
        "proportional",
        "su",
        "yarn",
    }
    | {"bailing_mrope", "deepseek_llama_scaling", "deepseek_yarn", "mllama4"}
)
WITH_FACTOR = ("dynamic", "linear", "llama3", "ntk", "yarn", "deepseek_yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongSetting:
    """A key of config.json, what it may be, and what it is."""

    key: str
    expected: str
    got: str


def wrong_settings(config: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """What is wrong with a decoder's config, except its sizes."""
    yield from _epsilon(config)
    yield from _rope(config)
    experts, chosen = (
        config.get("num_experts", config.get("num_local_experts")),
        config.get("num_experts_per_tok"),
    )
    if isinstance(experts, int) and isinstance(chosen, int) and not 0 < chosen <= experts:
        yield WrongSetting(
            key="num_experts_per_tok", expected=f"from 1 to {experts} experts", got=str(chosen)
        )
    if config.get("is_encoder_decoder") is True:
        yield WrongSetting(key="is_encoder_decoder", expected="false: the class is a decoder", got="true")
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, dict):
        expected = "none: vLLM would take it for the whole config of the model"
        yield WrongSetting(key="text_config", expected=expected, got=repr(inner))
    text = text_config(config)
    if text is not config and "num_attention_heads" not in text:
        key = next(key for key in TEXT_CONFIGS if isinstance(config.get(key), dict))
        expected = "none: vLLM would take it for the whole config of the model"
        yield WrongSetting(key=key, expected=expected, got="one without num_attention_heads")


def _epsilon(config: Mapping[str, Json]) -> Iterator[WrongSetting]:
    value = config.get("rms_norm_eps", LARGEST_EPSILON)
    if not isinstance(value, float) or not 0 <= value <= LARGEST_EPSILON:
        expected = f"a number from 0 to {LARGEST_EPSILON}"
        yield WrongSetting(key="rms_norm_eps", expected=expected, got=repr(value))


def _rope(config: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """Positions: transformers 5 stores rope_parameters, older versions rope_theta and rope_scaling."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if isinstance(new, dict) and isinstance(old, dict) and new != old and not _is_default(new, old):
        got = f"{old} next to rope_parameters {new}"
        yield WrongSetting(key="rope_scaling", expected="one description of the positions", got=got)
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, dict) or any(isinstance(each, dict) for each in value.values()):
            continue
        kind = _kind(value)
        if not isinstance(kind, str) or kind not in ROPES:
            yield WrongSetting(key=key, expected=f"a type of {', '.join(sorted(ROPES))}", got=repr(kind))
        elif kind in WITH_FACTOR and not isinstance(value.get("factor"), (int, float)):
            yield WrongSetting(key=key, expected=f"a factor for {kind}", got=repr(value.get("factor")))


def _is_default(*descriptions: Mapping[str, Json]) -> bool:
    return all(_kind(description) == "default" for description in descriptions)


def _kind(description: Mapping[str, Json]) -> Json:
    return description.get("rope_type", description.get("type", "default"))
