"""How many bytes each kind of layer has before and after: what was quantized, and what the rest weighs."""

from collections import Counter
from collections.abc import Mapping

from vexport.checkpoint.index import SourceIndex
from vexport.types import KindSize, TensorInfo

# A kind below this share of both checkpoints is counted among the others.
_LEAST_SHARE = 0.005
OTHERS = "others"


def size_by_kind(source: SourceIndex, written: SourceIndex) -> tuple[KindSize, ...]:
    """The largest of the source first; all kinds together have all bytes of both."""
    before, after = _bytes_by_kind(source.tensors), _bytes_by_kind(written.tensors)
    sizes: dict[str, tuple[int, int]] = {}
    for kind in before | after:
        pair = (before[kind], after[kind])
        shown = _is_large(pair[0], source.num_bytes) or _is_large(pair[1], written.num_bytes)
        name = kind if shown else OTHERS
        old = sizes.get(name, (0, 0))
        sizes[name] = (old[0] + pair[0], old[1] + pair[1])
    ordered = sorted(sizes.items(), key=lambda item: (item[0] == OTHERS, -item[1][0], item[0]))
    return tuple(KindSize(kind=kind, source_bytes=old, output_bytes=new) for kind, (old, new) in ordered)


def tensor_kind(name: str) -> str:
    """The part of a block that a tensor belongs to (`self_attn`, `mlp`), `norm`, or what stands alone.

    `model.layers.3.mlp.down_proj.weight_scale` is `mlp`, `model.embed_tokens.weight` is `embed_tokens`.
    """
    *modules, last = name.split(".")
    numbers = [index for index, part in enumerate(modules) if part.isdecimal()]
    inner = modules[numbers[0] + 1 :] if numbers else modules[-1:]
    kind = inner[0] if inner else last
    return "norm" if "norm" in kind else kind


def _bytes_by_kind(tensors: Mapping[str, TensorInfo]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        sizes[tensor_kind(name)] += tensor.num_bytes
    return sizes


def _is_large(part: int, whole: int) -> bool:
    return part >= _LEAST_SHARE * max(1, whole)
