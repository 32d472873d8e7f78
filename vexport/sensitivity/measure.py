"""The loss of every group of layers in every scheme that is open to it, measured or estimated."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scipy.stats import spearmanr

from vexport.calibration.data import Samples
from vexport.calibration.device import require_device
from vexport.calibration.forward import make_batches
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.files import from_json, to_json, write_text
from vexport.sensitivity.stream import TrialStream
from vexport.sensitivity.trials import Trial
from vexport.sensitivity.units import Unit
from vexport.types import (
    Calibration,
    GroupSensitivity,
    LayerLoss,
    Method,
    OnProgress,
    SchemeLoss,
    Sensitivity,
)

# Hidden states of trials that are under way together take at most so many bytes, and results are written at
# least every so many trials.
MEMORY_BYTES = 2**31
MOST_TRIALS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLoss:
    """What was found of one trial (see `stream.Outcome`), and the decoder layer that it changes."""

    unit: str
    scheme: str
    depth: int
    error: float
    layers: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLosses:
    """All that was found so far."""

    losses: tuple[TrialLoss, ...]


def measure(
    index: SourceIndex,
    units: Sequence[Unit],
    calibration: Calibration,
    samples: Samples,
    *,
    method: Method,
    file: Path,
    on_progress: OnProgress,
    trust_remote_code: bool,
    device: str,
) -> Sensitivity:
    """Run every unit's options on the samples; what is in `file` from a call before is not run again.

    Raises InputError for a model that cannot run layer by layer, a unit that text cannot reach and an
    unusable device.
    """
    require_device(device)
    trials = [Trial(unit=unit.name, option=option) for unit in units for option in unit.options]
    with Reader() as reader:
        stream = TrialStream(
            index,
            calibration,
            reader,
            make_batches(samples, 1),
            trust_remote_code=trust_remote_code,
            device=device,
        )
        runs = TrialRuns(stream, file, on_progress)
        if method == "estimate":
            runs.run(trials, carry=False)
            runs.run(_loudest(trials, runs.found), carry=True)
        else:
            runs.run(trials, carry=True)
    return summary(units, runs.found, method=method, samples=samples)


class TrialRuns:
    """Trials that are done, and running those that are not, part by part."""

    def __init__(self, stream: TrialStream, file: Path, on_progress: OnProgress) -> None:
        self._stream = stream
        self._file = file
        self._on_progress = on_progress
        known = from_json(TrialLosses, file).losses if file.is_file() else ()
        self.found = {(one.unit, one.scheme): one for one in known}

    def run(self, trials: Sequence[Trial], *, carry: bool) -> None:
        """Run those of which too little is known and write down each part."""
        open_ = [trial for trial in trials if not self._is_known(trial, carry)]
        open_.sort(key=self._stream.depth)
        stage = f"sensitivity ({'to the output' if carry else 'own layer'})"
        total, done = self._stream.steps(open_, carry=carry), 0

        def step() -> None:
            nonlocal done
            done += 1
            self._on_progress(stage, done, total)

        for part in self._parts(open_, carry):
            for trial, outcome in self._stream.run(part, carry=carry, on_step=step).items():
                self.found[trial.unit, trial.option.scheme] = TrialLoss(
                    unit=trial.unit,
                    scheme=trial.option.scheme,
                    depth=self._stream.depth(trial),
                    error=outcome.error,
                    layers=outcome.layers,
                    loss=outcome.loss,
                )
            write_text(self._file, to_json(TrialLosses(losses=tuple(self.found.values()))))

    def _is_known(self, trial: Trial, carry: bool) -> bool:
        known = self.found.get((trial.unit, trial.option.scheme))
        return known is not None and (known.loss is not None or not carry)

    def _parts(self, trials: Sequence[Trial], carry: bool) -> Iterator[Sequence[Trial]]:
        size = self._stream.states_bytes
        most = min(MOST_TRIALS, max(1, MEMORY_BYTES // size)) if carry else max(1, len(trials))
        for start in range(0, len(trials), most):
            yield trials[start : start + most]


Found = Mapping[tuple[str, str], TrialLoss]


def _loudest(trials: Sequence[Trial], found: Found) -> list[Trial]:
    """The trial of most error in each decoder layer: measured, it says what an error there costs."""
    loudest: dict[int, Trial] = {}

    def error(trial: Trial) -> float:
        return found[trial.unit, trial.option.scheme].error

    for trial in trials:
        depth = found[trial.unit, trial.option.scheme].depth
        if depth not in loudest or error(trial) > error(loudest[depth]):
            loudest[depth] = trial
    return list(loudest.values())


def summary(units: Sequence[Unit], found: Found, *, method: Method, samples: Samples) -> Sensitivity:
    """Losses by group. An estimate is a trial's error at the price, in nats, of the loudest trial's error in
    the same decoder layer."""
    scales, loudest = _prices(found)
    pairs = [
        (scales[one.depth] * one.error, one.loss)
        for key, one in found.items()
        if one.loss is not None and key not in loudest
    ]
    return Sensitivity(
        method=method,
        samples=len(samples.rows),
        tokens=sum(map(len, samples.token_ids)),
        groups=tuple(_group(unit, found, scales) for unit in units),
        rank_correlation=_rank_correlation(pairs),
    )


def _prices(found: Found) -> tuple[dict[int, float], set[tuple[str, str]]]:
    """Nats for a relative error of 1 in each decoder layer, and the trials that tell it."""
    loudest: dict[int, TrialLoss] = {}
    for one in found.values():
        if one.loss is not None and one.error >= getattr(loudest.get(one.depth), "error", 0.0):
            loudest[one.depth] = one
    prices = {
        depth: one.loss / one.error if one.loss is not None and one.error else 0.0
        for depth, one in loudest.items()
    }
    return prices, {(one.unit, one.scheme) for one in loudest.values()}


def _group(unit: Unit, found: Found, scales: Mapping[int, float]) -> GroupSensitivity:
    return GroupSensitivity(
        name=unit.name,
        layers=unit.layers,
        parameters=unit.parameters,
        source_bytes=unit.source_bytes,
        schemes=tuple(_scheme(unit, option.scheme, found, scales) for option in unit.options),
        refused=unit.refused,
    )


def _scheme(unit: Unit, scheme: str, found: Found, scales: Mapping[int, float]) -> SchemeLoss:
    one = found[unit.name, scheme]
    option = next(option for option in unit.options if option.scheme == scheme)
    price = scales[one.depth]
    return SchemeLoss(
        scheme=scheme,
        observer=option.groups[0].observer,
        num_bytes=option.num_bytes,
        estimate=price * one.error if one.error or one.loss is None else one.loss,
        measured=one.loss,
        layers=tuple(LayerLoss(name=name, estimate=price * error) for name, error in one.layers.items()),
    )


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's; None for fewer than three pairs, or where one side is all the same."""
    sides = list(zip(*pairs, strict=True))
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in sides):
        return None
    return round(float(spearmanr(*sides).statistic), 4)
