"""Integer weights: packed groups of 2 to 8 bits (WNA16, W4A8, W4AFP8), and INT8 or INT4 in bytes.

Layouts: compressed_tensors_w8a8_int8.py, compressed_tensors_wNa16.py, compressed_tensors_wNa8.py,
compressed_tensors_w4a8_fp8.py and compressed_tensors_w4a8_int.py in
vllm/model_executor/layers/quantization/compressed_tensors/schemes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vexport.formats.arguments import UNQUANTIZED_BITS, Arguments, QuantArgs, input_bits
from vexport.formats.base import (
    AMX,
    AVX512,
    WITH_INPUTS,
    Cpu,
    Format,
    GpuSupport,
    Parameter,
    Partition,
    exact,
    partial_group,
    scale,
    single,
    words,
    zero_point,
)
from vexport.numerics import INT32_BITS
from vexport.records import LinearPlan, TensorInfo
from vexport.words import plural

if TYPE_CHECKING:
    import torch

    from vexport.formats.base import Bytes, Codes
    from vexport.formats.packing.base import Packing, PackingInputs

CHANNEL_OR_GROUP = ("channel", "group")
# Widths that vLLM packs into 32-bit words (WNA16_SUPPORTED_TYPES_MAP).
PACKED_BITS = range(2, 9)
# Group sizes that vLLM's own kernels run for each width (MarlinLinearKernel;
# TritonW4A16LinearKernel for 256). Other widths and group sizes run with humming-kernels, a package
# that vLLM's CUDA wheel requires.
VLLM_GROUPS: Mapping[int, Sequence[int | None]] = {
    4: (None, 32, 64, 128, 256),
    8: (None, 32, 64, 128),
}
# Group sizes that vexport offers for widths that only Humming runs. Humming's kernels accept every
# group size.
HUMMING_GROUPS = (None, 32, 64, 128)
# Tile sizes (for linear layers and for routed experts) and the group size of CUTLASS's kernels for
# INT4 weights with FP8 inputs. Sources: CutlassW4A8LinearKernel in
# vllm/model_executor/kernels/linear/mixed_precision/cutlass.py, and
# compressed_tensors_moe_w4a8_fp8.py for routed experts.
W4AFP8_TILE, W4AFP8_EXPERT_TILE, W4AFP8_GROUP = 128, 256, 128
NO_EXPERTS = "vLLM has no GPU kernel for routed experts in this scheme"


class PackedIntegers(Format):
    """Weights of 2 to 8 bits packed into int32 along in_features, with scales in the model's dtype.

    W4A8 is stored in this format, too. compressed-tensors would choose int-quantized for W4A8, but
    vLLM has no GPU kernel for that format. A value may begin in one word and end in the next: the
    shapes of vLLM's parameters leave no empty bits between values. compressed-tensors packs in the
    same way since 0.18. Earlier versions left the remaining bits of a word empty.
    """

    name = "pack-quantized"
    weight = "weight_packed"

    def matches(self, args: Arguments, stored_as: str) -> bool:
        """Return True for a group with unquantized inputs, or inputs that vLLM can quantize."""
        weights, inputs = args.weights, args.input_activations
        if weights.dynamic or weights.strategy not in CHANNEL_OR_GROUP:
            return False
        if inputs is None:
            return stored_as == self.name
        if _is_w4afp8(args):
            return True
        dynamic = (
            inputs.dynamic is True and inputs.symmetric and inputs.strategy in ("token", "group")
        )
        integers = not weights.is_float and not inputs.is_float and inputs.num_bits in (4, 8)
        return stored_as == self.name and integers and dynamic

    def refusal(self, args: Arguments) -> str | None:
        bits = args.weights.num_bits
        return None if bits in PACKED_BITS else f"packed integers of {plural(bits, 'bit')}"

    def unwritable_arguments(self, args: Arguments) -> str | None:
        """Describe floats, or return None.

        vLLM ignores the type of weight-only groups, and would read floats as integers.
        """
        return "floats in groups, which vLLM reads as integers" if args.weights.is_float else None

    def group_sizes(self, args: Arguments) -> Sequence[int | None]:
        """Return the group sizes of vLLM's kernels; with FP8 inputs, the group size of CUTLASS."""
        if args.input_activations is not None and args.input_activations.is_float:
            return (W4AFP8_GROUP,)
        return VLLM_GROUPS.get(args.weights.num_bits, HUMMING_GROUPS)

    def vllm_scheme(self, args: Arguments) -> str:
        inputs = args.input_activations
        if inputs is None:
            return "CompressedTensorsWNA16"
        return (
            "CompressedTensorsW4A8Fp8"
            if inputs.is_float
            else f"CompressedTensorsWNA{inputs.num_bits}Int"
        )

    def runs_experts(self, args: Arguments) -> bool:
        inputs = args.input_activations
        return inputs is None or (inputs.is_float and args.weights.group == W4AFP8_GROUP)

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """Return weight_packed, weight_scale and weight_shape, and weight_zero_point if asymmetric.

        Their shapes are (out, ceil(in*bits/32)), (out, in/group), (2,) and (ceil(out*bits/32),
        in/group). Zero points are packed along out_features.
        """
        codes = (shape[0], words(shape[1], args.weights.num_bits))
        return {
            self.weight: exact("I32", codes, along=(0, 1)),
            "weight_scale": scale(args.weights, shape, in_model_dtype=True),
            "weight_shape": exact("I64", (2,), "I32"),
            **zero_point(args.weights, shape),
        }

    def shape(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
        """Return the shape, derived from the numbers of packed words and of groups.

        The number of words alone is not enough if the last bits of each row are unused.
        """
        codes, scales = super().shape(args, stored), stored.get("weight_scale")
        if codes is None:
            return None
        bits, size = args.weights.num_bits, args.weights.group
        if scales is not None and len(scales.shape) == 2 and size:
            columns = scales.shape[1] * size
            if words(columns, bits) == codes[1]:
                return codes[0], columns
        return codes[0], codes[1] * INT32_BITS // bits

    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        """Return why groups, tiles or zero points cannot be split over ranks, or None.

        in_features must be a multiple of the group size. CUTLASS needs complete tiles, and the zero
        points of each part must fill complete words.
        """
        if (
            partition.experts
            and args.input_activations is not None
            and not args.input_activations.is_float
        ):
            return NO_EXPERTS
        grouped = partial_group(partition, args.weights.group)
        return grouped or _partial_tile(args, partition) or _cut_zero_points(args, partition)

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Return the GPUs of Marlin or, for FP8 inputs, of CUTLASS (SM 90 only).

        No GPU kernel quantizes integer inputs.
        """
        stored, group = input_bits(args), args.weights.group
        if args.input_activations is not None and args.input_activations.is_float:
            if group != W4AFP8_GROUP:
                return GpuSupport(input_bits={}, stored_bits=stored, loads_below=0)
            return GpuSupport(input_bits={90: stored}, stored_bits=stored, loads_below=100)
        return GpuSupport(input_bits={75: UNQUANTIZED_BITS}, stored_bits=stored)

    def cpu(self, args: Arguments) -> Cpu:
        """Return "native" for INT4 with 16-bit or integer inputs: the CPU build has kernels."""
        of_floats = args.input_activations is not None and args.input_activations.is_float
        return "emulated" if args.weights.num_bits != 4 or of_floats else "native"

    def cpu_instructions(self, args: Arguments, *, experts: bool) -> str:
        """Return AVX-512, or AMX for routed experts.

        The operator cpu_gemm_wna16 is missing in the AVX2 variant of vLLM's CPU build.
        """
        return AMX if experts else AVX512

    def packing(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: "PackingInputs"
    ) -> "Packing":
        from vexport.formats.packing.integer import PackedIntegerPacking

        return PackedIntegerPacking(member, dtype, args, inputs)

    def dequantize(self, args: Arguments, stored: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
        """Dequantize a weight. compressed-tensors 0.17 cannot unpack codes that cross words."""
        from vexport.formats.dequantize import decompress, scaled, unpack_int32

        bits = args.weights.num_bits
        if INT32_BITS % bits == 0:
            return decompress(self.name, args, stored)
        rows, columns = (int(size) for size in stored["weight_shape"])
        half = 1 << (bits - 1)
        codes = unpack_int32(stored[self.weight], bits, columns) - half
        if args.weights.symmetric:
            return scaled(codes, args, stored)
        zeros = unpack_int32(stored["weight_zero_point"].T, bits, rows).T - half
        return scaled(codes, args, stored, zeros)


class Int8(Format):
    """INT8 weights per channel, INT8 inputs per token."""

    name = "int-quantized"
    largest_input = 127.0
    weight = "weight"

    def matches(self, args: Arguments, stored_as: str) -> bool:
        """Return True for symmetric 8-bit weights with 8-bit inputs.

        8-bit floats match too, because vLLM does not check the type here. Source:
        _is_static_tensor_w8a8 and _is_dynamic_token_w8a8.
        """
        weights, inputs = args.weights, args.input_activations
        if (
            stored_as not in WITH_INPUTS
            or inputs is None
            or weights.dynamic
            or not weights.symmetric
        ):
            return False
        eight = weights.num_bits == inputs.num_bits == 8 and weights.strategy in (
            "tensor",
            "channel",
        )
        return eight and (
            inputs.is_by_token or (inputs.strategy == "tensor" and not inputs.dynamic)
        )

    def unwritable_arguments(self, args: Arguments) -> str | None:
        inputs = args.input_activations
        if args.weights.strategy != "channel":
            return "INT8 weights with a scale per tensor"
        by_token = (
            inputs is not None and inputs.is_by_token and inputs.symmetric and not inputs.is_float
        )
        return None if by_token else "static or asymmetric INT8 inputs, unlike W8A8"

    def vllm_scheme(self, args: Arguments) -> str:
        return "CompressedTensorsW8A8Int8"

    def runs_experts(self, args: Arguments) -> bool:
        inputs = args.input_activations
        return (
            args.weights.strategy == "channel" and inputs is not None and inputs.strategy == "token"
        )

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """Return weight (out, in), weight_scale (out, 1), and input parameters (1,) if static."""
        inputs, found = args.input_activations, dict[str, Parameter]()
        if inputs is not None and not inputs.dynamic:
            found["input_scale"] = single()
            found |= {} if inputs.symmetric else {"input_zero_point": exact("I8", (1,))}
        return {**_bytes(args, shape), **found}

    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        """Return None: scales are per channel, so any shape fits."""
        return None

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Return the GPUs of CUTLASS below SM 100.

        From SM 100 on vLLM also chooses CUTLASS, which then raises at run time
        (scaled_mm_helper.hpp).
        """
        stored = input_bits(args)
        return GpuSupport(input_bits={75: 8}, stored_bits=stored, loads_below=100)

    def cpu(self, args: Arguments) -> Cpu:
        return "native"

    def cpu_instructions(self, args: Arguments, *, experts: bool) -> str:
        """Return AMX for routed experts (CPUExpertsInt8 in vLLM's fused_moe/experts/cpu_moe.py)."""
        return AMX if experts else ""

    def largest_codes(self, args: Arguments, codes: "Bytes") -> "tuple[Codes, int] | None":
        """Return the largest code of each row and the second largest possible code.

        If an observer searches for the smallest error, the largest value of a row may get the
        second largest code.
        """
        if args.weights.strategy != "channel":
            return None
        return abs(codes.view("int8").astype("int16")).max(axis=1), 2 ** (
            args.weights.num_bits - 1
        ) - 2

    def packing(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: "PackingInputs"
    ) -> "Packing":
        from vexport.formats.packing.integer import Int8Packing

        return Int8Packing(member, dtype, args, inputs)


class Int4(Int8):
    """INT4 weights in bytes, INT8 inputs per token: only for Arm CPUs (dynamic_4bit.py).

    llm-compressor stores W4A8 like this if its format is int-quantized. vexport stores such weights
    packed.
    """

    def matches(self, args: Arguments, stored_as: str) -> bool:
        """Return True for symmetric INT4 weights and INT8 inputs (_is_dynamic_token_w4a8_int)."""
        weights, inputs = args.weights, args.input_activations
        if (
            stored_as not in WITH_INPUTS
            or inputs is None
            or weights.dynamic
            or not weights.symmetric
        ):
            return False
        integers = not weights.is_float and not inputs.is_float
        bits = (weights.num_bits, inputs.num_bits) == (4, 8)
        return integers and bits and inputs.is_by_token and weights.strategy in CHANNEL_OR_GROUP

    def vllm_scheme(self, args: Arguments) -> str:
        return "CompressedTensorsW4A8Int"

    def runs_experts(self, args: Arguments) -> bool:
        return False

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """Return weight (out, in) and weight_scale (out, groups)."""
        return _bytes(args, shape)

    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        if partition.experts:
            return NO_EXPERTS
        return partial_group(partition, args.weights.group)

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Return support without any GPU.

        A dry load succeeds, because vLLM selects Humming's kernel. After vLLM has loaded the bytes,
        HummingLinearKernel reads them as words of 8 codes. The shape is then twice the expected
        shape, and humming's validate_tensors raises an error (humming-kernels of vLLM 0.32.0 and
        0.33.0).
        """
        reason = "codes in bytes, which vLLM's kernel (Humming) reads as packed words and refuses"
        stored = input_bits(args)
        return GpuSupport(input_bits={}, stored_bits=stored, loads_below=0, after_loading=reason)


def _bytes(args: Arguments, shape: tuple[int, int]) -> dict[str, Parameter]:
    return {
        "weight": exact("I8", shape, along=(0, 1)),
        "weight_scale": scale(args.weights, shape),
        **zero_point(args.weights, shape),
    }


def _is_w4afp8(args: Arguments) -> bool:
    """Return True for INT4 weights in groups and FP8 inputs per token, under any format name.

    Source: _is_fp8_w4a8.
    """
    weights, inputs = args.weights, args.input_activations
    four = (weights.type, weights.num_bits, weights.strategy, weights.symmetric) == (
        "int",
        4,
        "group",
        True,
    )
    if not four or inputs is None:
        return False
    eight = (inputs.type, inputs.num_bits, inputs.strategy) == ("float", 8, "token")
    return eight and inputs.dynamic is True and inputs.symmetric


def _partial_tile(args: Arguments, partition: Partition) -> str | None:
    """Return why CUTLASS cannot divide a rank's part into complete tiles, or None.

    Only layers with FP8 inputs need complete tiles.
    """
    inputs = args.input_activations
    if inputs is None or not inputs.is_float:
        return None
    rows = partition.out_features if partition.experts else (sum(partition.out_features),)
    tile = W4AFP8_EXPERT_TILE if partition.experts else W4AFP8_TILE
    cut = [
        f"{side} {size} is not a multiple of {tile}"
        for side, sizes in (("out_features", rows), ("in_features", (partition.in_features,)))
        for size in sizes
        if size % tile
    ]
    return cut[0] if cut else None


def _cut_zero_points(args: Arguments, partition: Partition) -> str | None:
    """Return why the packed zero points of a part would not begin at a whole word, or None.

    Source: _adjust_shard_indexes_for_packing in vLLM.
    """
    loaded_whole = (
        len(partition.out_features) == 1 and partition.split != "out" and not partition.head
    )
    if args.weights.symmetric or loaded_whole:
        return None
    bits = args.weights.num_bits
    cut = [size for size in partition.out_features if size * bits % INT32_BITS]
    return (
        f"out_features {cut[0]}: zero points of {bits} bits do not fill whole words"
        if cut
        else None
    )
