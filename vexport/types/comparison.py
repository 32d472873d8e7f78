"""Several runs next to each other: what each stores, what that loses, and its verdict."""

from dataclasses import dataclass

from vexport.types.accuracy import TaskVerdict
from vexport.types.values import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A row of `vexport compare`, or of `vexport report` over several runs.

    `folder` is the run directory. `outcome` is None where nothing came of the run, for the `reason`.
    `mean_kl` is in nats a token; `worst` is the task with the lowest bound, without its documents. `smallest`
    marks the smallest checkpoint that passes.
    """

    name: str
    folder: str
    schemes: str = ""
    outcome: Outcome | None = None
    reason: str = ""
    num_bytes: int = 0
    bits_per_weight: float = 0.0
    mean_kl: float | None = None
    worst: TaskVerdict | None = None
    smallest: bool = False
