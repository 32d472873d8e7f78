"""What a scheme is: quantization arguments in compressed-tensors' terms and a layout of tensors."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from vexport.types import LinearPlan, TensorSpec

Strategy = Literal["tensor", "channel", "group", "tensor_group", "block", "token", "attn_head"]
# What tensor parallelism cuts: out_features (column-parallel in vLLM), in_features (row-parallel), nothing.
Split = Literal["out", "in", "none"]
# Output heads: their class in vLLM, ParallelLMHead, is no linear layer's and loads weights by itself.
HEADS = ("lm_head", "embed_out")
EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantArgs:
    """How one tensor is quantized; names and meaning are compressed-tensors' `QuantizationArgs`.

    `dynamic` is "local" where only the global scale is static (NVFP4 inputs).
    """

    num_bits: int
    type: Literal["int", "float"]
    symmetric: bool = True
    strategy: Strategy
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: bool | Literal["local"] = False
    actorder: str | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeArgs:
    """Quantization of a layer's weight and, where there is one, of its input."""

    weights: QuantArgs
    input_activations: QuantArgs | None

    @property
    def calibrated(self) -> bool:
        """Whether static statistics of the inputs are needed."""
        return self.input_activations is not None and self.input_activations.dynamic is not True


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetFile:
    """The generated presets and the version of compressed-tensors that they come from."""

    compressed_tensors: str
    presets: Mapping[str, SchemeArgs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank holds of the layers that vLLM runs as one: `out_features` has a size a layer.

    `experts` marks the layers of routed experts, which vLLM keeps in one tensor, `head` an output head.
    """

    out_features: tuple[int, ...]
    in_features: int
    split: Split = "none"
    experts: bool = False
    head: bool = False


class Family(Protocol):
    """Schemes that are stored alike.

    `format` is compressed-tensors' name of the storage; `least_sm` and `sm_note` say which GPUs run it in
    vLLM, `cpu` how vLLM's CPU build runs it.
    """

    @property
    def format(self) -> str: ...
    @property
    def least_sm(self) -> int: ...
    @property
    def sm_note(self) -> str: ...
    @property
    def cpu(self) -> str: ...

    def layout(self, args: SchemeArgs, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """The tensors that replace the layer's weight, in the order in which they are written."""
        ...

    def misfit(self, args: SchemeArgs, share: Share) -> str | None:
        """Why vLLM could not run a rank's share in this scheme, or None where it can."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A named scheme: arguments and family."""

    name: str
    args: SchemeArgs
    family: Family

    def layout(self, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """The tensors that replace the layer's weight."""
        return self.family.layout(self.args, linear, source_dtype)

    def misfit(self, linear: LinearPlan) -> str | None:
        """Why vLLM could not run this layer by itself in this scheme, or None where it can."""
        return self.group_misfit((linear,))

    def group_misfit(
        self, members: Sequence[LinearPlan], *, ranks: int = 1, split: Split = "none"
    ) -> str | None:
        """Why vLLM could not run these layers as one on so many ranks, or None where it can.

        `split` is what tensor parallelism cuts of them. Key and value layers whose heads are fewer than the
        ranks are repeated by vLLM: pass them with as many out_features as all ranks hold together.
        """
        if ranks == 1 or split == "none":
            return self.family.misfit(self.args, _share(members, 1, "none"))
        refused = uneven(members, ranks, split)
        if refused:
            return refused
        misfit = self.family.misfit(self.args, _share(members, ranks, split))
        return misfit and f"{misfit} on each of {ranks} ranks"


def uneven(members: Sequence[LinearPlan], ranks: int, split: Split) -> str | None:
    """Why layers cannot be cut for so many ranks (`divide`, vllm/distributed/utils.py), or None."""
    for member in members if split != "none" else ():
        size = member.out_features if split == "out" else member.in_features
        if size % ranks:
            return f"{split}_features {size} is not a multiple of {ranks} ranks"
    return None


def _share(members: Sequence[LinearPlan], ranks: int, split: Split) -> Share:
    rows, columns = (ranks, 1) if split == "out" else (1, ranks)
    return Share(
        out_features=tuple(member.out_features // rows for member in members),
        in_features=members[0].in_features // columns,
        split=split,
        experts=EXPERT.search(members[0].name) is not None,
        head=is_head(members[0].name),
    )


def is_head(name: str) -> bool:
    """Whether a layer is an output head by its name."""
    return name.rpartition(".")[2] in HEADS


def whole_groups(share: Share, group: int) -> str | None:
    """Rule of vLLM: each rank's in_features must be a whole number of groups.

    Sources: verify_group_size_divides_partition (vllm/distributed/utils.py) raises for WNA16;
    compressed_tensors_w4a4_nvfp4.py and _mxfp4.py divide with floor and load wrong weights without a word.
    """
    if share.in_features % group == 0:
        return None
    return f"in_features {share.in_features} is not a multiple of {group}"
