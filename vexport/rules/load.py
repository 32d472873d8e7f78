"""Rules of a load in the real engine."""

from vexport.rules.book import Rule

REFUSED = Rule(
    "load/refused",
    claim="refused",
    got="{reason}",
    need="a checkpoint that vLLM loads",
    do="find the fault with `vexport check`, repair it with `vexport repair`, or export it again",
)
