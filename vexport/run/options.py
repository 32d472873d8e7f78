"""Options of a call that no scenario has: how engines are started, and whether a loss is explained.

`vexport report` imports this, without torch.
"""

from dataclasses import dataclass
from pathlib import Path

from vexport.records import OnProgress, Outcome
from vexport.scenario import Evaluate, Serve

EXPLANATION_SECONDS = 300
# The evaluation of a scenario that asks for none: the defaults, and nothing to decide by.
NO_EVALUATION = Evaluate.model_construct(kl_prompts=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The start of every engine of a call."""

    serve: Serve
    vllm_python: Path | None
    trust_remote_code: bool
    on_progress: OnProgress


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
