"""Trials run next to the model itself, all through one decoder layer before the next is loaded.

Each trial branches off at the decoder layer whose weights it changes, from the hidden states of the model
itself. What it changes there, relative to the states' size, is its error; where it is carried on, its states
go through all further layers to the model's output, and its loss is measured there.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from vexport.calibration.capture import hidden_states
from vexport.calibration.inputs import GroupInputs, Noted
from vexport.calibration.walk import Layer, LayerWalk
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.errors import InputError
from vexport.numerics.metrics import divergence_of_logits
from vexport.quantize.model import QuantizedLayer, QuantizedModel
from vexport.quantize.round_sites import GroupWeights, SiteSums
from vexport.quantize.stream import quantized_group
from vexport.quantize.weight_scales import search_scales
from vexport.sensitivity.layer_groups import Option
from vexport.types import Calibration

# The hidden states of a batch each.
States = list[torch.Tensor]
OnStep = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """A layer group in one scheme."""

    unit: str
    option: Option


class TrialInputs:
    """What enters the layers that a trial rounds by its text.

    Nothing before the trial is quantized: a refit has no errors of earlier layers to correct and comes to
    GPTQ for inputs that the trial's own scheme rounds, which is what is done.
    """

    def __init__(self, model: QuantizedModel, trial: Trial, *, tokens: int, device: str) -> None:
        groups = [group for group in trial.option.groups if group.rounding != "nearest"]
        self.inputs = GroupInputs(model.places, groups)
        self._sums = SiteSums(model, self.inputs, {}, text=tokens, device=device, plain=True)

    def add(self, noted: Noted) -> None:
        """Take in a batch that went through the layers."""
        self._sums.add(noted, noted)

    def rounded(self) -> Mapping[str, GroupWeights]:
        """The rounded weights by group."""
        return self._sums.rounded(self.inputs.sites)[0]


def layers_of(
    model: QuantizedModel, trial: Trial, rounded: Mapping[str, GroupWeights]
) -> Sequence[QuantizedLayer]:
    """The trial's layers as compressed-tensors dequantizes what would be stored.

    `rounded` has the weights, by group, that are not rounded to nearest. Raises InputError where a weight is
    not finite.
    """
    layers = list[QuantizedLayer]()
    for group in trial.option.groups:
        stored = quantized_group(
            group,
            model.index,
            model.calibration,
            model.reader,
            search=search_scales,
            rounded=rounded.get(group.name, {}),
        )
        layers.extend(model.layers_of(group, stored))
    return layers


def parameter_of(model: QuantizedModel, trial: Trial) -> str:
    """The name of a parameter that the trial changes; empty where the model has none of them."""
    return model.places.parameter_of(trial.option.groups[0].members[0])


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a trial did: its relative squared error after its own decoder layer, that of each of its linear
    layers alone, and KL(source || trial) in nats per token where it was carried to the output.

    Outside the decoder layers, in an output head, there is no such error.
    """

    error: float = 0.0
    layers: dict[str, float] = field(default_factory=dict)
    loss: float | None = None


class TrialStream:
    """A model that is filled layer by layer, and the trials of its groups."""

    def __init__(self, walk: LayerWalk, index: SourceIndex, calibration: Calibration, reader: Reader) -> None:
        self.walk = walk
        self.quantized = QuantizedModel(
            index, calibration, reader, walk.model, walk.weights, device=walk.device
        )
        self.tokens = sum(ids.numel() for ids in walk.ids)

    def depth(self, trial: Trial) -> int:
        """The number of the decoder layer that a trial changes, that of layers where it is the output head.

        InputError where the text model has none of its weights.
        """
        parameter = parameter_of(self.quantized, trial)
        if not parameter:
            raise InputError(
                trial.unit,
                got="weights that the text model does not run",
                need="a layer whose loss text can show",
                fix="give it a rule with its own scheme and leave out `sensitivity`, or keep it",
            )
        inside = parameter.removeprefix(f"{self.walk.name}.")
        return len(self.walk.layers) if inside == parameter else int(inside.partition(".")[0])

    def steps(self, trials: Sequence[Trial], *, carry: bool) -> int:
        """How often `run` will report a step: a trial run through a decoder layer, or to the output."""
        last = len(self.walk.layers)
        return sum(1 + (max(0, last - self.depth(trial) - 1) if carry else 0) for trial in trials)

    @property
    def states_bytes(self) -> int:
        """The size of the hidden states of all batches between two layers."""
        table = self.walk.model.get_input_embeddings().weight
        size: int = self.tokens * table.shape[-1] * table.element_size()
        return size

    @torch.no_grad()
    def run(self, trials: Sequence[Trial], *, carry: bool, on_step: OnStep) -> dict[Trial, Outcome]:
        """Run the model with and without each trial; with `carry` on to the output, where losses are."""
        outcomes = {trial: Outcome() for trial in trials}
        at: dict[int, list[Trial]] = {}
        for trial in trials:
            at.setdefault(self.depth(trial), []).append(trial)
        carried: dict[Trial, States] = {}
        with hidden_states() as first:
            self.walk.begin(first)
            states = [first[position].clone() for position in range(len(self.walk.ids))]

        def visit(layer: Layer) -> None:
            here = at.get(layer.number, ())
            plain, rounded = self._plain(layer, states, here)
            for trial in carried:
                carried[trial] = self._forward(layer, carried[trial])
                on_step()
            for trial in here:
                made = self._try(trial, rounded[trial].rounded(), layer, states, plain, outcomes[trial])
                if carry:
                    carried[trial] = made
                on_step()
            states[:] = plain

        self.walk.forward(visit, lambda done, total: None, last=None if carry else max(at))
        if carry or len(self.walk.layers) in at:
            self._judge(states, carried, at.get(len(self.walk.layers), ()), outcomes, on_step)
        return outcomes

    def _try(
        self,
        trial: Trial,
        rounded: Mapping[str, GroupWeights],
        layer: Layer,
        states: States,
        plain: States,
        outcome: Outcome,
    ) -> States:
        """The states after the layer with the trial in it; its errors go to `outcome`."""
        quantized = layers_of(self.quantized, trial, rounded)
        with self.quantized.applied(quantized):
            made = self._forward(layer, states)
        outcome.error = relative_error(plain, made)
        if len(quantized) == 1:
            outcome.layers = {quantized[0].member.name: outcome.error}
        elif len(trial.option.groups) == 1:
            for one in quantized:
                with self.quantized.applied((one,)):
                    alone = self._forward(layer, states)
                outcome.layers[one.member.name] = relative_error(plain, alone)
        return made

    def _plain(
        self, layer: Layer, states: States, trials: Sequence[Trial]
    ) -> tuple[States, Mapping[Trial, TrialInputs]]:
        """The states after the layer as it is, and what entered the layers that trials round by text."""
        inputs = self._inputs(trials)
        after = []
        for position, one in enumerate(states):
            with ExitStack() as block:
                noted = {trial: block.enter_context(own.inputs.noted()) for trial, own in inputs.items()}
                after.append(layer.run(position, one.to(self.walk.device)).to("cpu"))
            for trial, own in inputs.items():
                own.add(noted[trial])
        return after, inputs

    def _inputs(self, trials: Sequence[Trial]) -> dict[Trial, TrialInputs]:
        device = self.walk.device
        return {
            trial: TrialInputs(self.quantized, trial, tokens=self.tokens, device=device) for trial in trials
        }

    def _forward(self, layer: Layer, states: States) -> States:
        return [
            layer.run(position, one.to(self.walk.device)).to("cpu") for position, one in enumerate(states)
        ]

    def _judge(
        self,
        states: States,
        carried: Mapping[Trial, States],
        heads: Sequence[Trial],
        outcomes: Mapping[Trial, Outcome],
        on_step: OnStep,
    ) -> None:
        """The mean loss of each trial at the model's output, over all positions."""
        losses = dict.fromkeys([*carried, *heads], 0.0)
        inputs = self._inputs(heads)
        for position, one in enumerate(states) if heads else ():
            with ExitStack() as block:
                noted = {trial: block.enter_context(own.inputs.noted()) for trial, own in inputs.items()}
                self.walk.logits(position, one)
            for trial, own in inputs.items():
                own.add(noted[trial])
        quantized = {trial: layers_of(self.quantized, trial, own.rounded()) for trial, own in inputs.items()}
        for position, one in enumerate(states):
            plain = self.walk.logits(position, one)
            for trial, after in carried.items():
                losses[trial] += divergence_of_logits(plain, self.walk.logits(position, after[position]))
            for trial, layers in quantized.items():
                with self.quantized.applied(layers):
                    losses[trial] += divergence_of_logits(plain, self.walk.logits(position, one))
        for trial, total in losses.items():
            outcomes[trial].loss = total / self.tokens
        for _ in heads:
            on_step()


def relative_error(plain: States, changed: States) -> float:
    """Mean over tokens of |changed - plain|^2 / |plain|^2."""
    total, tokens = 0.0, 0
    for old, new in zip(plain, changed, strict=True):
        exact = old.to(torch.float32)
        noise = (new.to(torch.float32) - exact).square().sum(-1)
        total += float((noise / exact.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)).sum())
        tokens += noise.numel()
    return total / tokens
