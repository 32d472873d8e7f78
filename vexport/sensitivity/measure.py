"""The loss of every group of layers in every scheme that is open to it: all else stays as in the source.

Trials run next to the model itself, all through one decoder layer before the next is loaded. Each branches
off at the layer whose weights it changes, from the hidden states of the model itself, and goes on to the
output, where its loss is measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from vexport.calibration.capture import HiddenStates
from vexport.calibration.data import Samples
from vexport.calibration.inputs import GroupInputs, Noted
from vexport.calibration.walk import Layer, LayerWalk
from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.files import digest_bytes, from_json, to_json, write_text
from vexport.numerics.metrics import divergence_of_logits
from vexport.quantize.model import QuantizedLayer, QuantizedModel
from vexport.quantize.round_sites import SiteSums
from vexport.quantize.stream import quantized_group
from vexport.quantize.weight_scales import search_scales
from vexport.sensitivity.layer_groups import LayerGroup, Option
from vexport.types import Calibration, GroupSensitivity, OnProgress, SchemeLoss, Sensitivity

# Hidden states of trials that are under way together take at most so many bytes, and results are written at
# least every so many trials.
MEMORY_BYTES = 2**31
MOST_TRIALS = 64

# The hidden states of a batch each.
States = list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLosses:
    """KL(source || trial) in nats per token by layer group and scheme, and a digest of what decides it."""

    inputs: str
    losses: Mapping[str, Mapping[str, float]]


def measure(
    index: SourceIndex,
    layer_groups: Sequence[LayerGroup],
    calibration: Calibration,
    samples: Samples,
    *,
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
    inputs = digest_bytes(repr((layer_groups, calibration, samples)).encode())
    losses: dict[str, dict[str, float]] = {}
    if file.is_file() and (known := from_json(TrialLosses, file)).inputs == inputs:
        losses = {name: dict(schemes) for name, schemes in known.losses.items()}
    walk = LayerWalk(index, trust_remote_code=trust_remote_code, device=device)
    with walk.text(samples, calibration.smoothing) as hidden:
        model = QuantizedModel(walk, calibration)
        trials = [
            Trial(model, walk, layer_group, option)
            for layer_group in layer_groups
            for option in layer_group.options
            if option.scheme not in losses.get(layer_group.name, {})
        ]
        trials.sort(key=lambda trial: trial.depth)
        for part in _parts(trials, walk, hidden, on_progress):
            for trial, loss in part.items():
                losses.setdefault(trial.group, {})[trial.option.scheme] = loss
            write_text(file, to_json(TrialLosses(inputs=inputs, losses=losses)))
    return Sensitivity(
        samples=len(samples.rows),
        tokens=sum(map(len, samples.token_ids)),
        groups=tuple(_sensitivity(group, losses[group.name]) for group in layer_groups),
    )


def _sensitivity(group: LayerGroup, losses: Mapping[str, float]) -> GroupSensitivity:
    return GroupSensitivity(
        name=group.name,
        layers=group.layers,
        parameters=group.parameters,
        source_bytes=group.source_bytes,
        schemes=tuple(
            SchemeLoss(
                scheme=option.scheme,
                observer=option.groups[0].observers,
                num_bytes=option.num_bytes,
                loss=losses[option.scheme],
                rounding=option.groups[0].rounding,
            )
            for option in group.options
        ),
        refused=group.refused,
    )


class Trial:
    """A layer group in one scheme, in the model that `walk` fills.

    Nothing in front of it is quantized: a refit has no errors of earlier layers to correct and comes to GPTQ
    for inputs that the trial's own scheme rounds, which is what is done. InputError where the text model has
    none of its weights.
    """

    def __init__(self, model: QuantizedModel, walk: LayerWalk, group: LayerGroup, option: Option) -> None:
        self.group, self.option, self.model, self._walk = group.name, option, model, walk
        parameter = model.places.parameter_of(option.groups[0].members[0])
        if not parameter:
            raise InputError(
                group.name,
                got="weights that the text model does not run",
                need="a layer whose loss text can show",
                fix="give it a rule with its own scheme and leave out `sensitivity`, or keep it",
            )
        inside = parameter.removeprefix(f"{walk.name}.")
        # The number of the decoder layer that it changes, that of layers where it is the output head.
        self.depth = len(walk.layers) if inside == parameter else int(inside.partition(".")[0])

    def begin(self) -> None:
        """Before any text."""
        tokens = sum(ids.numel() for ids in self._walk.ids)
        groups = [group for group in self.option.groups if group.rounding != "nearest"]
        self.inputs = GroupInputs(self.model.places, groups)
        self._sums = SiteSums(self.model, self.inputs, text=tokens, plain=True)

    def add(self, noted: Noted) -> None:
        """Take in what entered the layers that are rounded by text, of a batch."""
        self._sums.add(noted, noted)

    def layers(self) -> Sequence[QuantizedLayer]:
        """The layers as compressed-tensors dequantizes what would be stored.

        Raises InputError where a weight is not finite.
        """
        model, layers = self.model, list[QuantizedLayer]()
        rounded, _ = self._sums.rounded(self.inputs.sites)
        for group in self.option.groups:
            stored = quantized_group(
                group,
                model.index,
                model.calibration,
                model.reader,
                search=search_scales,
                rounded=rounded.get(group.name, {}),
            )
            layers.extend(model.layers_of(group, stored))
        del self._sums, self.inputs
        return layers


def _parts(
    trials: Sequence[Trial], walk: LayerWalk, entered: HiddenStates, on_progress: OnProgress
) -> Iterator[dict[Trial, float]]:
    """The losses of trials, as many at a time as fit the memory."""
    states_bytes = sum(states.nbytes for states in map(entered.__getitem__, range(len(entered))))
    most = min(MOST_TRIALS, max(1, MEMORY_BYTES // states_bytes))
    # A step is a trial's way through one decoder layer, or the head.
    steps = sum(max(1, len(walk.layers) - trial.depth) for trial in trials)
    done = 0

    def on_step() -> None:
        nonlocal done
        done += 1
        on_progress("sensitivity (layers)", done, steps)

    for start in range(0, len(trials), most):
        yield TrialWalk(walk, trials[start : start + most], entered, on_step).run()


class TrialWalk:
    """A walk through the model as it is, and next to it each trial from the layer on that it changes."""

    def __init__(
        self,
        walk: LayerWalk,
        trials: Sequence[Trial],
        entered: HiddenStates,
        on_step: Callable[[], None],
    ) -> None:
        self._walk, self._trials, self._on_step = walk, trials, on_step
        self._plain = [entered[position] for position in range(len(entered))]
        self._changed: dict[Trial, States] = {}

    def run(self) -> dict[Trial, float]:
        """The mean KL of each trial over all positions."""
        for layer in self._walk.forward():
            self._layer(layer)
        return self._losses()

    def _layer(self, layer: Layer) -> None:
        here = [trial for trial in self._trials if trial.depth == layer.number]
        entered = self._plain
        self._plain = self._noted(here, lambda position: self._through(layer, position, entered))
        positions = range(len(entered))
        for trial, states in self._changed.items():
            self._changed[trial] = [self._through(layer, position, states) for position in positions]
            self._on_step()
        for trial in here:
            with trial.model.applied(trial.layers()):
                self._changed[trial] = [self._through(layer, position, entered) for position in positions]
            self._on_step()

    def _through(self, layer: Layer, position: int, states: States) -> torch.Tensor:
        return self._walk.through(layer, position, states[position]).to("cpu")

    def _noted(self, trials: Sequence[Trial], run: Callable[[int], torch.Tensor]) -> States:
        """Run all batches; trials take in what enters the layers that they round by text."""
        made = []
        for trial in trials:
            trial.begin()
        for position in range(len(self._walk.ids)):
            with ExitStack() as block:
                noted = [block.enter_context(trial.inputs.noted()) for trial in trials]
                made.append(run(position))
            for trial, seen in zip(trials, noted, strict=True):
                trial.add(seen)
        return made

    def _losses(self) -> dict[Trial, float]:
        walk, plain = self._walk, self._plain
        heads = [trial for trial in self._trials if trial.depth == len(walk.layers)]
        if heads:
            self._noted(heads, lambda position: walk.logits(position, plain[position]))
        layers = {trial: trial.layers() for trial in heads}
        losses = dict.fromkeys(self._trials, 0.0)
        for position, states in enumerate(plain):
            logits = walk.logits(position, states)
            for trial, changed in self._changed.items():
                losses[trial] += divergence_of_logits(logits, walk.logits(position, changed[position]))
            for trial in heads:
                with trial.model.applied(layers[trial]):
                    losses[trial] += divergence_of_logits(logits, walk.logits(position, states))
        for _ in heads:
            self._on_step()
        tokens = sum(ids.numel() for ids in walk.ids)
        return {trial: total / tokens for trial, total in losses.items()}
