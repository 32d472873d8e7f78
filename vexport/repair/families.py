"""Every family of repairs. Most of them read and write tensors by torch."""

from collections.abc import Sequence

from vexport.repair import (
    Family,
    arguments,
    config,
    global_scales,
    kv_cache,
    layout,
    ordering,
    restore,
    targets,
)

# In this order: each family sees the checkpoint as those before it left it.
FAMILIES: Sequence[tuple[str, Family]] = (
    (config.NAME, config.run),
    (ordering.NAME, ordering.run),
    (arguments.NAME, arguments.run),
    (targets.NAME, targets.run),
    (layout.NAME, layout.run),
    (restore.NAME, restore.run),
    (global_scales.NAME, global_scales.reciprocals),
    (global_scales.NAME, global_scales.unequal),
    (kv_cache.NAME, kv_cache.run),
)
