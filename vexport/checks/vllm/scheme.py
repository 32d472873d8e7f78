"""Which of vLLM's schemes a config group gets, or why it gets none.

Source: `_get_scheme_from_parts` and `_quantization_scheme_map_from_config` in vLLM's compressed_tensors.py,
in their order, on a device on which every scheme may run.
"""

from enum import Enum

from vexport.checks.vllm.arguments import ConfigGroup, contradictions
from vexport.schemes.base import QuantArgs

# Formats for which vLLM looks at schemes with quantized inputs (is_activation_quantization_format).
WITH_INPUTS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")
PACKED = "pack-quantized"
CHANNEL_OR_GROUP = ("channel", "group")
FP8_STRATEGIES = ("tensor", "channel", "block")
# Widths that vLLM packs into 32-bit words (WNA16_SUPPORTED_TYPES_MAP).
PACKED_BITS = range(2, 9)


class SchemeKind(Enum):
    """vLLM's class of a linear layer, by what it keeps."""

    NVFP4 = "CompressedTensorsW4A4Fp4"
    MXFP4 = "CompressedTensorsW4A4Mxfp4"
    MXFP8 = "CompressedTensorsW8A8Mxfp8"
    PACKED = "CompressedTensorsWNA16"
    FP8 = "CompressedTensorsW8A8Fp8"
    INT8 = "CompressedTensorsW8A8Int8"
    INT4 = "CompressedTensorsW4A8Int"


def scheme_of(group: ConfigGroup) -> SchemeKind | str:
    """The scheme of a group's layers, or why vLLM refuses the group."""
    weights, inputs = group.weights, group.input_activations
    for args in (weights, inputs):
        for reason in contradictions(args) if args is not None else ():
            return reason
    if inputs is None and group.format in WITH_INPUTS and weights.type != "float":
        return f"format {group.format} for integers without input_activations"
    if _is_nvfp4(weights):
        if inputs is not None and not _is_nvfp4(inputs):
            return "weights of NVFP4 with other inputs"
        return SchemeKind.NVFP4
    if _is_mx(weights, 4):
        return SchemeKind.MXFP4
    if _is_mx(weights, 8) and weights.scale_dtype == "torch.uint8":
        return SchemeKind.MXFP8
    if _is_packed(group, inputs):
        return SchemeKind.PACKED if weights.num_bits in PACKED_BITS else f"{weights.num_bits} packed bits"
    found = _with_inputs(weights, inputs) if group.format in WITH_INPUTS else None
    return found or f"a combination that none of its schemes runs: {described(group)}"


def _is_nvfp4(args: QuantArgs) -> bool:
    kind = (args.strategy, args.type, args.num_bits, args.group_size, args.symmetric)
    return kind == ("tensor_group", "float", 4, 16, True)


def _is_mx(args: QuantArgs, bits: int) -> bool:
    kind = (args.strategy, args.type, args.num_bits, args.group_size, args.symmetric)
    return kind == ("group", "float", bits, 32, True)


def _is_packed(group: ConfigGroup, inputs: QuantArgs | None) -> bool:
    """Weight-only, or with inputs that are quantized as vLLM runs it."""
    weights = group.weights
    if weights.dynamic or weights.strategy not in CHANNEL_OR_GROUP:
        return False
    if inputs is None:
        return group.format == PACKED
    by_token = inputs.strategy == "token" and inputs.dynamic is True and inputs.symmetric
    four_by_eight = (weights.type, weights.num_bits, weights.strategy) == ("int", 4, "group")
    if four_by_eight and inputs.type == "float" and inputs.num_bits == 8 and weights.symmetric and by_token:
        return True
    dynamic = inputs.dynamic is True and inputs.symmetric and inputs.strategy in ("token", "group")
    integers = weights.type == inputs.type == "int" and inputs.num_bits in (4, 8)
    return group.format == PACKED and integers and dynamic


def _with_inputs(weights: QuantArgs, inputs: QuantArgs | None) -> SchemeKind | str | None:
    """The schemes that vLLM looks at for formats with quantized inputs."""
    static = not weights.dynamic and weights.symmetric
    if static and weights.type == "float" and weights.strategy in FP8_STRATEGIES:
        return _fp8(weights, inputs)
    if inputs is None or not static:
        return None
    if weights.num_bits == inputs.num_bits == 8 and weights.strategy in ("tensor", "channel"):
        by_token = inputs.strategy == "token" and inputs.dynamic
        whole = inputs.strategy == "tensor" and not inputs.dynamic
        return SchemeKind.INT8 if by_token or whole else None
    by_token = inputs.strategy == "token" and inputs.dynamic and inputs.num_bits == 8
    integers = weights.type == inputs.type == "int" and weights.num_bits == 4
    return SchemeKind.INT4 if integers and by_token and weights.strategy in CHANNEL_OR_GROUP else None


def described(group: ConfigGroup) -> str:
    """A group's arguments and format in words."""
    return f"weights {_args(group.weights)}, inputs {_args(group.input_activations)}, format {group.format}"


def _args(args: QuantArgs | None) -> str:
    if args is None:
        return "none"
    size = f" {args.group_size}" if args.group_size else ""
    dynamic = " dynamic" if args.dynamic else ""
    symmetric = "" if args.symmetric else " asymmetric"
    return f"{args.type} {args.num_bits} bits {args.strategy}{size}{dynamic}{symmetric}"


def _fp8(weights: QuantArgs, inputs: QuantArgs | None) -> SchemeKind | str:
    """FP8, where inputs are quantized as the config says; an assertion stops blocks without them
    (process_weights_after_loading of CompressedTensorsW8A16Fp8)."""
    if weights.strategy == "block" and inputs is None:
        return "FP8 blocks without input_activations"
    return SchemeKind.FP8 if _runs_fp8(inputs) else f"inputs that vLLM leaves as they are: {_args(inputs)}"


def _runs_fp8(inputs: QuantArgs | None) -> bool:
    """Whether the inputs of FP8 weights are none, or quantized as the config says (`_is_fp8_w8a8`)."""
    if inputs is None:
        return True
    whole = inputs.symmetric and inputs.strategy == "tensor"
    return inputs.type == "float" and (inputs.dynamic is not False or whole)
