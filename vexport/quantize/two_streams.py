"""Calibration text in two streams: through the source's layers, and through those rounded so far.

One decoder layer is in memory at a time. Its linear layers see what the rounded layers before them make of
the text; their weights are rounded for that, and the quantized layer, its inputs rounded as its scheme says,
makes the next layer's input. Where several recipes are tried, each has its own stream.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from vexport.calibration.capture import Captured, LayerCall, capture_layer_calls, replayed_layers
from vexport.calibration.data import Samples
from vexport.calibration.forward import make_batches
from vexport.calibration.hidden import HiddenStates
from vexport.calibration.layerwise import OnLayer
from vexport.calibration.model import build_on_meta, decoder_layers, tie_head, unload
from vexport.calibration.weights import Weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_weight
from vexport.formats.packing.base import Array, RoundedWeight
from vexport.numerics.metrics import kl_divergence
from vexport.quantize.applied import QuantizedModel
from vexport.quantize.round_group import round_group
from vexport.quantize.rounded_layers import RoundedLayers, Stored
from vexport.quantize.stream import quantized_group
from vexport.quantize.weight_scales import search_scales
from vexport.rounding.moments import Moments
from vexport.rounding.settings import GPTQ, Recipe
from vexport.types import Calibration, FusionGroup, Plan
from vexport.types.rounding import GroupRounding, LayerRounding

# Inputs of groups by the group's name.
Inputs = Mapping[str, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Branch:
    """A recipe, its stream's hidden states between two layers, and what it rounded."""

    recipe: Recipe
    hidden: HiddenStates
    done: RoundedLayers
    divergence: float | None = None


def recipe_of(group: FusionGroup, recipe: Recipe) -> Recipe:
    """The recipe of a branch, for the groups that are refitted."""
    return recipe if group.rounding == "refit" else GPTQ


class RoundingStream:
    """Rounds the groups of a plan, decoder layer by decoder layer."""

    def __init__(
        self,
        index: SourceIndex,
        plan: Plan,
        calibration: Calibration,
        samples: Samples,
        reader: Reader,
        *,
        held_out: int,
        trust_remote_code: bool,
        device: str,
    ) -> None:
        self.model = build_on_meta(index.root, trust_remote_code=trust_remote_code, device=device)
        self.name, self.layers = decoder_layers(self.model)
        self.weights = Weights(index, reader, self.model, device)
        self.quantized = QuantizedModel(index, calibration, reader, self.model, self.weights, device=device)
        self.groups = plan.groups
        self.batches = make_batches(samples, 1)
        self.fitted = len(self.batches) - held_out
        self.device = device

    @torch.no_grad()
    def run(self, branches: Sequence[Branch], source: HiddenStates, on_layer: OnLayer) -> None:
        """Round layer after layer in every branch; each ends with its KL over the rows held out."""
        self.weights.load_around(self.name)
        tie_head(self.model)
        self._load(0)
        ids = [batch.ids.to(self.device) for batch in self.batches]
        captured = capture_layer_calls(self.model, self.name, self.layers, ids, source)
        for branch in branches:
            for position in range(len(source)):
                branch.hidden.append(source[position])
        # compressed-tensors compiles its FP4 rounding, which would ask for a C++ compiler.
        with torch.compiler.set_stance("force_eager"):
            for number, layer in enumerate(self.layers):
                if number:
                    self._load(number)
                self._layer(number, captured.calls[number], branches, source)
                unload(layer)
                on_layer(number + 1, len(self.layers))
            self._judge(captured, branches, source)

    def _load(self, number: int) -> None:
        self.weights.load(self.layers[number], f"{self.name}.{number}")

    def _layer(
        self, number: int, calls: Sequence[LayerCall], branches: Sequence[Branch], source: HiddenStates
    ) -> None:
        layer, groups = self.layers[number], self._groups_of(number)
        rounded = [group for group in groups if self._is_rounded(group)]
        found = [branch.done.get(number) for branch in branches]
        sums = [
            None if done is not None else self._zeros(rounded, branch)
            for branch, done in zip(branches, found, strict=True)
        ]
        for position, call in enumerate(calls):
            with self._inputs_of(rounded) as seen:
                source[position] = call.run(layer, source[position].to(self.device))
            inputs = dict(seen)
            for branch, moments in zip(branches, sums, strict=True):
                if moments is not None and position < self.fitted:
                    self._add(layer, call, rounded, branch.hidden[position], inputs, moments)
        for branch, moments, done in zip(branches, sums, found, strict=True):
            if moments is None:
                assert done is not None
                self._advance(layer, calls, groups, done, branch, source)
            else:
                stored, how = self._round(groups, branch.recipe, moments)
                error = self._advance(layer, calls, groups, stored, branch, source)
                branch.done.put(number, stored, LayerRounding(groups=how, state_error=error))

    def _advance(
        self,
        layer: torch.nn.Module,
        calls: Sequence[LayerCall],
        groups: Sequence[FusionGroup],
        stored: Stored,
        branch: Branch,
        source: HiddenStates,
    ) -> float:
        """Run a branch's stream through its quantized layer; |h~ - h|^2 / |h|^2 of what comes out."""
        signal, noise = 0.0, 0.0
        quantized = [one for group in groups for one in self.quantized.layers_of(group, stored)]
        with self.quantized.applied(quantized):
            for position, call in enumerate(calls):
                branch.hidden[position] = call.run(layer, branch.hidden[position].to(self.device))
                exact = source[position].to(torch.float32)
                signal += float(exact.square().sum())
                noise += float((branch.hidden[position].to(torch.float32) - exact).square().sum())
        return noise / signal if signal else 0.0

    def _groups_of(self, number: int) -> list[FusionGroup]:
        """The groups of a decoder layer."""
        inside = f"{self.name}.{number}."
        return [
            group for group in self.groups if self.quantized.parameter_of(group.members[0]).startswith(inside)
        ]

    def _is_rounded(self, group: FusionGroup) -> bool:
        """Whether calibration text decides how a group is rounded: its layers are linear modules."""
        linear = all(self.quantized.linear(member) is not None for member in group.members)
        return group.rounding != "nearest" and linear

    def _zeros(self, groups: Sequence[FusionGroup], branch: Branch) -> dict[str, Moments]:
        return {
            group.name: Moments.zeros(
                group.members[0].in_features,
                cross=recipe_of(group, branch.recipe).strength > 0,
                device=self.device,
            )
            for group in groups
        }

    @contextmanager
    def _inputs_of(self, groups: Sequence[FusionGroup]) -> Iterator[Inputs]:
        """Within the block the input of each group is noted, before anything rounds it."""
        seen: dict[str, torch.Tensor] = {}
        with ExitStack() as block:
            for group in groups:
                module = self.quantized.linear(group.members[0])
                assert module is not None

                def note(
                    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], name: str = group.name
                ) -> None:
                    seen[name] = inputs[0]

                block.callback(module.register_forward_pre_hook(note, prepend=True).remove)
            yield seen

    def _add(
        self,
        layer: torch.nn.Module,
        call: LayerCall,
        groups: Sequence[FusionGroup],
        states: torch.Tensor,
        source: Inputs,
        sums: Mapping[str, Moments],
    ) -> None:
        """Take in a batch of the quantized stream, through the layer before its weights are rounded."""
        with self.quantized.rounding_inputs(groups), self._inputs_of(groups) as seen:
            call.run(layer, states.to(self.device))
        for group in groups:
            rounded = self.quantized.rounded_input(group, seen[group.name])
            sums[group.name].add(rounded, source[group.name])

    def _round(
        self, groups: Sequence[FusionGroup], recipe: Recipe, sums: Mapping[str, Moments]
    ) -> tuple[Stored, tuple[GroupRounding, ...]]:
        """The bytes that replace the weights of a decoder layer's groups, and how each was rounded."""
        model, stored, how = self.quantized, dict[str, Array](), list[GroupRounding]()
        for group in groups:
            rounded: Mapping[str, RoundedWeight] = {}
            if group.name in sums:
                weights = [
                    read_weight(model.reader, model.index.tensors[member.weight], member.part)
                    for member in group.members
                ]
                moments, own = sums[group.name], recipe_of(group, recipe)
                rounded, told = round_group(group, weights, moments, own, model.index)
                how.append(told)
            elif group.rounding != "nearest":
                reason = "its layers are no linear modules of the model"
                how.append(GroupRounding(name=group.name, fallback=reason))
            stored |= quantized_group(
                group, model.index, model.calibration, model.reader, search=search_scales, rounded=rounded
            )
        return stored, tuple(how)

    def _judge(self, captured: Captured, branches: Sequence[Branch], source: HiddenStates) -> None:
        """The mean KL(source || branch), nats per token, over the rows that no Moments have seen."""
        held_out = range(self.fitted, len(self.batches))
        totals = [0.0] * len(branches)
        tokens = 0
        for position in held_out:
            expected = self._logprobs(captured, position, source[position])
            tokens += len(expected)
            for number, branch in enumerate(branches):
                measured = self._logprobs(captured, position, branch.hidden[position])
                totals[number] += float(kl_divergence(expected, measured).sum())
        for branch, total in zip(branches, totals, strict=True):
            branch.divergence = total / tokens if tokens else None

    def _logprobs(self, captured: Captured, position: int, states: torch.Tensor) -> torch.Tensor:
        ids = self.batches[position].ids.to(self.device)
        with replayed_layers(self.layers, states.to(self.device), captured.rest):
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return torch.log_softmax(logits.to(torch.float32), dim=-1).flatten(0, -2)
