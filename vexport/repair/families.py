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
FAMILIES: Sequence[Family] = (
    config.run,
    ordering.run,
    arguments.run,
    targets.run,
    layout.run,
    restore.run,
    global_scales.reciprocals,
    global_scales.unequal,
    kv_cache.run,
)
