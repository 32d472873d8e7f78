"""Write vexport/architectures/generated/vllm.json: fused, renamed and unquantized layers.

Run in an environment with vLLM: `python scripts/generate_architectures.py [--out TABLE.json]`. No
vLLM class is instantiated. The script reads class attributes, and searches the source of a class
and of the classes in it for:

- the tables of its loader (`stacked_params_mapping`)
- layers built without `quant_config`
- the attribute that holds the language model (`_mark_language_model`)

Models for vLLM's Transformers backend are built without memory (transformers_backend.py). The
script makes vLLM believe that there is a CUDA device, because some of its classes differ by
platform.
"""

import ast
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from vexport.architectures import POOLED, REMOVED
from vexport.engine.dry.worker import preload

preload()

import transformers  # noqa: E402
import vllm  # noqa: E402
from model_classes import (  # noqa: E402
    assigned,
    calls_in,
    groups,
    language_models,
    literal,
    load_class,
    output_sizes,
    parts_of,
    source,
    tree,
)
from tables import arguments, embedding, name_of, write_table  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402
from transformers_backend import (  # noqa: E402
    describe_backed,
    generating_classes,
    has_tensor_parallel_plan,
)
from vllm.model_executor.models import registry  # noqa: E402
from vllm.model_executor.models.utils import WeightsMapper  # noqa: E402

DEFAULT_EXPERTS = ("gate_proj", "down_proj", "up_proj")  # the default `ckpt_names` of FusedMoE
REPLICATED = ("ReplicatedLinear", "GateLinear", "DeepSeekV2FusedQkvAProjLinear")
# Signs of experts in a single tensor of shape (experts, in, out): an argument of the layer, or a
# method of Llama 4's loader.
TRANSPOSED = ("is_fused_checkpoint_transposed=True", "def load_moe_expert_weights")
# Loaders that reorder a layer's rows, by (class, function), and which of the layer's tensors are
# reordered (`Reordering` in vexport/architectures). A person reads the loaders: add new classes
# with such a loader here.
REORDERS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("Llama4ForCausalLM", "permute_qk_weight_for_rotary"): dict.fromkeys(
        ("q_proj", "k_proj"), "scales by row"
    ),
    ("BloomModel", "_repack_qkv"): {"query_key_value": "every tensor"},
    ("TeleChat2Model", "_split_key_value"): {"key_value": "every tensor"},
    ("FalconModel", "load_weights"): {"query_key_value": "whole heads"},
    ("K2HorizonModel", "load_weights"): dict.fromkeys(("q_proj", "k_proj"), "plain weight"),
    ("GPT2Model", "_transpose_conv1d"): dict.fromkeys(("c_attn", "c_proj", "c_fc"), "transposed"),
}
Table = dict[str, object]


def main() -> None:
    target: Path = arguments(__doc__, "vllm.json").out
    logging.disable(logging.WARNING)
    # vLLM inspects each class in a separate process, to leave GPUs alone. There is no GPU here.
    registry._run_in_subprocess = lambda function: function()
    own, left_out = own_classes()
    backed, failed = backed_classes(own.keys() | left_out.keys())
    table = dict(sorted({**own, **backed}.items()))
    out = {**other_tasks(), **left_out, **failed}
    inner = {
        kind: name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in table
    }
    reasons = {name: reason for name, reason in sorted(out.items()) if name not in table}
    head = {
        "vllm": vllm.__version__,
        "transformers": transformers.__version__,
        "text_models": inner,
    }
    content = {**head, "left_out": reasons, "architectures": table}
    write_table(target, content, "left_out", "architectures")
    print(
        f"{target.name}: {len(own)} own classes of vLLM {vllm.__version__}, {len(backed)} of "
        f"transformers"
    )


def own_classes() -> tuple[dict[str, Table], dict[str, str]]:
    """Return (entries, reasons) for the generating classes with code in vLLM."""
    table: dict[str, Table] = {}
    left_out: dict[str, str] = {}
    models = {**registry._MULTIMODAL_MODELS, **registry._TEXT_GENERATION_MODELS}
    for architecture, (module, name) in sorted(models.items()):
        try:
            model = load_class(module, name)
        except ImportError as error:
            left_out[architecture] = f"it could not be imported where the table was made: {error}"
            continue
        entry = describe(model)
        if getattr(
            model, "supports_transcription_only", False
        ) and "_mark_language_model" not in source(model):
            left_out[architecture] = "vLLM runs it to transcribe speech and for nothing else"
        elif "language_model" in entry or architecture in registry._TEXT_GENERATION_MODELS:
            table[architecture] = entry
        else:
            left_out[architecture] = (
                "vLLM's code does not say which part of it is the language model"
            )
    return table, left_out


def backed_classes(known: Collection[str]) -> tuple[dict[str, Table], dict[str, str]]:
    """Return (entries, reasons) for classes that run by vLLM's Transformers backend.

    vLLM's registry lists some of these classes for the backend. The others are classes of
    transformers that have a plan for tensor parallelism and are in no registry of vLLM.
    """
    kinds = generating_classes()
    listed = registry._TRANSFORMERS_SUPPORTED_MODELS
    classes = {
        name: kind
        for name, kind in kinds.items()
        if name in listed
        or name not in {*known, *registry._VLLM_MODELS}
        and has_tensor_parallel_plan(kind)
    }
    entries: dict[str, Table] = {}
    reasons = {name: "transformers does not have it" for name in listed if name not in kinds}
    for name, found in describe_backed(classes):
        if isinstance(found, str):
            reasons[name] = f"vLLM's Transformers backend: {found}"
        else:
            entries[name] = found
    return entries, reasons


def other_tasks() -> dict[str, str]:
    """Return classes that vLLM runs for tasks other than text generation, and removed classes."""
    pooling = {
        **registry._EMBEDDING_MODELS,
        **registry._LATE_INTERACTION_MODELS,
        **registry._REWARD_MODELS,
        **registry._TOKEN_CLASSIFICATION_MODELS,
        **registry._SEQUENCE_CLASSIFICATION_MODELS,
    }
    return {
        **{
            name: f"{REMOVED} {last}"
            for name, last in registry._PREVIOUSLY_SUPPORTED_MODELS.items()
        },
        **{
            name: f"vLLM runs it by a plug-in: {url}"
            for name, url in registry._OOT_SUPPORTED_MODELS.items()
        },
        **dict.fromkeys(
            registry._SPECULATIVE_DECODING_MODELS, "vLLM runs it as the draft of another model"
        ),
        **dict.fromkeys(pooling, POOLED),
        **dict.fromkeys(
            registry._TRANSFORMERS_BACKEND_MODELS, "vLLM's Transformers backend, whatever the model"
        ),
    }


def reordered(parts: list[type]) -> dict[str, str]:
    return {
        layer: how
        for (name, function), layers in REORDERS.items()
        if any(part.__name__ == name and hasattr(part, function) for part in parts)
        for layer, how in layers.items()
    }


def describe(model: type) -> Table:
    """Return the entry of a class.

    For a multimodal class, it is the entry of its language model with the class's names added.
    """
    attributes, inner = language_models(model)
    parts = parts_of(model)
    packed = packed_modules([*parts, model])
    merged = {name: members for name, members in packed.items() if len(members) > 1}
    fused = {**stacked_modules(parts), **merged}
    plain = [member for name in unquantized(parts) for member in fused.get(name, [name])]
    sizes = output_sizes(parts)
    entry: Table = {
        "fused": fused,
        "resolved": sorted(getattr(model, "packed_modules_mapping", None) or {}),
        "experts": expert_names(parts),
        "transposed_experts": any(mark in source(part) for part in parts for mark in TRANSPOSED),
        "stacked_experts": stacked_experts(parts),
        "reordered": reordered([*parts, model]),
        "parts": {name: sizes[name] for name in sizes if name not in (*plain, *unquantized(parts))},
        "groups": groups(parts),
        "unquantized": plain,
        "routers": sorted({*named_layers(parts, is_quantizable_router)} - {*unquantized(parts)}),
        "row_parallel": named_layers(parts, lambda call: name_of(call) == "RowParallelLinear"),
        "replicated": named_layers(parts, is_replicated),
        "embedding": embedding(call for part in parts for call in calls_in(part)),
        "renames": renames(model),
        "language_model": sorted(attributes),
        "inner_unknown": bool(attributes) and not inner,
    }
    return {key: value for key, value in entry.items() if value not in ({}, [], None, False)}


def packed_modules(parts: list[type]) -> dict[str, list[str]]:
    """Return `packed_modules_mapping` of the classes.

    Entries that the source of a class adds to it are included.
    """
    found: dict[str, list[str]] = {}
    for part in parts:
        for fused, members in (getattr(part, "packed_modules_mapping", None) or {}).items():
            found.setdefault(fused, list(members))
        for node in ast.walk(tree(part)):
            if isinstance(node, ast.Assign) and "packed_modules_mapping[" in ast.unparse(
                node.targets[0]
            ):
                key, members = literal(node.targets[0]), literal(node.value)
                if isinstance(key, str) and isinstance(members, list):
                    found.setdefault(key, members)
    return found


def stacked_modules(parts: list[type]) -> dict[str, list[str]]:
    """Return the weights that loaders stack into a single parameter.

    They are in `orig_to_new_stacked` and in literals (fused, member, shard).
    """
    found: dict[str, list[str]] = {}
    for fused, member in [
        pair for part in parts for pair in (*mapped_pairs(part), *literal_pairs(part))
    ]:
        left, right = leaf(fused), leaf(member)
        if left and right:
            members = found.setdefault(left, [])
            if right not in members:
                members.append(right)
    return {fused: members for fused, members in found.items() if len(members) > 1}


def leaf(name: str) -> str:
    """Return the name of the module in a loader's pattern (`.self_attn.qkv_proj.` -> qkv_proj)."""
    return name.removesuffix(".weight").strip(".").rpartition(".")[2]


def mapped_pairs(part: type) -> Iterator[tuple[str, str]]:
    mapper = getattr(part, "hf_to_vllm_mapper", None)
    if isinstance(mapper, WeightsMapper):
        for member, (fused, _) in mapper.orig_to_new_stacked.items():
            yield fused, member


def literal_pairs(part: type) -> Iterator[tuple[str, str]]:
    """Yield (fused, member) from the lists that a class's load_weights iterates over."""
    for node in ast.walk(tree(part)):
        if isinstance(node, ast.Tuple) and len(node.elts) == 3:
            values = literal(node)
            if (
                isinstance(values, tuple)
                and isinstance(values[0], str)
                and isinstance(values[1], str)
            ):
                yield values[0], values[1]


def expert_names(parts: list[type]) -> list[str | None] | None:
    """Return the names of an expert's gate, down and up projections, or None without experts."""
    calls = [call for part in parts for call in calls_in(part)]
    layers = [call for call in calls if name_of(call).startswith("FusedMoE")]
    for call in calls:
        for keyword in call.keywords:
            if keyword.arg == "ckpt_names" and isinstance(names := literal(keyword.value), tuple):
                return list(names)
    for call in calls:
        names = {keyword.arg: literal(keyword.value) for keyword in call.keywords}
        gate, up = names.get("ckpt_gate_proj_name"), names.get("ckpt_up_proj_name")
        if isinstance(gate, str):
            return [gate, str(names["ckpt_down_proj_name"]), str(up) if up else None]
    return list(DEFAULT_EXPERTS) if layers else None


def layers(parts: list[type]) -> Iterator[tuple[ast.Call, str]]:
    """Yield each call that makes an attribute of self, and the last part of the layer's name."""
    for part in parts:
        for node in ast.walk(tree(part)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                yield from ((node.value, layer_name(node.value, name)) for name in assigned(node))


def unquantized(parts: list[type]) -> list[str]:
    """Return the linear layers that never get a quantization config, by their last name part."""
    plain: set[str] = set()
    quantizable: set[str] = set()
    for call, name in layers(parts):
        if name_of(call).endswith(("Linear", "ParallelLMHead")) and not is_quantizable_router(call):
            (plain if is_plain(call) else quantizable).add(name)
    return sorted(plain - quantizable)


def named_layers(parts: list[type], wanted: Callable[[ast.Call], bool]) -> list[str]:
    """Return the layers that are built by calls with `wanted`, by the last part of their names."""
    return sorted({name for call, name in layers(parts) if wanted(call)})


def is_replicated(call: ast.Call) -> bool:
    """Return True if every rank of tensor parallelism has the whole layer."""
    whole = any(word.arg == "disable_tp" and literal(word.value) is True for word in call.keywords)
    return whole or name_of(call) in REPLICATED


def is_plain(call: ast.Call) -> bool:
    """Return True if a layer gets no quantization config, or None."""
    given = [
        ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "quant_config"
    ]
    return given in ([], ["None"])


def is_quantizable_router(call: ast.Call) -> bool:
    """Return True if a call builds a router with a quantization config.

    Source: fused_moe/router/gate_linear.py.
    """
    return name_of(call) == "GateLinear" and not is_plain(call)


def layer_name(call: ast.Call, attribute: str) -> str:
    """Return the last part of the layer's prefix, or the attribute that holds the layer."""
    for keyword in call.keywords:
        if keyword.arg == "prefix":
            tail = ast.unparse(keyword.value).strip("'\")").rpartition(".")[2]
            if tail.isidentifier():
                return tail
    return attribute


def stacked_experts(parts: list[type]) -> dict[str, str]:
    """Return other names of stacked experts on disk: suffix -> vLLM's suffix."""
    mappers = [getattr(part, "hf_to_vllm_mapper", None) for part in parts]
    return {
        old: new
        for mapper in mappers
        if isinstance(mapper, WeightsMapper)
        for old, new in mapper.orig_to_new_suffix.items()
        if new is not None and new.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }


def renames(model: type) -> dict[str, dict[str, str]]:
    """Return the rules that turn module names in a checkpoint into vLLM's names."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    found: dict[str, dict[str, str]] = {}
    for kind in ("regex", "substr", "prefix") if isinstance(mapper, WeightsMapper) else ():
        names = getattr(mapper, f"orig_to_new_{kind}").items()
        found[kind] = {getattr(old, "pattern", old): new for old, new in names if new is not None}
    return {kind: names for kind, names in found.items() if names}


if __name__ == "__main__":
    main()
