"""Loaders of vLLM's model classes that take a layer's stored tensors apart or order their rows again.

Found in the source: every function that goes through loaded tensors and reshapes one. What becomes of the
tensors of a quantized layer there was read by a person: in `REORDERS` where it matters, in `HARMLESS` else.
"""

import ast
from collections.abc import Iterator, Mapping

# By (class, function): the layers, and which of their tensors follow (`Reordering` in vexport/architectures).
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
# Cut what is never quantized (sinks, convolutions, gates, embeddings, classes' own experts), a tensor of all
# experts, which is written one by one, tensors of other formats (Mistral's own, MXFP4, AITER's joined shared
# experts), what every rank gets whole, or no tensor but a pair of name and tensor.
HARMLESS = frozenset(
    {
        ("AXK1Model", "load_weights"),
        ("BailingGroupRMSNormGate", "_weight_loader"),
        ("DbrxExperts", "weight_loader"),
        ("DeepseekV2Model", "load_weights"),
        ("DeepseekV4MegaMoEExperts", "weight_loader"),
        ("DeepseekV4Model", "_pad_shared_expert_weight"),
        ("DeepseekV4Model", "load_weights"),
        ("Ernie4_5_VLMoeForCausalLM", "load_weights"),
        ("Glm4MoeLiteModel", "load_weights"),
        ("Glm5NextLinearAttention", "_a_log_weight_loader"),
        ("GptOssModel", "_load_weights_mxfp4"),
        ("GptOssModel", "_load_weights_other"),
        ("GptOssModel", "_load_weights_quark"),
        ("GptOssRoutedExperts", "_copy_to_expert"),
        ("GptOssRoutedExperts", "_load_packed_expert"),
        ("GptOssRoutedExperts", "_load_unquantized_expert"),
        ("GptOssRoutedExperts", "_narrow_for_rank"),
        ("GptOssRoutedExperts", "weight_loader"),
        ("GraniteMoeHybridModel", "load_weights"),
        ("HYV4Model", "load_fused_expert_weights"),
        ("HYV4Model", "load_weights"),
        ("InklingGate", "_load_weight"),
        ("InklingMoE", "load_expert_weight"),
        ("InklingShortConv", "weight_loader"),
        ("InklingSinkExperts", "load_weight"),
        ("InklingSinkExpertsLinear", "load_weight"),
        ("LagunaModel", "_slice_sink"),
        ("Llama4Model", "load_moe_expert_weights"),
        ("Llama4Model", "load_weights"),
        ("MambaMixer", "weight_loader"),
        ("MiMoV2Model", "load_weights"),
        ("MiniCPMMoE", "weight_loader"),
        ("MistralForCausalLM", "maybe_remap_mistral"),
        ("MistralForCausalLM", "permute"),
        ("NemotronH_Nano_VL_V2", "is_adapter_weights"),
        ("NgramEmbedding", "load_weight"),
        ("OpenPanguSinkAttention", "weight_loader"),
        ("PixtralForConditionalGeneration", "is_vision_encoder_weights"),
        ("PixtralForConditionalGeneration", "is_vision_lang_adapter_weights"),
        ("Qwen2MoeForCausalLM", "_maybe_reshape"),
        ("Qwen2MoeForCausalLM", "load_weights"),
        ("Step3TextModel", "load_weights"),
        ("Step3p5Model", "load_weights"),
        ("_KimiGDNMergedColumnParallelLinear", "weight_loader"),
        ("_KimiGDNMergedColumnParallelLinear", "weight_loader_v2"),
    }
)
RESHAPES = frozenset(
    {"view", "reshape", "permute", "transpose", "t", "chunk", "narrow", "split", "unflatten"}
)
TENSORS = frozenset({"loaded_weight", "loaded_tensor", "weight", "tensor", "w", "p", "param"})
Loader = tuple[str, str]


def reordered(classes: Mapping[str, ast.Module]) -> dict[str, str]:
    """The layers that the loaders of some classes order again, and how; `classes` are sources by name."""
    found: dict[str, str] = {}
    for loader in loaders(classes):
        found.update(REORDERS.get(loader, {}))
    return found


def unread(classes: Mapping[str, ast.Module]) -> set[Loader]:
    """The loaders that nobody has read yet."""
    return {loader for loader in loaders(classes) if loader not in REORDERS and loader not in HARMLESS}


def loaders(classes: Mapping[str, ast.Module]) -> Iterator[Loader]:
    """(class, function) of each function that reshapes or cuts a tensor that it is given or goes through."""
    for name, tree in classes.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _reshapes(node, set(_loaded(node))):
                yield name, node.name


def _loaded(function: ast.FunctionDef) -> Iterator[str]:
    """The names of loaded tensors in a function: arguments, and the second of `for name, x in weights`."""
    for node in ast.walk(function):
        if isinstance(node, ast.For | ast.comprehension) and "weights" in ast.unparse(node.iter):
            parts = node.target.elts[1:] if isinstance(node.target, ast.Tuple) else []
            yield from (part.id for part in parts if isinstance(part, ast.Name))
    if "weight" in function.name or function.name == "permute":
        yield from (argument.arg for argument in function.args.args if argument.arg in TENSORS)


def _reshapes(function: ast.FunctionDef, loaded: set[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in RESHAPES:
            touched = [node.func.value, *node.args[:1]]
        elif isinstance(node, ast.Subscript):
            touched = [node.value]
        else:
            continue
        if any(
            isinstance(name, ast.Name) and name.id in loaded for part in touched for name in ast.walk(part)
        ):
            return True
    return False
