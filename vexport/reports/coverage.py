"""How far calibration reached the experts, in sentences."""

from collections.abc import Sequence
from statistics import median

from vexport.reports.formatting import count, plural
from vexport.types import ExpertCoverage

MAX_NAMED = 4


def coverage_lines(experts: Sequence[ExpertCoverage]) -> tuple[str, ...]:
    """What the router sent to the experts of all layers, then which experts it sent nothing."""
    if not experts:
        return ()
    fewest, most = min(layer.fewest for layer in experts), max(layer.most for layer in experts)
    middle = median(layer.median for layer in experts)
    reached = (
        f"{plural(sum(layer.experts for layer in experts), 'expert')} in {plural(len(experts), 'layer')}: "
        f"{count(fewest)} to {count(most)} calibration tokens routed to each, median {middle:.0f}"
    )
    return (reached, *_unreached([layer for layer in experts if layer.none]))


def _unreached(layers: Sequence[ExpertCoverage]) -> tuple[str, ...]:
    if not layers:
        return ()
    named = [f"{layer.name} {', '.join(map(str, layer.none[:MAX_NAMED]))}" for layer in layers[:MAX_NAMED]]
    total = sum(len(layer.none) for layer in layers)
    shown = sum(len(layer.none[:MAX_NAMED]) for layer in layers[:MAX_NAMED])
    rest = f" and {count(total - shown)} more" if total > shown else ""
    return (f"no token was routed to {plural(total, 'expert')}: {'; '.join(named)}{rest}",)
