"""Several schemes of one model next to each other: size, accuracy, speed, and which of them to take."""

from dataclasses import dataclass
from typing import Literal

from vexport.types.recommendation import Candidate
from vexport.types.speed import SpeedPoint
from vexport.types.values import Outcome

# What `tokens/s` of a comparison are: measured where every row was, else a bound by data sheets, else none.
SpeedKind = Literal["measured", "bound", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedScheme:
    """One scheme: what its run found, and what it would do on a GPU.

    `folder` is its run directory, relative to that of the comparison, empty for the baseline. `outcome` is
    None where no checkpoint came of it, for the `reason`. `recovery` with its bounds is of the task that lost
    most, `loss` its difference in score; None without tasks. `points` were measured on the device that ran
    it, or `unmeasured` says why not. `on_gpu` is its row of `vexport recommend`, None without --gpu.
    `rates` are the tokens a second that are compared, by requests at once. `dominated_by` names a scheme that
    is no worse in size, loss and speed, and better in one.
    """

    scheme: str
    folder: str = ""
    outcome: Outcome | None = None
    reason: str = ""
    num_bytes: int = 0
    bits_per_weight: float = 0.0
    mean_kl: float | None = None
    task: str = ""
    recovery: float | None = None
    recovery_low: float | None = None
    recovery_high: float | None = None
    points: tuple[SpeedPoint, ...] = ()
    unmeasured: str = ""
    on_gpu: Candidate | None = None
    rates: tuple[tuple[int, float], ...] = ()
    dominated_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeComparison:
    """All schemes of a model, in the order in which they were asked for.

    `device` ran them; `gpu` with its `tp` and `context` is what the bound and the memory are for, empty
    without one. `recommended` is empty where the data does not decide, or nothing passed; `reasons` say why.
    """

    name: str
    source: str
    created: str
    vexport: str
    device: str
    gpu: str
    tp: int
    context: int
    speed_kind: SpeedKind
    baseline: ComparedScheme
    schemes: tuple[ComparedScheme, ...]
    recommended: str
    reasons: tuple[str, ...]
