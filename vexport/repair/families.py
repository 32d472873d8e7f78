"""Every family of repairs. Most of them read and write tensors by torch."""

from collections.abc import Sequence

from vexport.repair import (
    Family,
    arguments,
    config,
    global_scales,
    kv_cache,
    targets,
)

# In this order: each family sees the checkpoint as those before it left it.
FAMILIES: Sequence[Family] = (
    config.run,
    arguments.run,
    targets.run,
    global_scales.reciprocals,
    global_scales.unequal,
    kv_cache.run,
)
