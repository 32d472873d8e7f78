"""Rules of the tensors that a written checkpoint keeps unquantized."""

from vexport.rules.book import Rule

CHANGED_TENSOR = Rule(
    "roundtrip/changed-tensor",
    claim="values",
    got="different bytes, or no such tensor",
    need="the same bytes as in the source",
    do="export the checkpoint again",
)
