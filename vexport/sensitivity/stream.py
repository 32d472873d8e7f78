"""Trials run next to the model itself, all through one decoder layer before the next is loaded.

Each trial branches off at the decoder layer whose weights it changes, from the hidden states of the model
itself. What it changes there, relative to the states' size, is its error; where it is carried on, its states
go through all further layers to the model's output, and its loss is measured there.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from vexport.calibration.capture import LayerCall, Rest, capture_layer_calls, replayed_layers
from vexport.calibration.hidden import hidden_states
from vexport.calibration.layerwise import Batch
from vexport.calibration.model import build_on_meta, decoder_layers, tie_head, unload
from vexport.calibration.products import fast_products
from vexport.calibration.weights import Weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.errors import InputError
from vexport.numerics.metrics import divergence_of_logits
from vexport.quantize.applied import QuantizedModel
from vexport.quantize.round_sites import GroupWeights
from vexport.sensitivity.trials import Trial, TrialInputs, layers_of, parameter_of
from vexport.types import Calibration

# The hidden states of a batch each.
States = list[torch.Tensor]
OnStep = Callable[[], None]


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

    def __init__(
        self,
        index: SourceIndex,
        calibration: Calibration,
        reader: Reader,
        batches: Sequence[Batch],
        *,
        trust_remote_code: bool,
        device: str,
    ) -> None:
        self.model = build_on_meta(index.root, trust_remote_code=trust_remote_code, device=device)
        self.name, self.layers = decoder_layers(self.model)
        self.ids = [batch.ids.to(device) for batch in batches]
        self.device = device
        self.weights = Weights(index, reader, self.model, device)
        self.quantized = QuantizedModel(index, calibration, reader, self.model, self.weights, device=device)
        self.weights.load_around(self.name)
        tie_head(self.model)

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
        inside = parameter.removeprefix(f"{self.name}.")
        return len(self.layers) if inside == parameter else int(inside.partition(".")[0])

    def steps(self, trials: Sequence[Trial], *, carry: bool) -> int:
        """How often `run` will report a step: a trial run through a decoder layer, or to the output."""
        last = len(self.layers)
        return sum(1 + (max(0, last - self.depth(trial) - 1) if carry else 0) for trial in trials)

    @property
    def states_bytes(self) -> int:
        """The size of the hidden states of all batches between two layers."""
        table = self.model.get_input_embeddings().weight
        size: int = sum(ids.numel() for ids in self.ids) * table.shape[-1] * table.element_size()
        return size

    @torch.no_grad()
    def run(self, trials: Sequence[Trial], *, carry: bool, on_step: OnStep) -> dict[Trial, Outcome]:
        """Run the model with and without each trial; with `carry` on to the output, where losses are."""
        outcomes = {trial: Outcome() for trial in trials}
        at: dict[int, list[Trial]] = {}
        for trial in trials:
            at.setdefault(self.depth(trial), []).append(trial)
        carried: dict[Trial, States] = {}
        self._load(0)
        with hidden_states() as first:
            captured = capture_layer_calls(self.model, self.name, self.layers, self.ids, first)
            states = [first[position].clone() for position in range(len(self.ids))]
        # compressed-tensors compiles its FP4 rounding, which would ask for a C++ compiler.
        with torch.compiler.set_stance("force_eager"), fast_products(self.layers, self.device):
            for number, layer in enumerate(self.layers):
                if number:
                    self._load(number)
                calls = captured.calls[number]
                here = at.get(number, ())
                plain, rounded = self._plain(layer, calls, states, here)
                for trial in carried:
                    carried[trial] = self._forward(layer, calls, carried[trial])
                    on_step()
                for trial in here:
                    made = self._try(
                        trial, rounded[trial].rounded(), layer, calls, states, plain, outcomes[trial]
                    )
                    if carry:
                        carried[trial] = made
                    on_step()
                unload(layer)
                states = plain
                if not carry and number >= max(at):
                    break
            if carry or len(self.layers) in at:
                self._judge(captured.rest, states, carried, at.get(len(self.layers), ()), outcomes, on_step)
        return outcomes

    def _try(
        self,
        trial: Trial,
        rounded: Mapping[str, GroupWeights],
        layer: torch.nn.Module,
        calls: Sequence[LayerCall],
        states: States,
        plain: States,
        outcome: Outcome,
    ) -> States:
        """The states after the layer with the trial in it; its errors go to `outcome`."""
        quantized = layers_of(self.quantized, trial, rounded)
        with self.quantized.applied(quantized):
            made = self._forward(layer, calls, states)
        outcome.error = relative_error(plain, made)
        if len(quantized) == 1:
            outcome.layers = {quantized[0].member.name: outcome.error}
        elif len(trial.option.groups) == 1:
            for one in quantized:
                with self.quantized.applied((one,)):
                    alone = self._forward(layer, calls, states)
                outcome.layers[one.member.name] = relative_error(plain, alone)
        return made

    def _plain(
        self, layer: torch.nn.Module, calls: Sequence[LayerCall], states: States, trials: Sequence[Trial]
    ) -> tuple[States, Mapping[Trial, TrialInputs]]:
        """The states after the layer as it is, and what entered the layers that trials round by text."""
        inputs = self._inputs(trials)
        after = []
        for call, one in zip(calls, states, strict=True):
            with ExitStack() as block:
                noted = {trial: block.enter_context(own.inputs.noted()) for trial, own in inputs.items()}
                after.append(call.run(layer, one.to(self.device)).to("cpu"))
            for trial, own in inputs.items():
                own.add(noted[trial])
        return after, inputs

    def _inputs(self, trials: Sequence[Trial]) -> dict[Trial, TrialInputs]:
        tokens = sum(ids.numel() for ids in self.ids)
        return {
            trial: TrialInputs(self.quantized, trial, tokens=tokens, device=self.device) for trial in trials
        }

    def _forward(self, layer: torch.nn.Module, calls: Sequence[LayerCall], states: States) -> States:
        return [
            call.run(layer, one.to(self.device)).to("cpu") for call, one in zip(calls, states, strict=True)
        ]

    def _judge(
        self,
        rest: Rest,
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
                self._logits(position, one, rest)
            for trial, own in inputs.items():
                own.add(noted[trial])
        quantized = {trial: layers_of(self.quantized, trial, own.rounded()) for trial, own in inputs.items()}
        for position, one in enumerate(states):
            plain = self._logits(position, one, rest)
            for trial, after in carried.items():
                losses[trial] += divergence_of_logits(plain, self._logits(position, after[position], rest))
            for trial, layers in quantized.items():
                with self.quantized.applied(layers):
                    losses[trial] += divergence_of_logits(plain, self._logits(position, one, rest))
        tokens = sum(ids.numel() for ids in self.ids)
        for trial, total in losses.items():
            outcomes[trial].loss = total / tokens
        for _ in heads:
            on_step()

    def _logits(self, position: int, states: torch.Tensor, rest: Rest) -> torch.Tensor:
        """Logits at every position of a batch, (1, tokens, vocabulary)."""
        with replayed_layers(self.layers, states.to(self.device), rest):
            logits: torch.Tensor = self.model(input_ids=self.ids[position], use_cache=False).logits
        return logits

    def _load(self, number: int) -> None:
        self.weights.load(self.layers[number], f"{self.name}.{number}")


def relative_error(plain: States, changed: States) -> float:
    """Mean over tokens of |changed - plain|^2 / |plain|^2."""
    total, tokens = 0.0, 0
    for old, new in zip(plain, changed, strict=True):
        exact = old.to(torch.float32)
        noise = (new.to(torch.float32) - exact).square().sum(-1)
        total += float((noise / exact.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)).sum())
        tokens += noise.numel()
    return total / tokens
