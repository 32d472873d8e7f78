"""The loss of every group of layers in every scheme that is open to it: all else stays as in the
source.

Trials run next to the model itself, all through one decoder layer before the next is loaded. Each
branches off at the layer whose weights it changes, from the hidden states of the model itself, and
goes on to the output, where its loss is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from vexport.calibration.data import Samples
from vexport.calibration.inputs import GroupInputs, Noted
from vexport.calibration.walk import Layer, LayerWalk
from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.files import digest_bytes, from_json, to_json, write_text
from vexport.numerics.metrics import divergence_of_logits
from vexport.quantize.group_rounding import SiteSums
from vexport.quantize.layer_groups import LayerGroup, Option
from vexport.quantize.quantized_model import QuantizedModel
from vexport.quantize.stream import quantized_group
from vexport.records import (
    CalibrationRecord,
    GroupSensitivities,
    GroupSensitivity,
    LinearPlan,
    OnProgress,
    SchemeLoss,
)

# The most bytes of hidden states in concurrent trials, and the number of trials between writes of
# results.
MEMORY_BYTES = 2**31
MOST_TRIALS = 64

# The hidden states of a batch each.
States = list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLosses:
    """KL(source || trial) in nats per token by layer group and scheme, and a digest of what decides
    it.
    """

    inputs: str
    losses: Mapping[str, Mapping[str, float]]


def measure(
    index: SourceIndex,
    layer_groups: Sequence[LayerGroup],
    calibration: CalibrationRecord,
    samples: Samples,
    *,
    file: Path,
    on_progress: OnProgress,
    trust_remote_code: bool,
    device: str,
) -> GroupSensitivities:
    """Run every layer group's options on the samples; what is in `file` from a call with the same
    arguments is not run again.

    Raises InputError for a model that cannot run layer by layer, a layer group that text cannot
    reach and an unusable device.
    """
    inputs = digest_bytes(repr((layer_groups, calibration, samples)).encode())
    losses: dict[str, dict[str, float]] = {}
    if file.is_file() and (known := from_json(TrialLosses, file)).inputs == inputs:
        losses = {name: dict(schemes) for name, schemes in known.losses.items()}
    walk = LayerWalk(index, trust_remote_code=trust_remote_code, device=device)
    stage = "sensitivity (layers)"
    with walk.text(samples, calibration.smoothing, stage=stage, on_progress=on_progress) as hidden:
        model = QuantizedModel(walk, calibration)
        trials = [
            Trial(model, walk, layer_group, option)
            for layer_group in layer_groups
            for option in layer_group.options
            if option.scheme not in losses.get(layer_group.name, {})
        ]
        trials.sort(key=lambda trial: trial.depth)
        entered = [hidden[position] for position in range(len(hidden))]
        most = min(MOST_TRIALS, max(1, MEMORY_BYTES // sum(states.nbytes for states in entered)))
        parts = [trials[start : start + most] for start in range(0, len(trials), most)]
        for number, part in enumerate(parts):
            trial_walk = TrialWalk(walk, part, entered)
            for layer in walk.forward(number, len(parts)):
                trial_walk.layer(layer)
            for trial, loss in trial_walk.losses().items():
                losses.setdefault(trial.group, {})[trial.option.scheme] = loss
            write_text(file, to_json(TrialLosses(inputs=inputs, losses=losses)))
    return GroupSensitivities(
        samples=len(samples.rows),
        tokens=samples.tokens,
        groups=tuple(_sensitivity(group, losses[group.name]) for group in layer_groups),
    )


def _sensitivity(group: LayerGroup, losses: Mapping[str, float]) -> GroupSensitivity:
    schemes = (
        SchemeLoss(
            scheme=option.scheme,
            observer=option.groups[0].observers,
            num_bytes=option.num_bytes,
            loss=losses[option.scheme],
            rounding=option.groups[0].rounding,
        )
        for option in group.options
    )
    return GroupSensitivity(
        name=group.name,
        layers=group.layers,
        parameters=group.parameters,
        source_bytes=group.source_bytes,
        schemes=tuple(schemes),
        refused=group.refused,
    )


class Trial:
    """A layer group in one scheme, in the model that `walk` fills.

    Nothing in front of it is quantized, so that a refit has nothing to correct and comes to GPTQ.
    InputError where the text model has none of its weights.
    """

    def __init__(
        self, model: QuantizedModel, walk: LayerWalk, group: LayerGroup, option: Option
    ) -> None:
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
        # The number of the decoder layer that it changes; the number of layers for the output head.
        self.depth = len(walk.layers) if inside == parameter else int(inside.partition(".")[0])

    def begin(self) -> None:
        """Before any text."""
        tokens = sum(ids.numel() for ids in self._walk.ids)
        groups = [group for group in self.option.groups if group.rounding != "nearest"]
        self.inputs = GroupInputs(self.model.places, groups)
        self._sums = SiteSums(self.model, self.inputs, text=tokens, plain=True)

    def add(self, noted: Noted) -> None:
        """Add the inputs of one batch for the layers that are rounded by text."""
        self._sums.add(noted, noted)

    def weights(self) -> dict[LinearPlan, torch.Tensor]:
        """The weights as compressed-tensors dequantizes what would be stored.

        Raises InputError where one is not finite.
        """
        model, weights = self.model, dict[LinearPlan, torch.Tensor]()
        rounded, _ = self._sums.rounded(self.inputs.sites)
        for group in self.option.groups:
            weights_of_group = rounded.get(group.name, {})
            stored = quantized_group(
                group, model.index, model.calibration, model.reader, weights_of_group
            )
            weights |= model.weights_of(group, stored)
        del self._sums, self.inputs
        return weights


class TrialWalk:
    """A walk through the model as it is, and next to it each trial from the layer on that it
    changes.
    """

    def __init__(self, walk: LayerWalk, trials: Sequence[Trial], entered: States) -> None:
        self._walk, self._trials, self._plain = walk, trials, entered
        self._changed: dict[Trial, States] = {}

    def layer(self, layer: Layer) -> None:
        """Run the model and all trials through a layer."""
        here = [trial for trial in self._trials if trial.depth == layer.number]
        entered, positions = self._plain, range(len(self._plain))
        self._plain = self._noted(here, lambda position: self._through(layer, position, entered))
        for trial, states in self._changed.items():
            self._changed[trial] = [
                self._through(layer, position, states) for position in positions
            ]
        for trial in here:
            with trial.model.applied(trial.option.groups, trial.weights()):
                self._changed[trial] = [
                    self._through(layer, position, entered) for position in positions
                ]

    def _through(self, layer: Layer, position: int, states: States) -> torch.Tensor:
        return self._walk.through(layer, position, states[position]).to("cpu")

    def _noted(self, trials: Sequence[Trial], run: Callable[[int], torch.Tensor]) -> States:
        """Run all batches; trials add the inputs of the layers that they round by text."""
        outputs = []
        for trial in trials:
            trial.begin()
        for position in range(len(self._walk.ids)):
            with ExitStack() as block:
                noted = [block.enter_context(trial.inputs.noted()) for trial in trials]
                outputs.append(run(position))
            for trial, inputs_of_trial in zip(trials, noted, strict=True):
                trial.add(inputs_of_trial)
        return outputs

    def losses(self) -> dict[Trial, float]:
        """The mean KL of each trial over all positions, behind the layers."""
        walk, plain = self._walk, self._plain
        heads = [trial for trial in self._trials if trial.depth == len(walk.layers)]
        if heads:
            self._noted(heads, lambda position: walk.logits(position, plain[position]))
        weights = {trial: trial.weights() for trial in heads}
        losses = dict.fromkeys(self._trials, 0.0)
        for position, states in enumerate(plain):
            logits = walk.logits(position, states)
            for trial, changed in self._changed.items():
                losses[trial] += divergence_of_logits(
                    logits, walk.logits(position, changed[position])
                )
            for trial in heads:
                with trial.model.applied(trial.option.groups, weights[trial]):
                    losses[trial] += divergence_of_logits(logits, walk.logits(position, states))
        tokens = sum(ids.numel() for ids in walk.ids)
        return {trial: total / tokens for trial, total in losses.items()}
