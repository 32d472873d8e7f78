"""The part of a multimodal model's config that describes its language model."""

from collections.abc import Mapping

from vexport.records import Json

# Keys of nested configs: of most models; of InternVL, Nemotron VL and NVLM, which vLLM reads as text_config
# (_CONFIG_ATTRS_MAPPING in transformers_utils/config.py); of DeepSeek-VL2; of Qwen Omni and Qwen3-ASR, around
# another text_config (`get_text_config` of their configs).
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
# Keys for the routed experts of a layer.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def text_config(config: Mapping[str, Json]) -> Mapping[str, Json]:
    """The part of a config.json that describes the language model: the whole of it for a text model."""
    nested = (config.get(key) for key in TEXT_CONFIGS)
    inner = next((value for value in nested if isinstance(value, dict)), None)
    return config if inner is None else text_config(inner)
