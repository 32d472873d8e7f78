"""How many documents an evaluation needs, said before anything is run."""

from vexport.evaluation.statistics import documents_for_power
from vexport.reports.formatting import count, percent
from vexport.scenario import Evaluate

# The share of answers assumed to change, right or wrong; the line that uses it says so.
TYPICAL_DISAGREEMENT = 0.05


def documents_needed(settings: Evaluate) -> str:
    """A line of a plan: how many documents pass a model that lost nothing, with power 0.8.

    Empty where the margin is 0, which no number of documents settles.
    """
    if settings.margin <= 0:
        return ""
    needed = documents_for_power(settings.margin, TYPICAL_DISAGREEMENT, settings.alpha)
    condition = f"margin {percent(settings.margin)}, alpha {settings.alpha:g}"
    change = percent(TYPICAL_DISAGREEMENT, 0)
    amount = f"about {count(needed)} for power 0.8 at {condition}"
    return f"  {'documents':<12} {amount}, if {change} of answers change\n"
