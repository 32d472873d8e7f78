"""The part of one rank of layers that vLLM runs as one, and where tensor parallelism can cut."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vexport.records import LinearPlan

# What tensor parallelism cuts: out_features (column-parallel in vLLM), in_features (row-parallel), nothing.
Split = Literal["out", "in", "none"]
# Output heads: their class in vLLM, ParallelLMHead, is no linear layer's and loads weights by itself.
HEADS = ("lm_head", "embed_out")
EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One rank's part of the layers that vLLM runs as one: `out_features` has a size a layer.

    `experts` marks the layers of routed experts, which vLLM keeps in one tensor, `head` an output head.
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
    """The reason why so many ranks cannot share layers (`divide`, vllm/distributed/utils.py), or None."""
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
    compressed_tensors_w4a4_nvfp4.py and _mxfp4.py divide with floor and load wrong weights silently.
    """
    if group is None or partition.in_features % group == 0:
        return None
    return f"in_features {partition.in_features} is not a multiple of group size {group}"
