"""Every family of repairs, and what their changes cost: what needs torch."""

from collections.abc import Sequence

from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import dequantized
from vexport.fidelity.source import Source
from vexport.numerics.metrics import quantization_error
from vexport.repair import Family, arguments, config, global_scales, kv_cache, targets
from vexport.repair.changes import WeightChange

# In this order: each family sees the checkpoint as those before it left it.
FAMILIES: Sequence[Family] = (
    config.run,
    arguments.run,
    targets.run,
    global_scales.reciprocals,
    global_scales.unequal,
    kv_cache.run,
)


def weight_change(
    before: CheckpointView, after: CheckpointView, layer: str, source: Source | None
) -> WeightChange | None:
    """How far the weight of a layer moved; None where it cannot be dequantized afterwards."""
    old, new = dequantized(before, layer), dequantized(after, layer)
    if new is None:
        return None
    exact = source.weight(layer) if source else None
    against = None
    if exact is not None and exact.shape == new.shape:
        against = (
            None if old is None else quantization_error(exact, old).sqnr_db,
            quantization_error(exact, new).sqnr_db,
        )
    moved = quantization_error(old, new) if old is not None and old.shape == new.shape else None
    return WeightChange(
        relative=moved.relative if moved else None,
        snr_db=moved.sqnr_db if moved else None,
        source_snr_db=against,
    )
