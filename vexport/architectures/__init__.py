"""The layers of each model class in vLLM: fused, renamed, cut; tables generated for each vLLM version."""

from vexport.architectures.table import (
    Architecture,
    FusedModules,
    Reordering,
    TableLookup,
    architecture_table,
    get_architecture,
    resolve,
)

__all__ = [
    "Architecture",
    "FusedModules",
    "Reordering",
    "TableLookup",
    "architecture_table",
    "get_architecture",
    "resolve",
]
