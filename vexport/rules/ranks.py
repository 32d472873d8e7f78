"""Rules of the numbers of ranks that can share a model."""

from vexport.rules.book import Rule

HEADS = Rule(
    "ranks/heads",
    claim="refused",
    got="{reason}",
    need="attention heads that {ranks} ranks can share",
    do="serve it on {possible} (--tp)",
)
UNQUANTIZED_LAYER = Rule("ranks/unquantized-layer", claim="refused", got="{reason}", do="{advice}")
