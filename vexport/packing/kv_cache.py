"""The scales of the fp8 KV cache from what calibration saw of keys and values."""

from collections.abc import Mapping

import numpy as np

from vexport.errors import InputError
from vexport.numerics.arithmetic import Floats
from vexport.numerics.scales import fp8_scale_of
from vexport.types import AttentionLayer, HeadRanges, KeyValueRanges


def kv_scales(layer: AttentionLayer, ranges: Mapping[str, KeyValueRanges]) -> tuple[Floats, Floats]:
    """Largest magnitude / 448 of keys and of values, in the shapes of `kv_layout`, float32.

    Raises InputError where calibration did not see the layer's keys and values, or other heads.
    """
    seen = ranges.get(layer.name)
    found = 0 if seen is None else len(seen.key.low)
    if seen is None or layer.heads not in (None, found):
        raise InputError(
            layer.name,
            got=f"keys and values of {found} heads in calibration",
            need="those of all" if layer.heads is None else str(layer.heads),
            fix="leave the KV cache in the model's dtype, or use fp8 for all heads",
        )
    return _scales(seen.key, layer), _scales(seen.value, layer)


def _scales(heads: HeadRanges, layer: AttentionLayer) -> Floats:
    largest = [np.float32(max(-low, high)) for low, high in zip(heads.low, heads.high, strict=True)]
    if layer.heads is None:
        return fp8_scale_of(max(largest))
    return np.stack([fp8_scale_of(one) for one in largest]).reshape(-1, 1, 1)
