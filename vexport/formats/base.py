"""Protocol of storage formats, GPU support, and helpers for the parameters that vLLM creates."""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from vexport.architectures.fusion import is_head
from vexport.architectures.ranks import Split
from vexport.formats.arguments import Arguments, QuantArgs
from vexport.numerics import E4M3_MAX, INT32_BITS
from vexport.records import LinearPlan, TensorInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from vexport.formats.packing.base import Array, Packing, PackingInputs

    Bytes = npt.NDArray[np.uint8]
    Codes = npt.NDArray[np.integer[Any]]

EXPERT = re.compile(r"\.experts\.\d+\.")
# How vLLM's CPU build runs a scheme: with a native kernel, or with `vexport.engine.cpu_emulation`.
Cpu = Literal["native", "emulated"]
# Flags of /proc/cpuinfo for the instructions of vLLM's CPU kernels.
AMX, AVX512 = "amx_tile", "avx512f"
FLOAT_SCALES = frozenset({"F32", "BF16", "F16"})
# Global scales must be float32, because any other dtype means that they were rounded.
GLOBAL_SCALES = frozenset({"F32"})
# vLLM only reads the input quantization of groups in these formats
# (is_activation_quantization_format).
WITH_INPUTS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A rank's part of the layers that vLLM fuses.

    `out_features` has the size of each layer. `experts` is True for layers of routed experts, which
    vLLM keeps in a single tensor, and `head` is True for an output head.
    """

    out_features: tuple[int, ...]
    in_features: int
    split: Split = "none"
    experts: bool = False
    head: bool = False


def partition_of(members: Sequence[LinearPlan], ranks: int, split: Split) -> Partition:
    """Return a rank's part of the layers. The split sizes must be multiples of `ranks`."""
    rows, columns = (ranks, 1) if split == "out" else (1, ranks)
    return Partition(
        out_features=tuple(member.out_features // rows for member in members),
        in_features=members[0].in_features // columns,
        split=split,
        experts=EXPERT.search(members[0].name) is not None,
        head=is_head(members[0].name),
    )


def partial_group(partition: Partition, group: int | None) -> str | None:
    """Return why vLLM cannot split a layer's groups over ranks, or None.

    Each rank's in_features must be a multiple of the group size. For WNA16,
    verify_group_size_divides_partition (vllm/distributed/utils.py) raises an error.
    compressed_tensors_w4a4_nvfp4.py and _mxfp4.py round the division down and silently load wrong
    weights.
    """
    if group is None or partition.in_features % group == 0:
        return None
    return f"in_features {partition.in_features} is not a multiple of group size {group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Tensor of a quantized layer, as vexport writes it and as vLLM's parameter accepts it.

    `dtypes` are the dtypes that vLLM copies without changing values. `dtype` is the dtype of vLLM's
    parameter, in which the tensor is written. With `in_model_dtype` it is written in the model's
    dtype, and `dtype` is BF16 as a placeholder.

    `along` lists the dimensions that fusing and tensor parallelism split: 0 for the layer's
    outputs, 1 for its inputs. vLLM narrows a loaded tensor along the split dimension and compares
    the sizes of all other dimensions.
    """

    dtypes: frozenset[str]
    shape: tuple[int, ...]
    dtype: str = "F32"
    along: tuple[int, ...] = ()
    in_model_dtype: bool = False

    def accepts(self, tensor: TensorInfo) -> bool:
        """Return True if a tensor has the dtype and shape. One value may have no dimension."""
        is_scalar = self.shape == (1,) and tensor.shape == ()
        return tensor.dtype in self.dtypes and (is_scalar or tensor.shape == self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSupport:
    """GPUs that run a scheme, by compute capability (90 is 9.0).

    `input_bits` maps the first capability of each kernel, in ascending order, to the bits of the
    kernel's inputs. vLLM chooses the kernel without a message. `stored_bits` are the input bits of
    the checkpoint. `loads_below` is the first capability that no longer runs the scheme, or 0 if no
    GPU runs it. If vLLM loads the checkpoint on unsupported GPUs and fails later, `after_loading`
    describes why.
    """

    input_bits: Mapping[int, int]
    stored_bits: int
    loads_below: int | None = None
    after_loading: str = ""

    @property
    def loads_from(self) -> int:
        """Lowest capability on which vLLM loads the scheme, or 0 if there is none."""
        return min(self.input_bits, default=0)

    @property
    def full_from(self) -> int | None:
        """Lowest capability on which inputs keep their stored bits, or None if there is none."""
        return min(
            (sm for sm, bits in self.input_bits.items() if bits == self.stored_bits), default=None
        )

    @property
    def full_below(self) -> int | None:
        """First capability above `full_from` with other input bits, or without support."""
        ends = (sm for sm in self.input_bits if self.full_from is not None and sm > self.full_from)
        return min(
            (sm for sm in ends if self.input_bits[sm] != self.stored_bits), default=self.loads_below
        )

    def refuses(self, sm: int) -> bool:
        """Return True if vLLM raises on a GPU of this capability."""
        return sm < self.loads_from or self.lacks_kernel(sm)

    def lacks_kernel(self, sm: int) -> bool:
        """Return True if vLLM has no kernel for a GPU of this capability, or for any newer GPU."""
        return self.loads_below is not None and sm >= self.loads_below

    def bits(self, sm: int) -> int:
        """Return the number of bits of the kernel's inputs on a GPU that runs the scheme."""
        starts = [start for start in self.input_bits if start <= sm]
        return self.input_bits[max(starts, default=self.loads_from)]


class Format(Protocol):
    """Properties of a storage format. To add a format, add a file and a line in `FORMATS`.

    Methods receive quantization arguments, because schemes with other group sizes, widths or inputs
    use the same storage. Shapes of layers are (out_features, in_features). Defaults are the values
    that apply to most formats.
    """

    # compressed-tensors' name of the storage.
    name: str
    # Name of the tensor with the weight's codes.
    weight: str
    codes_per_byte: int = 1
    # True if the first dimension of stored tensors is in_features.
    transposed: bool = False
    # Tensors that vLLM loads or drops, but never uses.
    unread: frozenset[str] = frozenset()
    # True if scales are exponents of two in bytes (e8m0) instead of numbers.
    exponent_scales: bool = False
    # Largest input that a static input scale of 1 represents.
    largest_input: float = E4M3_MAX

    @abstractmethod
    def matches(self, args: Arguments, stored_as: str) -> bool:
        """Return True if vLLM selects this format for a config group.

        `stored_as` is the format name in the group.
        """

    def refusal(self, args: Arguments) -> str | None:
        """Return why vLLM refuses a group although it selects this format, or None."""
        return None

    def unquantized_inputs(self, args: Arguments) -> str | None:
        """Describe quantized inputs that vLLM keeps in 16 bits on every device, or return None."""
        return None

    def unwritable_arguments(self, args: Arguments) -> str | None:
        """Describe arguments that vLLM supports but vexport does not write, or return None."""
        return None

    def group_sizes(self, args: Arguments) -> Sequence[int | None]:
        """Return the group sizes that vLLM's kernels run.

        A size of None stands for a scale per row. The result is empty if the format has a fixed
        group size or no groups.
        """
        return ()

    @abstractmethod
    def vllm_scheme(self, args: Arguments) -> str:
        """Return the name of vLLM's class for a linear layer, from compressed_tensors/schemes."""

    def runs_experts(self, args: Arguments) -> bool:
        """Return True if vLLM also runs routed experts in this format.

        Source: `get_moe_method` in vLLM's compressed_tensors_moe.py.
        """
        return True

    @abstractmethod
    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """Return the tensors of a layer, by their names within it, in the order of the file."""

    def shape(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
        """Return the shape of a layer, derived from its stored tensors, or None if unknown."""
        codes = stored.get(self.weight)
        if codes is None or len(codes.shape) != 2:
            return None
        return codes.shape[0], codes.shape[1] * self.codes_per_byte

    @abstractmethod
    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        """Return why vLLM could not run a rank's part of the layers, or None."""

    @abstractmethod
    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Return the GPUs that run the format, and the input bits of their kernels."""

    def cpu(self, args: Arguments) -> Cpu:
        """Return whether vLLM's CPU build runs the format natively or emulated."""
        return "emulated"

    def cpu_instructions(self, args: Arguments, *, experts: bool) -> str:
        """Return the CPU's instructions that a native kernel needs, as a flag of /proc/cpuinfo.

        On a CPU without these instructions, the format is emulated too. Returns "" if the kernel
        runs on every CPU. `experts` is True for routed experts.
        """
        return ""

    def static_inputs(self, args: Arguments, largest: "np.float32") -> "Mapping[str, Array]":
        """Return static scales for inputs up to `largest`, by the tensor's name within a layer."""
        return {}

    def largest_codes(self, args: Arguments, codes: "Bytes") -> "tuple[Codes, int] | None":
        """Return the largest code of each row or group with a scale, and the least expected code.

        `codes` are the stored bytes of some rows. If a scale is correct, the largest code of its
        row or group is at least the second result. Returns None for formats in which correct scales
        do not guarantee this.
        """
        return None

    @abstractmethod
    def packing(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: "PackingInputs"
    ) -> "Packing":
        """Return the packing of a weight. A packing converts a few rows at a time.

        `dtype` is the dtype of the weight in the source (safetensors' name).
        """

    def dequantize(self, args: Arguments, stored: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
        """Return the weight (out, in) that compressed-tensors computes from a layer's tensors."""
        from vexport.formats.dequantize import decompress

        return decompress(self.name, args, stored)


def exact(dtype: str, shape: tuple[int, ...], *also: str, along: tuple[int, ...] = ()) -> Parameter:
    """Return a parameter stored in `dtype`.

    vLLM also accepts tensors of the dtypes in `also` without changing their values.
    """
    return Parameter(dtypes=frozenset({dtype, *also}), shape=shape, dtype=dtype, along=along)


def single(dtypes: frozenset[str] = FLOAT_SCALES) -> Parameter:
    """Return a parameter with a single number for the whole layer, written as float32."""
    return Parameter(dtypes=dtypes, shape=(1,))


def scale_shape(args: QuantArgs, shape: tuple[int, int]) -> tuple[int, ...]:
    """Return (1,) per tensor, (out, 1) per channel, (out, in/group) per group.

    With blocks of (rows, columns), return (ceil(out/rows), ceil(in/columns)).
    """
    rows, columns = shape
    if args.strategy == "tensor":
        return (1,)
    if args.block:
        block_rows, block_columns = args.block
        return (-(-rows // block_rows), -(-columns // block_columns))
    if args.strategy == "channel" or args.group is None:
        return (rows, 1)
    return (rows, columns // args.group)


def scale(args: QuantArgs, shape: tuple[int, int], *, in_model_dtype: bool = False) -> Parameter:
    """Return the scales of a weight, in float32 or (`in_model_dtype`) in the model's dtype."""
    size = scale_shape(args, shape)
    if args.strategy == "tensor":
        return single()
    by_row = (
        not args.block and size[1:] == (1,) and (args.strategy == "channel" or args.group is None)
    )
    dtype = "BF16" if in_model_dtype else "F32"
    return Parameter(
        dtypes=FLOAT_SCALES,
        shape=size,
        dtype=dtype,
        along=(0,) if by_row else (0, 1),
        in_model_dtype=in_model_dtype,
    )


def coded_scale(dtype: str, args: QuantArgs, shape: tuple[int, int]) -> Parameter:
    """Return scales of groups that are stored as codes in `dtype`.

    If the arguments have no groups, return scales that are plain floats.
    """
    if args.strategy in ("tensor", "channel") or args.block or args.group is None:
        return scale(args, shape)
    return exact(dtype, scale_shape(args, shape), along=(0, 1))


def zero_point(args: QuantArgs, shape: tuple[int, int]) -> dict[str, Parameter]:
    """Return the zero points of asymmetric weights: (ceil(out*bits/32), groups).

    They are packed along out_features.
    """
    if args.symmetric:
        return {}
    size = (words(shape[0], args.num_bits), scale_shape(args, shape)[-1])
    return {"weight_zero_point": exact("I32", size, along=(0, 1))}


def words(count: int, bits: int) -> int:
    """Return the number of int32 words for `count` values of `bits` bits."""
    return -(-count * bits // INT32_BITS)
