"""Read the layers of a model that vLLM built: scheme, precision, kernel and memory of a rank."""

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vexport.architectures import with_stars
from vexport.architectures.faults import (
    FAULTS,
    FaultyLayer,
    LayerGroup,
    RunningLayer,
    faults_of,
    found_in,
    installed_source,
    recorded_faults,
)
from vexport.architectures.fusion import is_head
from vexport.engine.kernels import activation_bits, compiling_libraries, kernel_of
from vexport.engine.messages import LayerKind
from vexport.records import RankMemory, SequenceMemory
from vexport.version import parse_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

# Sequence lengths in tokens to report memory for, in addition to the model's longest length.
_LENGTHS = (1_024, 8_192, 32_768)
_SCHEME = re.compile(r"^CompressedTensors|(MoE|Linear)?Method$")


def layer_kinds(model: torch.nn.Module) -> tuple[LayerKind, ...]:
    """Return the linear and expert layers of a model.

    Layers that differ only in an index are counted together.
    """
    kinds = Counter(kind for _, kind in _layers(model))
    return tuple(replace(kind, count=count) for kind, count in kinds.items())


def raising_layer(faults: Iterable[FaultyLayer], sm: int) -> tuple[str, str] | None:
    """Return the first layer with a fault that counts as a refusal, and the kernel's message.

    Return None if there is no such fault.
    """
    for each in faults:
        if message := FAULTS[each.fault].message:
            return each.layer, f"{each.kernel} fails when it runs: {message.format(sm)}"
    return None


def faulty_layers(model: torch.nn.Module, sm: int) -> tuple[FaultyLayer, ...]:
    """Return the layers with a known fault of the vLLM that built the model, each kind once."""
    layers = dict.fromkeys(
        RunningLayer(
            name=kind.name,
            group=_group_of(kind.name, layer),
            kernel=kind.kernel,
            stored=kind.stored,
            runs=kind.runs,
            sides=_sides(layer),
            gated=getattr(getattr(layer, "moe_config", None), "is_act_and_mul", True),
            blocks=getattr(layer, "weight_block_size", None) is not None,
        )
        for layer, kind in _layers(model)
    )
    return tuple(dict.fromkeys(faults_of(_found_faults(), sm, layers)))


def compiled_parts(
    models: Iterable[torch.nn.Module], config: "VllmConfig", sm: int
) -> dict[str, tuple[str, ...]]:
    """Return the libraries that compile each kernel, attention backend and the sampler on the host.

    A part without such a library is left out. vLLM's functions for attention and the sampler differ
    between versions: if they raise, these parts are left out too.
    """
    parts: dict[str, type | None] = {}
    for layer, _ in (each for model in models for each in _layers(model)):
        scheme = getattr(layer, "scheme", None) or getattr(layer, "quant_method", None)
        kernel, name = kernel_of(scheme)
        parts[name] = kernel if isinstance(kernel, type) or kernel is None else type(kernel)
    with suppress(Exception):
        parts |= _attention_backends(config)
    with suppress(Exception):
        parts |= _sampler(sm)
    found = {name: compiling_libraries(part, name) for name, part in parts.items() if name}
    return {name: libraries for name, libraries in found.items() if libraries}


def _attention_backends(config: "VllmConfig") -> dict[str, type | None]:
    from vllm.v1.worker.worker_base import get_current_attn_backends

    return {f"attention {each.get_name()}": each for each in get_current_attn_backends(config)}


def _sampler(sm: int) -> dict[str, type | None]:
    """Return FlashInfer's attention backend if vLLM samples with FlashInfer.

    vLLM asks it for the GPUs that FlashInfer supports (flashinfer_sampler_supported in
    vllm/v1/sample/ops/topk_topp_sampler.py).
    """
    from vllm import envs
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.flashinfer import FlashInferBackend

    capability = DeviceCapability(sm // 10, sm % 10)
    supported = FlashInferBackend.supports_compute_capability(capability)
    if not (envs.VLLM_USE_FLASHINFER_SAMPLER and supported):
        return {}
    return {"sampler (top-k, top-p)": FlashInferBackend}


@cache
def _found_faults() -> dict[str, bool | None]:
    """Return the results of the predicates for this vLLM, or the recorded result if it has none.

    vLLM's CPU build, for example, has no files of DeepGEMM.
    """
    import vllm

    found = found_in(installed_source(Path(vllm.__file__).parent.parent))
    version = parse_version(vllm.__version__)
    recorded_version, recorded = recorded_faults(version)
    if recorded_version != version:
        return found
    return {name: recorded.get(name) if found[name] is None else found[name] for name in found}


def _group_of(name: str, layer: torch.nn.Module) -> LayerGroup:
    if is_head(name):
        return "head"
    return "experts" if "MoE" in type(getattr(layer, "quant_method", None)).__name__ else "linear"


def _sides(layer: torch.nn.Module) -> tuple[int, ...]:
    weight = getattr(layer, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return tuple(weight.shape)
    return ()


def _layers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, LayerKind]]:
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        weights = any(
            "weight" in parameter for parameter, _ in layer.named_parameters(recurse=False)
        )
        if method is None or not weights or "Embedding" in type(method).__name__:
            continue
        scheme = getattr(layer, "scheme", None) or method
        kernel, kernel_name = kernel_of(scheme)
        # vLLM's name of the layer; in a drafter it differs from its place in the module tree.
        given = getattr(layer, "prefix", None) or getattr(layer, "layer_name", None)
        stored = _stored_precision(method, layer, given if isinstance(given, str) else name)
        bits = activation_bits(scheme, kernel, kernel_name)
        kind = LayerKind(
            name=with_stars(name),
            count=1,
            scheme=_SCHEME.sub("", type(scheme).__name__),
            stored=stored,
            runs=re.sub(r"A\d+$", f"A{bits}", stored) if bits else stored,
            kernel=kernel_name,
        )
        yield layer, kind


def _stored_precision(method: object, layer: torch.nn.Module, name: str) -> str:
    if type(method).__name__.startswith("Unquantized"):
        return "W16A16"
    config = getattr(method, "quantization_config", None) or getattr(layer, "quant_config", None)
    find = getattr(config, "get_scheme_dict", None)
    if find is None:
        return ""
    first = getattr(layer, "ckpt_gate_proj_name", "gate_proj")
    args = find(layer, name) or find(layer, f"{name}.0.{first}") or {}
    weights, inputs = args.get("weights"), args.get("input_activations")
    if weights is None:
        return "W16A16"
    return f"W{weights.num_bits}A{inputs.num_bits if inputs is not None else 16}"


def rank_memory(
    models: Sequence[torch.nn.Module], config: "VllmConfig", tp: int
) -> RankMemory | None:
    """Return the bytes of a rank's parameters and buffers, and of its KV cache.

    The bytes of the KV cache are for one sequence, at each of several lengths. Call this before the
    weights are loaded, because vLLM may replace parameters then. Return None if vLLM's functions
    for the KV cache raise, as they may in another version.
    """
    longest = config.model_config.max_model_len
    try:
        sequences = _sequences(config, longest)
    except Exception as error:
        traceback.print_exception(error)
        return None
    finally:
        config.model_config.max_model_len = longest
    # Shared parameters (tied embeddings) count once.
    tensors = {
        id(tensor): tensor for model in models for tensor in (*model.parameters(), *model.buffers())
    }
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return RankMemory(tp=tp, weight_bytes=size, sequences=sequences)


def _sequences(config: "VllmConfig", longest: int) -> tuple[SequenceMemory, ...]:
    """Return the bytes that vLLM's scheduler reserves for one sequence of each length.

    vLLM reserves whole blocks. Layers with sliding-window attention need blocks for the window and
    for the tokens of a scheduler step. Layers with linear attention (such as Mamba) need a state of
    fixed size.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.worker.worker_base import get_current_attn_backends, get_supported_kv_cache_layouts

    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    all_specs = {  # as in `get_kv_cache_spec` of vLLM's model runner
        name: layer.get_kv_cache_spec(config)
        for name, layer in layers.items()
        if getattr(layer, "kv_sharing_target_layer_name", None) is None
    }
    specs = {name: spec for name, spec in all_specs.items() if spec is not None}
    if not specs:
        return ()
    layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
    resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], specs.values())
    bytes_of_sequence = _cache_size(config, specs)
    sequences = []
    for tokens in sorted({*(length for length in _LENGTHS if length < longest), longest}):
        config.model_config.max_model_len = tokens
        sequences.append(SequenceMemory(tokens=tokens, kv_bytes=bytes_of_sequence()))
    return tuple(sequences)


def _cache_size(config: "VllmConfig", specs: "dict[str, KVCacheSpec]") -> Callable[[], int]:
    """Return a function for the bytes of a sequence of the maximum length that `config` has then.

    vLLM 0.33 moved its functions from kv_cache_utils.py to kv_cache_planning.py in vllm/v1/core,
    and passes them a builder of the platform.
    """
    if find_spec("vllm.v1.core.kv_cache_planning") is None:
        from vllm.v1.core import kv_cache_utils as utils

        groups = utils.get_kv_cache_groups(config, specs)
        return partial(utils._max_memory_usage_bytes_from_groups, config, groups)
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder

    builder = get_kv_cache_config_builder(config)
    groups = planning.get_kv_cache_groups_from_builder(builder, config, specs)
    return partial(planning._max_memory_usage_bytes_from_groups, builder, config, groups)
