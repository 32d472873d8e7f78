"""Rules of a load by vLLM's loaders without a GPU."""

from vexport.rules.book import Rule

_SHAPE = "store the tensor in the shape that config.json implies"

REFUSED = Rule(
    "dry-load/refused",
    claim="refused",
    got="{reason}",
    need="a checkpoint that vLLM loads",
    do="correct the cause that vLLM reports, or serve it on another GPU",
    loader_faults=(),
)
NOT_SHOWN = Rule(
    "dry-load/not-shown",
    got="{reason}",
    need="a checkpoint that vLLM loads",
    do="load it on a GPU",
)
MISSING = Rule(
    "dry-load/missing",
    claim="values",
    got="{found}",
    need="a stored value for every element, {expected}",
    do="add the missing tensor: vLLM would use uninitialized memory",
)
UNUSED = Rule(
    "dry-load/unused",
    "warning",
    got="{found}",
    need="a tensor that vLLM loads into a parameter",
    do="correct the tensor's name, or remove the tensor",
)
CAST = Rule(
    "dry-load/cast",
    claim="values",
    got="{found}",
    need="{expected}, to which vLLM would cast the values",
    do="store the tensor in this dtype",
)
NARROWED = Rule(
    "dry-load/narrowed",
    claim="values",
    got="{found}",
    need="{expected}, because vLLM ignores the rest of the tensor",
    do=_SHAPE,
)
STRETCHED = Rule(
    "dry-load/stretched",
    "warning",
    "values",
    got="{found}",
    need="{expected}, which vLLM fills by repeating the values",
    do=f"{_SHAPE}, unless all its values are equal",
)
