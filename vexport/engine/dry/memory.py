"""Memory of one rank as vLLM's own code counts it: the parameters, and the KV cache of one sequence."""

import traceback
from typing import TYPE_CHECKING

import torch

from vexport.types import RankMemory, SequenceMemory

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Lengths of a sequence, in tokens, next to the longest that the model allows.
_LENGTHS = (1_024, 8_192, 32_768)


def rank_memory(model: torch.nn.Module, config: "VllmConfig", tp: int) -> RankMemory | None:
    """Bytes of a rank's parameters before `load_weights`, and of its KV cache for sequences of some lengths.

    None where this vLLM counts in another way: the load itself does not depend on it.
    """
    longest = config.model_config.max_model_len
    try:
        sequences = _sequences(config, longest)
    except Exception as error:
        traceback.print_exception(error)
        return None
    finally:
        config.model_config.max_model_len = longest
    return RankMemory(tp=tp, weight_bytes=_parameter_bytes(model), sequences=sequences)


def _sequences(config: "VllmConfig", longest: int) -> tuple[SequenceMemory, ...]:
    """What vLLM's scheduler reserves for one sequence (vllm/v1/core/kv_cache_utils.py).

    Whole blocks; the window of a sliding attention and the tokens scheduled with it; states of linear layers.
    """
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import _max_memory_usage_bytes_from_groups, get_kv_cache_groups
    from vllm.v1.worker.worker_base import get_current_attn_backends, get_supported_kv_cache_layouts

    specs = _specs(config)
    if not specs:
        return ()
    layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
    resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], specs.values())
    groups = get_kv_cache_groups(config, specs)
    sequences = []
    for tokens in sorted({*(length for length in _LENGTHS if length < longest), longest}):
        config.model_config.max_model_len = tokens
        kv_bytes = _max_memory_usage_bytes_from_groups(config, groups)
        sequences.append(SequenceMemory(tokens=tokens, kv_bytes=kv_bytes))
    return tuple(sequences)


def _specs(config: "VllmConfig") -> dict[str, object]:
    """The KV cache of each layer that has its own; as `get_kv_cache_spec` of vLLM's model runner."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    own = {
        name: layer.get_kv_cache_spec(config)
        for name, layer in layers.items()
        if getattr(layer, "kv_sharing_target_layer_name", None) is None
    }
    return {name: spec for name, spec in own.items() if spec is not None}


def _parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers; what is shared (tied embeddings) counts once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
