"""Static scales of inputs against the norm that the inputs come from.

RMSNorm divides by the root mean square of `hidden_size` values: none of its outputs is larger than
sqrt(hidden_size) times the norm's largest weight, whatever the prompt.
"""

import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from vexport.checks.decoder import DECODERS
from vexport.checks.subject import ConfigGroup, Subject, error
from vexport.types import Finding, TensorInfo

# Ranges that are rounded up, or given some room.
MARGIN = 1.5
AFTER_NORM = re.compile(
    r"(?P<layer>model\.layers\.\d+\.)"
    r"(?:(?P<attention>self_attn\.[qkv]_proj)|(?:mlp|block_sparse_moe)\.(?:experts\.\d+\.)?(?:gate_proj|up_proj|w1|w3))$"
)
E4M3_LARGEST, E2M1_LARGEST, INT8_LARGEST = 448.0, 6.0, 127.0


def impossible(
    subject: Subject, check: str, group: ConfigGroup, members: Mapping[str, Mapping[str, TensorInfo]]
) -> Iterator[Finding]:
    """Findings on scales for inputs that are larger than the layer's norm lets through."""
    for module, leaves in members.items():
        range_ = _range(subject, group, leaves)
        most = _most(subject, module) if range_ is not None else None
        if range_ is not None and most is not None and range_ > most * MARGIN:
            leaf = next(name for name in ("input_scale", "input_global_scale") if name in leaves)
            yield error(
                check,
                leaves[leaf].name,
                expected=f"a scale for inputs up to {most:.3g}, all that the norm before lets through",
                got=f"one for inputs up to {range_:.3g}",
                fix="calibrate again: the number is no scale of this layer, or upside down",
            )


def _range(subject: Subject, group: ConfigGroup, leaves: Mapping[str, TensorInfo]) -> float | None:
    """The largest input that a static scale represents."""
    largest = E4M3_LARGEST if group.weights.type == "float" else INT8_LARGEST
    scale, divisor = leaves.get("input_scale"), leaves.get("input_global_scale")
    if scale is not None and scale.num_bytes:
        return largest * float(np.asarray(subject.reader.array(scale), np.float64).max())
    if divisor is not None and divisor.num_bytes:
        return (
            E4M3_LARGEST * E2M1_LARGEST / float(np.asarray(subject.reader.array(divisor), np.float64).min())
        )
    return None


def _most(subject: Subject, module: str) -> float | None:
    """The largest output of the norm before a layer; None where it is not known."""
    place = AFTER_NORM.match(module)
    if place is None or subject.layout is None:
        return None
    norm = "input_layernorm" if place["attention"] else "post_attention_layernorm"
    tensor = subject.index.tensors.get(f"{place['layer']}{norm}.weight")
    if tensor is None or not tensor.num_bytes:
        return None
    offset = 1.0 if DECODERS[subject.class_name].norms_above_one else 0.0
    weight = np.abs(np.asarray(subject.reader.array(tensor), np.float64) + offset).max()
    return math.sqrt(tensor.shape[0]) * float(weight)
