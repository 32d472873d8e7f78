"""Known faults of vLLM (`vexport/architectures/faults.py`)."""

from vexport.rules.book import Rule

_NEED = "a vLLM without this fault ({repaired})"
_DO = "{remedy} ({thread})"

# The fault comes after the weights are loaded, so a dry load does not show it.
CRASH = Rule(
    "faults/crash",
    claim="refused",
    got="{kernel} of vLLM {version} on {gpus:and}: {what}",
    need=_NEED,
    do=_DO,
    loader_faults=(),
)
WRONG_NUMBERS = Rule(
    "faults/wrong-numbers",
    claim="values",
    got="{kernel} of vLLM {version} on {gpus:and}: {what}",
    need=_NEED,
    do=_DO,
    loader_faults=(),
)
# The numbers differ from the stored scheme by the rounding of the inputs: an evaluation on such a
# GPU shows the loss.
FEWER_BITS = Rule(
    "faults/fewer-bits",
    "warning",
    "precision",
    got="{kernel} of vLLM {version} on {gpus:and}: {what}",
    need=_NEED,
    do=_DO,
)
SLOW = Rule(
    "faults/slow",
    "warning",
    "precision",
    got="{kernel} of vLLM {version} on {gpus:and}: {what}",
    need=_NEED,
    do=_DO,
)
UNKNOWN = Rule(
    "faults/unknown",
    "warning",
    got="{kernel} of vLLM {version} on {gpus:and}, whose code does not show whether it still has "
    "a known fault: {what}",
    need=_NEED,
    do=_DO,
)
