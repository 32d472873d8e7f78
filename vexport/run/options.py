"""Define options of a call that are not in a scenario: whether to look for the cause of a loss.

`vexport report` imports this module, without torch.
"""

from dataclasses import dataclass

from vexport.records import Outcome

ATTRIBUTION_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionSettings:
    """Settings of the search for the cause of a loss, which follows the verdict.

    The search takes at most `seconds`. If `wanted` is None, it runs unless the verdict is PASS.
    """

    wanted: bool | None = None
    seconds: float = ATTRIBUTION_SECONDS

    def is_due(self, outcome: Outcome) -> bool:
        """Return True if the run should look for the cause of this outcome."""
        return outcome != "PASS" if self.wanted is None else self.wanted


DEFAULT_ATTRIBUTION = AttributionSettings()
