"""Measure the loss of each layer group in each possible scheme, with all other layers unquantized.

A trial is the model with one layer group in another scheme. All trials and the unchanged model run
through a decoder layer before the next layer is loaded. A trial starts with the unchanged model's
hidden states, at the layer that it changes. Its loss is measured at the output of the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vexport.calibration.attention import causal_attention
from vexport.calibration.data import Samples
from vexport.calibration.inputs import GroupInputs, RecordedInputs, Value, counted_rows
from vexport.calibration.walk import Layer, LayerWalk
from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.files import digest_bytes, from_json, to_json, write_text
from vexport.numerics.metrics import divergence_of_logits
from vexport.quantize.group_rounding import round_sites
from vexport.quantize.input_moments import InputMoments
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
from vexport.rules.auto import UNMEASURABLE

# Maximum number of bytes of the hidden states of trials that run at the same time.
MEMORY_BYTES = 2**31
# Maximum number of trials that run at the same time. Results are written after they have finished.
MAX_TRIALS = 64

# The hidden states of all rows.
States = list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLosses:
    """KL(source || trial) in nats per token, by layer group and scheme.

    `inputs` is a digest of everything that the losses depend on.
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
    """Measure the loss of every option of the layer groups on the samples.

    Options are skipped if `file` has their losses from an earlier call with the same arguments.
    Raises InputError for a model that cannot run layer by layer, a layer group that text cannot
    reach, and an unusable device.
    """
    inputs = digest_bytes(repr((layer_groups, calibration, samples)).encode())
    losses: dict[str, dict[str, float]] = {}
    if file.is_file() and (known := from_json(TrialLosses, file)).inputs == inputs:
        losses = {name: dict(schemes) for name, schemes in known.losses.items()}
    walk = LayerWalk(index, trust_remote_code=trust_remote_code, device=device)
    stage = "measure sensitivity (layers)"
    text = walk.start(samples, calibration.smoothing, stage=stage, on_progress=on_progress)
    with causal_attention(walk.device), text as hidden:
        model = QuantizedModel(walk, calibration)
        trials = _trials(model, walk, layer_groups, losses)
        size = sum(hidden[index].nbytes for index in range(len(hidden)))
        most = min(MAX_TRIALS, max(1, MEMORY_BYTES // size))
        parts = [trials[start : start + most] for start in range(0, len(trials), most)]
        # Trials of the head come last in a part.
        heads = [part for part in parts if part[-1].depth == len(walk.layers)]
        walk.expect_steps(len(parts) * len(walk.layers) + len(heads))
        for part in parts:
            # Every part starts from the inputs of the first layer.
            stream = StatesInMemory([hidden[index] for index in range(len(hidden))])
            watcher = TrialWatcher(walk, part, stream)
            walk.forward(stream, watcher)
            if watcher.tries_head:
                walk.run_head(stream, watcher)
            for trial, loss in watcher.losses().items():
                losses.setdefault(trial.group, {})[trial.option.scheme] = loss
            write_text(file, to_json(TrialLosses(inputs=inputs, losses=losses)))
    return GroupSensitivities(
        samples=len(samples.rows),
        tokens=samples.counted_tokens,
        groups=tuple(_sensitivity(group, losses[group.name]) for group in layer_groups),
    )


def _trials(
    model: QuantizedModel,
    walk: LayerWalk,
    layer_groups: Sequence[LayerGroup],
    known: Mapping[str, Mapping[str, float]],
) -> list["Trial"]:
    trials: list[Trial] = []
    for layer_group in layer_groups:
        for option in layer_group.options:
            if option.scheme not in known.get(layer_group.name, {}):
                trials.append(Trial(model, walk, layer_group, option))
    return sorted(trials, key=lambda trial: trial.depth)


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
    """Trial of an option: the model with a single quantized layer group.

    No earlier layer is quantized, so a refit has no errors to correct and equals GPTQ. `depth` is
    the number of the decoder layer that the trial changes, or the number of layers for the output
    head. Raises InputError if the text model does not use the layer group's weights.
    """

    def __init__(
        self, model: QuantizedModel, walk: LayerWalk, group: LayerGroup, option: Option
    ) -> None:
        self.group = group.name
        self.option = option
        self.model = model
        self._walk = walk
        if not model.places.parameter_of(option.groups[0].members[0]):
            raise InputError.of(UNMEASURABLE, group.name)
        self.depth = model.places.layer_of(option.groups[0])

    def begin(self) -> None:
        """Prepare the trial for the rows of text."""
        tokens = self._walk.counted_tokens
        groups = [group for group in self.option.groups if group.rounding != "nearest"]
        self.inputs = GroupInputs(self.model.places, groups)
        self._moments = InputMoments(self.model, self.inputs, total_tokens=tokens, no_refit=True)

    def add(self, index: int, inputs: RecordedInputs) -> None:
        """Add the inputs of a row, for the layers that are rounded by text."""
        self._moments.add(inputs, inputs, self._walk.counted_of(index))

    def weights(self) -> dict[LinearPlan, torch.Tensor]:
        """Return the weights as compressed-tensors dequantizes the bytes that would be stored.

        Raises InputError if a weight is not finite.
        """
        model = self.model
        weights = dict[LinearPlan, torch.Tensor]()
        rounded, _ = round_sites(model, self._moments, self.inputs.sites)
        for group in self.option.groups:
            known = rounded.get(group.name, {})
            stored = quantized_group(group, model.index, model.calibration, model.reader, known)
            weights |= model.weights_of(group, stored)
        del self._moments, self.inputs
        return weights


class StatesInMemory:
    """Hidden states in main memory.

    New states of a row are stored as a new tensor, so the old tensor stays valid.
    """

    def __init__(self, states: States) -> None:
        self._states = states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._states[index]

    def __setitem__(self, index: int, states: torch.Tensor) -> None:
        self._states[index] = states.to("cpu")


class TrialWatcher:
    """Runs each trial next to the unchanged model, beginning with the layer that it changes."""

    def __init__(self, walk: LayerWalk, trials: Sequence[Trial], stream: StatesInMemory) -> None:
        self._walk = walk
        self._trials = trials
        self._stream = stream
        # The hidden states of the trials whose changed layer has already run.
        self._changed: dict[Trial, States] = {}
        # Weights of the trials that change the head.
        self._heads: dict[Trial, dict[LinearPlan, torch.Tensor]] = {}

    @property
    def tries_head(self) -> bool:
        """Return True if a trial changes the model's head."""
        return any(trial.depth == len(self._walk.layers) for trial in self._trials)

    def enter(self, layer: Layer) -> None:
        """Begin the trials that change a layer, and record the inputs that they need to round the
        layer.
        """
        self._here = [trial for trial in self._trials if trial.depth == layer.number]
        self._layer_inputs = [self._stream[index] for index in range(len(self._stream))]
        self._recorded: list[dict[str, Value]] = []
        for trial in self._here:
            trial.begin()
            self._recorded.append(layer.watching.enter_context(trial.inputs.recorded()))

    def row(self, index: int, hidden: torch.Tensor) -> None:
        """Add the inputs of a row to the trials that change the layer."""
        for trial, inputs in zip(self._here, self._recorded, strict=True):
            trial.add(index, inputs)
            inputs.clear()

    def leave(self, layer: Layer) -> None:
        """Run all trials that have begun through a layer."""
        if layer.is_head:
            self._heads = {trial: trial.weights() for trial in self._here}
            return
        for trial, states in self._changed.items():
            self._changed[trial] = self._run_rows(layer, states)
        for trial in self._here:
            with trial.model.apply_groups(trial.option.groups, trial.weights()):
                self._changed[trial] = self._run_rows(layer, self._layer_inputs)

    def _run_rows(self, layer: Layer, states: States) -> States:
        made = StatesInMemory(list(states))
        for index, row in enumerate(states):
            self._walk.replace(made, index, self._walk.run_row(layer, index, row))
        self._walk.settle()
        return [made[index] for index in range(len(made))]

    def losses(self) -> dict[Trial, float]:
        """Return the mean KL of each trial over all counted tokens, after the walk."""

        def logits_of(index: int, states: torch.Tensor) -> torch.Tensor:
            logits = self._walk.logits(index, states)
            return counted_rows(logits, self._walk.counted_of(index), "")

        losses = dict.fromkeys(self._trials, 0.0)
        for index in range(len(self._stream)):
            states = self._stream[index]
            logits = logits_of(index, states)
            for trial, changed in self._changed.items():
                losses[trial] += divergence_of_logits(logits, logits_of(index, changed[index]))
            for trial, weights in self._heads.items():
                with trial.model.apply_groups(trial.option.groups, weights):
                    losses[trial] += divergence_of_logits(logits, logits_of(index, states))
        tokens = self._walk.counted_tokens
        return {trial: total / tokens for trial, total in losses.items()}
