"""`fp8`: e4m3 weights with a scale for each block (DeepSeek, Qwen) or one scale per tensor.

Source: vllm/model_executor/layers/quantization/fp8.py.
"""

from dataclasses import replace
from math import gcd

from vexport.architectures.config import EXPERT_COUNTS, text_config
from vexport.checks.vllm.quant_methods.base import (
    CACHE_SCALES,
    MethodConfig,
    MethodFp8,
    MethodGroup,
    QuantMethod,
    is_listed,
    linear_group,
)
from vexport.formats.arguments import Arguments
from vexport.formats.base import Partition
from vexport.formats.schemes import get_scheme
from vexport.records import Json
from vexport.rules import config as rules

SOURCE = "fp8.py"
SCHEMES = ("static", "dynamic")
# Smallest block size that vLLM uses if it splits the blocks of experts.
MIN_BLOCK = 32


class NativeFp8Block(MethodFp8):
    """FP8 weights with a scale per block, `weight_scale_inv`.

    Despite the scale's name, vLLM multiplies by it.
    """

    names = {"weight_scale": "weight_scale_inv"}

    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        """Return why vLLM refuses the blocks, or None if it runs them.

        If ranks cut the blocks of routed experts, vLLM splits them into smaller whole blocks
        (refine_fp8_moe_block_shape in fused_moe/oracle/fp8.py).
        """
        reason = super().unsupported_shape(args, partition)
        if reason is None or not partition.experts or partition.split == "none":
            return reason
        block = gcd(*(args.weights.block or ()), partition.in_features, *partition.out_features)
        return None if block >= MIN_BLOCK else reason


def read(config: MethodConfig) -> QuantMethod:
    """Return the method as vLLM reads it. The output head is never quantized."""
    values = config.values
    scheme, block = config.required("activation_scheme"), values.get("weight_block_size")
    if scheme not in (*SCHEMES, None):
        config.add_problem(rules.CHOICE, "activation_scheme", value=scheme, choices=SCHEMES)
    if block is not None and not is_block(block):
        config.add_problem(rules.BLOCK_SIZE, "weight_block_size", value=block)
    elif block is not None and scheme == "static":
        config.add_problem(rules.STATIC_WITH_BLOCKS, "activation_scheme")
    has_experts = any(text_config(config.model).get(key) for key in EXPERT_COUNTS)
    if has_experts and values.get("store_dtype") is not None:
        config.add_problem(rules.STORE_DTYPE, "store_dtype", value=values["store_dtype"])
    kept = config.names("ignored_layers", "modules_to_not_convert")
    quantized = group(block, static=scheme == "static")
    return QuantMethod(
        name="fp8",
        skip_key="modules_to_not_convert"
        if "modules_to_not_convert" in values
        else "ignored_layers",
        groups=(quantized,),
        cache_scales=CACHE_SCALES,
        pairs_cache_scales=True,
        group_of=lambda layer, name: None if layer in kept or is_listed(name, kept) else quantized,
    )


def is_block(block: Json) -> bool:
    """Return True if a block size consists of two positive integers."""
    sides = block if isinstance(block, list) else []
    return len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)


def group(block: Json, *, static: bool) -> MethodGroup:
    """Return a group of FP8 weights, with inputs quantized by token, by block, or statically."""
    args = get_scheme("FP8_DYNAMIC" if block is None else "FP8_BLOCK").args
    weights, inputs = args.weights, args.input_activations
    if isinstance(block, list) and is_block(block) and inputs is not None:
        rows, columns = int(str(block[0])), int(str(block[1]))
        weights = replace(weights, block_structure=(rows, columns))
        inputs = replace(inputs, group_size=columns)
    elif block is None:
        weights = get_scheme("FP8").args.weights
        inputs = get_scheme("FP8").args.input_activations if static else inputs
    stored_as = (MethodFp8 if block is None else NativeFp8Block)("fp8")
    return linear_group("fp8", stored_as, weights, inputs)
