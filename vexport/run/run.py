"""A run: a candidate, the side that it is compared with, and how both are judged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vexport.inference.options import BASELINE, CANDIDATE, NO_EVALUATION, EngineOptions
from vexport.names import AcceptedFile
from vexport.records import Outcome
from vexport.reports.run_record import MadeCheckpoint
from vexport.run.directory import RunDirectory
from vexport.run.side import Preparation, Side
from vexport.run.work import Place, Work
from vexport.scenario import Evaluate, Variant

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
_NOTHING = Preparation()


class Run(Work):
    """The sides of a run in a run directory, and what its stages leave.

    Several runs can share a `directory` and the responses of their baseline. Without `evaluate`
    the candidate is only loaded. `made` describes the checkpoint if an earlier `Maker` made it.
    `recorded` has the stages of the maker, for the report. `variants` are the settings in which the
    candidate is compared with itself.
    """

    def __init__(
        self,
        directory: RunDirectory,
        options: EngineOptions,
        sides: Sequence[Side],
        *,
        name: str,
        evaluate: Evaluate | None,
        preparation: Preparation = _NOTHING,
        made: MadeCheckpoint | None = None,
        variants: Sequence[Variant] = (),
        attribution: AttributionSettings = DEFAULT_ATTRIBUTION,
        recorded: Mapping[str, str] | None = None,
    ) -> None:
        self.sides = {side.role: side for side in sides}
        places = {
            side.role: Place(folder=directory.root / side.folder, part=side.part) for side in sides
        }
        own = places[CANDIDATE] if self.candidate.part else Place(folder=directory.root)
        super().__init__(directory, options, {**places, "": own})
        self.recorded |= recorded or {}
        self.name = name
        self.evaluate = evaluate
        self.preparation = preparation
        self.made = made
        self.variants = variants
        self.attribution = attribution

    @property
    def candidate(self) -> Side:
        return self.sides[CANDIDATE]

    @property
    def baseline(self) -> Side | None:
        return self.sides.get(BASELINE)

    @property
    def accepted(self) -> Path | None:
        """Return the file of the accepted baseline, if the candidate is compared with one."""
        ref = self.baseline.ref if self.baseline is not None else None
        return ref.path if isinstance(ref, AcceptedFile) else None

    @property
    def evaluation(self) -> Evaluate:
        """Return the settings of the evaluation, without tasks and text if nothing is evaluated."""
        return self.evaluate or NO_EVALUATION

    @property
    def judges_load(self) -> bool:
        """Return True if the load is judged before the responses. `vexport eval` skips it."""
        return self.evaluate is None or self.made is not None

    @property
    def is_loadable(self) -> bool:
        """Return True if no earlier step found an error in the checkpoint."""
        made = self.made
        return made is None or (made.check.ok and (made.dry_load is None or made.dry_load.ok))

    def is_served(self, role: str) -> bool:
        """Return True if the run must get responses from the model with this role."""
        return self.is_loadable and role in self.sides and self.sides[role].is_served
