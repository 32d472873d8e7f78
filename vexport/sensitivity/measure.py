"""The loss of every group of layers in every scheme that is open to it, measured or estimated."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scipy.stats import spearmanr

from vexport.calibration.data import Samples
from vexport.calibration.model import require_device
from vexport.calibration.walk import LayerWalk, make_batches
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.smoothed import reader_of
from vexport.files import digest_bytes, from_json, to_json, write_text
from vexport.sensitivity.layer_groups import LayerGroup
from vexport.sensitivity.stream import Trial, TrialStream
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
    """All that was found so far, and a digest of what it was found from."""

    inputs: str
    losses: tuple[TrialLoss, ...]


def measure(
    index: SourceIndex,
    layer_groups: Sequence[LayerGroup],
    calibration: Calibration,
    samples: Samples,
    *,
    method: Method,
    file: Path,
    on_progress: OnProgress,
    trust_remote_code: bool,
    device: str,
) -> Sensitivity:
    """Run every layer group's options on the samples; what is in `file` from a call with the same arguments
    is not run again.

    Raises InputError for a model that cannot run layer by layer, a layer group that text cannot reach and an
    unusable device.
    """
    require_device(device)
    trials = [
        Trial(unit=layer_group.name, option=option)
        for layer_group in layer_groups
        for option in layer_group.options
    ]
    with reader_of(calibration.smoothing) as reader:
        walk = LayerWalk(
            index, reader, make_batches(samples), trust_remote_code=trust_remote_code, device=device
        )
        stream = TrialStream(walk, index, calibration, reader)
        inputs = digest_bytes(repr((layer_groups, calibration, samples)).encode())
        runs = TrialRuns(stream, file, inputs, on_progress)
        if method == "estimate":
            runs.run(trials, carry=False)
            runs.run(_worst_of_each_layer(trials, runs.losses), carry=True)
        else:
            runs.run(trials, carry=True)
    return summary(layer_groups, runs.losses, method=method, samples=samples)


class TrialRuns:
    """Trials that are done, and running those that are not, part by part."""

    def __init__(self, stream: TrialStream, file: Path, inputs: str, on_progress: OnProgress) -> None:
        self._stream = stream
        self._file = file
        self._inputs = inputs
        self._on_progress = on_progress
        known = from_json(TrialLosses, file) if file.is_file() else None
        losses = known.losses if known is not None and known.inputs == inputs else ()
        self.losses = {(one.unit, one.scheme): one for one in losses}

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
                self.losses[trial.unit, trial.option.scheme] = TrialLoss(
                    unit=trial.unit,
                    scheme=trial.option.scheme,
                    depth=self._stream.depth(trial),
                    error=outcome.error,
                    layers=outcome.layers,
                    loss=outcome.loss,
                )
            found = TrialLosses(inputs=self._inputs, losses=tuple(self.losses.values()))
            write_text(self._file, to_json(found))

    def _is_known(self, trial: Trial, carry: bool) -> bool:
        known = self.losses.get((trial.unit, trial.option.scheme))
        return known is not None and (known.loss is not None or not carry)

    def _parts(self, trials: Sequence[Trial], carry: bool) -> Iterator[Sequence[Trial]]:
        size = self._stream.states_bytes
        most = min(MOST_TRIALS, max(1, MEMORY_BYTES // size)) if carry else max(1, len(trials))
        for start in range(0, len(trials), most):
            yield trials[start : start + most]


Losses = Mapping[tuple[str, str], TrialLoss]


def _worst_of_each_layer(trials: Sequence[Trial], losses: Losses) -> list[Trial]:
    """The trial of most error in each decoder layer: measured, it says what an error there costs."""
    worst: dict[int, Trial] = {}

    def error(trial: Trial) -> float:
        return losses[trial.unit, trial.option.scheme].error

    for trial in trials:
        depth = losses[trial.unit, trial.option.scheme].depth
        if depth not in worst or error(trial) > error(worst[depth]):
            worst[depth] = trial
    return list(worst.values())


def summary(
    layer_groups: Sequence[LayerGroup], losses: Losses, *, method: Method, samples: Samples
) -> Sensitivity:
    """Losses by group. An estimate is a trial's error at the price, in nats, of the worst trial's error in
    the same decoder layer."""
    scales, worst = _prices(losses)
    pairs = [
        (scales[one.depth] * one.error, one.loss)
        for key, one in losses.items()
        if one.loss is not None and key not in worst
    ]
    return Sensitivity(
        method=method,
        samples=len(samples.rows),
        tokens=sum(map(len, samples.token_ids)),
        groups=tuple(_group(layer_group, losses, scales) for layer_group in layer_groups),
        rank_correlation=_rank_correlation(pairs),
    )


def _prices(losses: Losses) -> tuple[dict[int, float], set[tuple[str, str]]]:
    """Nats for a relative error of 1 in each decoder layer, and the trials that tell it."""
    worst: dict[int, TrialLoss] = {}
    for one in losses.values():
        if one.loss is not None and one.error >= getattr(worst.get(one.depth), "error", 0.0):
            worst[one.depth] = one
    prices = {
        depth: one.loss / one.error if one.loss is not None and one.error else 0.0
        for depth, one in worst.items()
    }
    return prices, {(one.unit, one.scheme) for one in worst.values()}


def _group(layer_group: LayerGroup, losses: Losses, scales: Mapping[int, float]) -> GroupSensitivity:
    return GroupSensitivity(
        name=layer_group.name,
        layers=layer_group.layers,
        parameters=layer_group.parameters,
        source_bytes=layer_group.source_bytes,
        schemes=tuple(_scheme(layer_group, option.scheme, losses, scales) for option in layer_group.options),
        refused=layer_group.refused,
    )


def _scheme(layer_group: LayerGroup, scheme: str, losses: Losses, scales: Mapping[int, float]) -> SchemeLoss:
    one = losses[layer_group.name, scheme]
    option = next(option for option in layer_group.options if option.scheme == scheme)
    price = scales[one.depth]
    return SchemeLoss(
        scheme=scheme,
        observer=option.groups[0].observers,
        num_bytes=option.num_bytes,
        estimate=price * one.error if one.error or one.loss is None else one.loss,
        measured=one.loss,
        layers=tuple(LayerLoss(name=name, estimate=price * error) for name, error in one.layers.items()),
        rounding=option.groups[0].rounding,
    )


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's; None for fewer than three pairs, or where one side is all the same."""
    sides = list(zip(*pairs, strict=True))
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in sides):
        return None
    return round(float(spearmanr(*sides).statistic), 4)
