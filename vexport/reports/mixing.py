"""What was chosen for groups of layers, and what promoting them cost, in a sentence each."""

from collections import Counter

from vexport.reports.formatting import percent, plural, size, small
from vexport.types import Attempt, MixedScheme


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


def attempt_line(attempt: Attempt) -> str:
    """The outcome of a round, the size of its checkpoint, and the price of what was promoted for it."""
    line = f"{attempt.outcome} at {size(attempt.output_bytes)}"
    if not attempt.promotions:
        return f"{line}, predicted loss {small(attempt.loss)} nats per token"
    price = size(sum(one.num_bytes for one in attempt.promotions))
    steps = Counter(f"{one.before} to {one.after}" for one in attempt.promotions)
    promoted = ", ".join(f"{plural(number, 'group')} from {step}" for step, number in steps.items())
    return f"{line}, {price} more for {promoted}, predicted loss {small(attempt.loss)} nats per token"
