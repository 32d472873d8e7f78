"""Options of a call that no scenario has: whether the cause of a loss is looked for.

`vexport report` imports this, without torch.
"""

from dataclasses import dataclass

from vexport.records import Outcome

EXPLANATION_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Explaining:
    """The search for the cause of a loss after the verdict, which takes so many seconds at most.

    Without `wanted` there is one unless the verdict is PASS.
    """

    wanted: bool | None = None
    seconds: float = EXPLANATION_SECONDS

    def is_due(self, outcome: Outcome) -> bool:
        """Return whether to look for the cause of this outcome."""
        return outcome != "PASS" if self.wanted is None else self.wanted


EXPLAINING = Explaining()
