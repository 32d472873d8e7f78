"""What vLLM does with the layers of each model class; the tables are generated for each vLLM version."""

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
