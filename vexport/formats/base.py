"""The protocol of a storage format, the parameters that several have, as vLLM makes them, and the
GPUs.
"""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

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

# The dimension that tensor parallelism splits: out_features (column-parallel), in_features
# (row-parallel) or none.
Split = Literal["out", "in", "none"]
# Output heads: their class in vLLM, ParallelLMHead, is no linear layer's and loads weights by
# itself.
HEADS = ("lm_head", "embed_out")
EXPERT = re.compile(r"\.experts\.\d+\.")
# How vLLM's CPU build runs a scheme: by its own kernel, or by `vexport.engine.cpu_emulation`.
Cpu = Literal["native", "emulated"]
FLOAT_SCALES = frozenset({"F32", "BF16", "F16"})
# Global scales are float32 by definition: another dtype has rounded them.
GLOBAL_SCALES = frozenset({"F32"})
# vLLM's formats with which it looks at schemes for quantized inputs
# (is_activation_quantization_format).
WITH_INPUTS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One rank's part of the layers that vLLM runs as one: `out_features` has a size a layer.

    `experts` marks the layers of routed experts, which vLLM keeps in one tensor, `head` an output
    head.
    """

    out_features: tuple[int, ...]
    in_features: int
    split: Split = "none"
    experts: bool = False
    head: bool = False


def partition_of(members: Sequence[LinearPlan], ranks: int, split: Split) -> Partition:
    """One rank's part of layers whose cut sizes are multiples of the ranks."""
    rows, columns = (ranks, 1) if split == "out" else (1, ranks)
    return Partition(
        out_features=tuple(member.out_features // rows for member in members),
        in_features=members[0].in_features // columns,
        split=split,
        experts=EXPERT.search(members[0].name) is not None,
        head=is_head(members[0].name),
    )


def uneven(members: Sequence[LinearPlan], ranks: int, split: Split) -> str | None:
    """The reason why so many ranks cannot share layers (`divide`, vllm/distributed/utils.py), or
    None.
    """
    for member in members if split != "none" else ():
        size = member.out_features if split == "out" else member.in_features
        if size % ranks:
            return f"{split}_features {size} is not a multiple of {ranks} ranks"
    return None


def is_head(name: str) -> bool:
    """Return whether a layer is an output head by its name."""
    return name.rpartition(".")[2] in HEADS


def partial_group(partition: Partition, group: int | None) -> str | None:
    """Rule of vLLM: each rank's in_features must be a whole number of groups.

    Sources: verify_group_size_divides_partition (vllm/distributed/utils.py) raises for WNA16;
    compressed_tensors_w4a4_nvfp4.py and _mxfp4.py divide with floor and load wrong weights
    silently.
    """
    if group is None or partition.in_features % group == 0:
        return None
    return f"in_features {partition.in_features} is not a multiple of group size {group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One tensor of a quantized layer: what the writer stores, and what vLLM's parameter takes.

    `dtypes` are those that vLLM copies without a change of value, `dtype` that of its parameter,
    which is written; `in_model_dtype` where that is the model's, for which BF16 stands. `along` are
    the dimensions that fusing and tensor parallelism cut: 0 the layer's outputs, 1 its inputs. vLLM
    narrows what it loads along the dimension that it cuts, and compares all others.
    """

    dtypes: frozenset[str]
    shape: tuple[int, ...]
    dtype: str = "F32"
    along: tuple[int, ...] = ()
    in_model_dtype: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSupport:
    """The GPUs that run a scheme, by compute capability (90 is 9.0).

    `input_bits` are the bits of the inputs that are multiplied, by the capability from which on,
    least first: vLLM chooses another kernel without saying so. `stored_bits` are those of the
    checkpoint. `below` is the first capability that no longer runs it; 0 where no GPU does.
    `after_loading` says why, if vLLM takes the checkpoint and raises after it has loaded it.
    """

    input_bits: Mapping[int, int]
    stored_bits: int
    below: int | None = None
    after_loading: str = ""

    @property
    def loads_from(self) -> int:
        """The least capability on which vLLM loads it."""
        return min(self.input_bits, default=0)

    @property
    def full_from(self) -> int | None:
        """The least capability on which inputs have the bits that are stored; None where they never
        have.
        """
        return min(
            (sm for sm, bits in self.input_bits.items() if bits == self.stored_bits), default=None
        )

    @property
    def full_below(self) -> int | None:
        """The first capability after that on which inputs have other bits, or which does not run
        it.
        """
        ends = (sm for sm in self.input_bits if self.full_from is not None and sm > self.full_from)
        return min(
            (sm for sm in ends if self.input_bits[sm] != self.stored_bits), default=self.below
        )

    def refuses(self, sm: int) -> bool:
        """Return whether vLLM raises on such a GPU."""
        return sm < self.loads_from or (self.below is not None and sm >= self.below)

    def bits(self, sm: int) -> int:
        """The bits of the inputs that are multiplied on a GPU that runs the scheme."""
        return self.input_bits[max(start for start in self.input_bits if start <= sm)]


class Format(Protocol):
    """All that is known about one way of storing weights: adding one is a file and a line in
    `FORMATS`.

    Every question is about arguments, as schemes with other group sizes, widths or inputs are
    stored alike. Shapes of layers are (out_features, in_features). What most formats answer alike
    is answered here.
    """

    # compressed-tensors' name of the storage, and the tensor that holds the weight's codes.
    name: str
    weight: str
    codes_per_byte: int = 1
    # Whether stored tensors have a layer's inputs first; tensors that vLLM loads or drops, and
    # never uses.
    transposed: bool = False
    unread: frozenset[str] = frozenset()
    # Whether scales are exponents of two in bytes (e8m0), and not numbers.
    exponent_scales: bool = False
    # The largest input that a static input scale of one stands for.
    largest_input: float = E4M3_MAX

    @abstractmethod
    def matches(self, args: Arguments, stored_as: str) -> bool:
        """Return whether vLLM picks this format for a config group whose format is called
        `stored_as`.
        """

    def refusal(self, args: Arguments) -> str | None:
        """The reason why vLLM refuses a group that it picks this format for, or None."""
        return None

    def unquantized_inputs(self, args: Arguments) -> str | None:
        """Inputs that the config quantizes and vLLM leaves in 16 bits on every device, in words, or
        None.
        """
        return None

    def unwritten(self, args: Arguments) -> str | None:
        """The arguments that vLLM runs and vexport does not write, in words, or None."""
        return None

    def group_sizes(self, args: Arguments) -> Sequence[int | None]:
        """The group sizes that vLLM's own kernels run, None a scale a row; none where there is no
        choice.
        """
        return ()

    @abstractmethod
    def vllm_scheme(self, args: Arguments) -> str:
        """vLLM's class of a linear layer, in compressed_tensors/schemes."""

    def runs_experts(self, args: Arguments) -> bool:
        """Return whether vLLM runs routed experts too (`get_moe_method` in its
        compressed_tensors_moe.py).
        """
        return True

    @abstractmethod
    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """The tensors of a layer by their names within it, in the order in which they are
        written.
        """

    def shape(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
        """The shape of a layer by its stored tensors; None where that cannot be told."""
        codes = stored.get(self.weight)
        if codes is None or len(codes.shape) != 2:
            return None
        return codes.shape[0], codes.shape[1] * self.codes_per_byte

    @abstractmethod
    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        """The reason why vLLM could not run a rank's part of layers, or None where it can."""

    @abstractmethod
    def gpu_support(self, args: Arguments) -> GpuSupport:
        """The GPUs that run it, and with how many bits of inputs."""

    def cpu(self, args: Arguments) -> Cpu:
        """The kernels by which vLLM's CPU build runs it."""
        return "emulated"

    def static_inputs(self, args: Arguments, largest: "np.float32") -> "Mapping[str, Array]":
        """Static scales for inputs up to `largest`, by the tensor's name within a layer."""
        return {}

    def largest_codes(self, args: Arguments, codes: "Bytes") -> "tuple[Codes, int] | None":
        """The largest code for every scale of some rows, and the code that the largest weight of
        each has.

        `codes` are the rows' bytes. None where codes need not reach an end.
        """
        return None

    @abstractmethod
    def packing(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: "PackingInputs"
    ) -> "Packing":
        """The packing of a weight that is stored in `dtype` (safetensors' name), a few rows at a
        time.
        """

    def dequantize(self, args: Arguments, stored: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
        """The weight (out, in) of a layer's stored tensors, by compressed-tensors' compressor."""
        from vexport.formats.dequantize import decompress

        return decompress(self.name, args, stored)


def exact(dtype: str, shape: tuple[int, ...], *also: str, along: tuple[int, ...] = ()) -> Parameter:
    """A parameter that is stored in one dtype; vLLM copies others in `also` without a change of
    value.
    """
    return Parameter(dtypes=frozenset({dtype, *also}), shape=shape, dtype=dtype, along=along)


def single(dtypes: frozenset[str] = FLOAT_SCALES) -> Parameter:
    """A number, float32, for all of a layer."""
    return Parameter(dtypes=dtypes, shape=(1,))


def scale_shape(args: QuantArgs, shape: tuple[int, int]) -> tuple[int, ...]:
    """(1,) per tensor, (out, 1) per channel, (out, in/group) or (ceil(out/rows),
    ceil(in/columns)).
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
    """Scales of the weight: floats, float32 but where they have the model's dtype."""
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
    """Scales of groups that are codes of their own in `dtype`; plain ones where arguments name no
    groups.
    """
    if args.strategy in ("tensor", "channel") or args.block or args.group is None:
        return scale(args, shape)
    return exact(dtype, scale_shape(args, shape), along=(0, 1))


def zero_point(args: QuantArgs, shape: tuple[int, int]) -> dict[str, Parameter]:
    """Zero points of asymmetric weights: (ceil(out*bits/32), groups), packed along out_features."""
    if args.symmetric:
        return {}
    size = (words(shape[0], args.num_bits), scale_shape(args, shape)[-1])
    return {"weight_zero_point": exact("I32", size, along=(0, 1))}


def words(count: int, bits: int) -> int:
    """int32 words that `count` values of `bits` bits take."""
    return -(-count * bits // INT32_BITS)
