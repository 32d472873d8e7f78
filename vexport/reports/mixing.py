"""What was chosen for groups of layers, in a sentence."""

from collections import Counter

from vexport.reports.formatting import percent, plural, size, small
from vexport.types import MixedScheme


def budget_of(mixed: MixedScheme) -> str:
    """What the mixed scheme had to stay within."""
    limits = {
        "bits": f"{mixed.limit:g} bits per weight",
        "bytes": size(round(mixed.limit)),
        "share": f"{percent(mixed.limit, 0)} of the source's bytes",
        "loss": f"{small(mixed.limit)} nats per token",
    }
    return limits[mixed.budget]


def mixed_line(mixed: MixedScheme) -> str:
    """The budget, what it came to, and the loss that it predicts."""
    counts = Counter(one.scheme for one in mixed.choices)
    chosen = ", ".join(f"{scheme} for {plural(number, 'group')}" for scheme, number in counts.items())
    return f"within {budget_of(mixed)}: {chosen}; predicted loss {small(mixed.loss)} nats per token"
