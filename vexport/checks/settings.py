"""Values of config.json that a plain decoder computes with: what cannot be meant."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
class Fault:
    """A key of config.json, what it may be, and what it is."""

    key: str
    expected: str
    got: str


def faults(config: Mapping[str, Json]) -> Iterator[Fault]:
    """What is wrong with a decoder's config beside its sizes."""
    yield from _epsilon(config)
    yield from _rope(config)
    experts, chosen = (
        config.get("num_experts", config.get("num_local_experts")),
        config.get("num_experts_per_tok"),
    )
    if isinstance(experts, int) and isinstance(chosen, int) and not 0 < chosen <= experts:
        yield Fault(key="num_experts_per_tok", expected=f"from 1 to {experts} experts", got=str(chosen))
    text = config.get("text_config")
    if isinstance(text, dict) and "num_attention_heads" not in text:
        expected = "none: vLLM would take it for the whole config of the model"
        yield Fault(key="text_config", expected=expected, got="one without num_attention_heads")


def _epsilon(config: Mapping[str, Json]) -> Iterator[Fault]:
    value = config.get("rms_norm_eps")
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(float(str(value))) or not 0 <= float(str(value)) <= LARGEST_EPSILON:
        expected = f"a number from 0 to {LARGEST_EPSILON}"
        yield Fault(key="rms_norm_eps", expected=expected, got=repr(value))


def _rope(config: Mapping[str, Json]) -> Iterator[Fault]:
    """Positions: transformers 5 stores rope_parameters, older versions rope_theta and rope_scaling."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if isinstance(new, dict) and isinstance(old, dict) and new != old:
        got = f"{old} beside rope_parameters {new}"
        yield Fault(key="rope_scaling", expected="one description of the positions", got=got)
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, dict) or any(isinstance(each, dict) for each in value.values()):
            continue
        kind = value.get("rope_type", value.get("type", "default"))
        if kind not in ROPES:
            yield Fault(key=key, expected=f"a type of {', '.join(sorted(ROPES))}", got=repr(kind))
        elif kind in WITH_FACTOR and not isinstance(value.get("factor"), (int, float)):
            yield Fault(key=key, expected=f"a factor for {kind}", got=repr(value.get("factor")))
