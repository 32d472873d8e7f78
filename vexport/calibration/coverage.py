"""How many tokens the router sent to each expert, summed up."""

from statistics import median

from vexport.types import Calibration, ExpertCoverage


def expert_coverage(calibration: Calibration) -> tuple[ExpertCoverage, ...]:
    """One summary for each module of experts that calibration watched."""
    return tuple(
        ExpertCoverage(
            name=name,
            experts=len(counts),
            fewest=min(counts),
            median=median(counts),
            most=max(counts),
            none=tuple(expert for expert, tokens in enumerate(counts) if not tokens),
        )
        for name, counts in calibration.routed.items()
    )
