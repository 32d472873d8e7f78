"""Calibration text in two streams: through the source's layers, and through those rounded so far.

One decoder layer is in memory at a time. Its linear layers see what the rounded layers before them make of
the text; their weights are rounded for that, and the quantized layer, its inputs rounded as its scheme says,
makes the next layer's input. Where several recipes are tried, each has its own stream.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from vexport.calibration.attention import CachedStates, watching_attention
from vexport.calibration.capture import Captured, LayerCall, capture_layer_calls, replayed_layers
from vexport.calibration.data import Samples
from vexport.calibration.forward import make_batches
from vexport.calibration.hidden import HiddenStates
from vexport.calibration.layerwise import OnLayer
from vexport.calibration.model import build_on_meta, decoder_layers, tie_head, unload
from vexport.calibration.weights import Weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.formats.packing.base import Array
from vexport.numerics.metrics import kl_divergence
from vexport.quantize.applied import QuantizedLayer, QuantizedModel
from vexport.quantize.group_inputs import GroupInputs, Noted, Site
from vexport.quantize.round_sites import round_sites, zero_moments
from vexport.quantize.rounded_layers import RoundedLayers, Stored
from vexport.quantize.stream import quantized_group
from vexport.quantize.weight_scales import search_scales
from vexport.rounding.moments import Moments
from vexport.rounding.settings import COMPARED_ROWS, GPTQ, Recipe
from vexport.types import Calibration, FusionGroup, Plan
from vexport.types.rounding import GroupRounding, LayerRounding


@dataclass(slots=True, kw_only=True)
class Branch:
    """A recipe, its stream's hidden states between two layers, and what it rounded.

    `outside` are the quantized layers behind the decoder layers.
    """

    recipe: Recipe
    hidden: HiddenStates
    done: RoundedLayers
    outside: list[QuantizedLayer] = field(default_factory=list)
    divergence: float | None = None


def recipe_of(group: FusionGroup, site: Site, recipe: Recipe) -> Recipe:
    """The recipe of a branch, for groups that are refitted and that get the same tokens in both streams."""
    return recipe if group.rounding == "refit" and site.is_aligned else GPTQ


def _for_tokens(recipe: Recipe, group: FusionGroup, tokens: int) -> Recipe:
    """The recipe with a ridge that grows where fewer tokens than columns show a refitted group's inputs."""
    if group.rounding != "refit":
        return recipe
    return replace(recipe, ridge=recipe.ridge * max(1.0, group.members[0].in_features / tokens))


class RoundingStream:
    """Rounds the groups of a plan, decoder layer by decoder layer."""

    def __init__(
        self,
        index: SourceIndex,
        plan: Plan,
        calibration: Calibration,
        reader: Reader,
        *,
        trust_remote_code: bool,
        device: str,
    ) -> None:
        self.model = build_on_meta(index.root, trust_remote_code=trust_remote_code, device=device)
        self.name, self.layers = decoder_layers(self.model)
        self.weights = Weights(index, reader, self.model, device)
        self.quantized = QuantizedModel(index, calibration, reader, self.model, self.weights, device=device)
        self.groups = plan.groups
        self.watches_cache = bool(plan.attention)
        self.device = device

    @torch.no_grad()
    def run(
        self,
        samples: Samples,
        branches: Sequence[Branch],
        source: HiddenStates,
        on_layer: OnLayer,
        *,
        held_out: int = 0,
    ) -> None:
        """Round layer after layer in every branch; each ends with its KL over the rows held out.

        Those are the last rows, which no Moments see; at least one row is left to these.
        """
        self.batches = make_batches(samples, 1)
        self.fitted = max(1, len(self.batches) - held_out)
        self.tokens = sum(batch.ids.numel() for batch in self.batches[: self.fitted])
        refits = any(branch.recipe.strength for branch in branches)
        self.compared = len(self.batches) if refits or held_out else min(COMPARED_ROWS, len(self.batches))
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
            self._outside(captured, branches, source)
            self._judge(captured, branches, source)

    def _load(self, number: int) -> None:
        self.weights.load(self.layers[number], f"{self.name}.{number}")

    def _layer(
        self, number: int, calls: Sequence[LayerCall], branches: Sequence[Branch], source: HiddenStates
    ) -> None:
        layer, groups = self.layers[number], self._groups_of(number)
        inputs = GroupInputs(self.quantized, [group for group in groups if group.rounding != "nearest"])
        found = [branch.done.get(number) for branch in branches]
        sums = [
            None if done is not None else self._zeros(inputs, branch)
            for branch, done in zip(branches, found, strict=True)
        ]
        for position, call in enumerate(calls):
            with inputs.noted() as exact:
                if position < self.compared:
                    source[position] = call.run(layer, source[position].to(self.device))
            for branch, moments in zip(branches, sums, strict=True):
                if moments is not None and position < self.fitted:
                    states = branch.hidden[position].to(self.device)
                    with self.quantized.rounding_inputs(groups), inputs.noted() as seen:
                        call.run(layer, states)
                    self._add(inputs, seen, exact, moments)
        for branch, moments, done in zip(branches, sums, found, strict=True):
            if moments is None:
                assert done is not None
                self._advance(number, calls, groups, done, branch, source)
            else:
                stored, how = self._round(groups, branch.recipe, inputs, moments)
                error, cached = self._advance(number, calls, groups, stored, branch, source)
                ranges = {name: states.ranges() for name, states in cached.items()}
                branch.done.put(number, stored, LayerRounding(groups=how, state_error=error, cached=ranges))

    def _advance(
        self,
        number: int,
        calls: Sequence[LayerCall],
        groups: Sequence[FusionGroup],
        stored: Stored,
        branch: Branch,
        source: HiddenStates,
    ) -> tuple[float, Mapping[str, CachedStates]]:
        """Run a branch's stream through its quantized layer: |h~ - h|^2 / |h|^2 of what comes out, and what
        it would cache."""
        layer, cached, signal, noise = self.layers[number], dict[str, CachedStates](), 0.0, 0.0
        quantized = [one for group in groups for one in self.quantized.layers_of(group, stored)]
        with ExitStack() as block:
            block.enter_context(self.quantized.applied(quantized))
            if self.watches_cache:
                name = f"{self.name}.{number}"
                block.enter_context(watching_attention(layer, name, self.weights.stored_name, cached))
            for position, call in enumerate(calls):
                branch.hidden[position] = call.run(layer, branch.hidden[position].to(self.device))
                if position >= self.compared:
                    continue
                exact = source[position].to(torch.float32)
                signal += float(exact.square().sum())
                noise += float((branch.hidden[position].to(torch.float32) - exact).square().sum())
        return noise / signal if signal else 0.0, cached

    def _groups_of(self, number: int) -> list[FusionGroup]:
        """The groups of a decoder layer."""
        inside = f"{self.name}.{number}."
        return [
            group for group in self.groups if self.quantized.parameter_of(group.members[0]).startswith(inside)
        ]

    def _outside(self, captured: Captured, branches: Sequence[Branch], source: HiddenStates) -> None:
        """Round what is not in a decoder layer, an output head say, in every branch."""
        number, inside = len(self.layers), {group.name for group in self._inside()}
        groups = [group for group in self.groups if group.name not in inside]
        inputs = GroupInputs(self.quantized, [group for group in groups if group.rounding != "nearest"])
        for branch in branches if groups else ():
            stored = branch.done.get(number)
            if stored is None:
                moments = self._zeros(inputs, branch)
                for position in range(self.fitted) if inputs.sites else ():
                    with inputs.noted() as exact:
                        if position < self.compared:
                            self._logits(captured, position, source[position])
                    with self.quantized.rounding_inputs(groups), inputs.noted() as seen:
                        self._logits(captured, position, branch.hidden[position])
                    self._add(inputs, seen, exact, moments)
                stored, how = self._round(groups, branch.recipe, inputs, moments)
                branch.done.put(number, stored, LayerRounding(groups=how, state_error=0.0))
            branch.outside = [
                one
                for group in groups
                if all(self.quantized.linear(member) is not None for member in group.members)
                for one in self.quantized.layers_of(group, stored)
            ]

    def _inside(self) -> list[FusionGroup]:
        return [group for number in range(len(self.layers)) for group in self._groups_of(number)]

    def _zeros(self, inputs: GroupInputs, branch: Branch) -> dict[str, Moments]:
        return zero_moments(inputs, lambda group, site: recipe_of(group, site, branch.recipe), self.device)

    def _add(self, inputs: GroupInputs, seen: Noted, exact: Noted, sums: Mapping[str, Moments]) -> None:
        """Take in a batch of the quantized stream, through layers before their weights are rounded."""
        for site in inputs.sites:
            inputs.add(site, sums[site.name], seen, exact, text=self.tokens)

    def _round(
        self, groups: Sequence[FusionGroup], recipe: Recipe, inputs: GroupInputs, sums: Mapping[str, Moments]
    ) -> tuple[Stored, tuple[GroupRounding, ...]]:
        """The bytes that replace the weights of groups, and how each was rounded."""
        model, stored = self.quantized, dict[str, Array]()
        made, how = round_sites(
            model,
            inputs,
            sums,
            lambda group, site: _for_tokens(recipe_of(group, site, recipe), group, sums[site.name].tokens),
        )
        for group in groups:
            stored |= quantized_group(
                group,
                model.index,
                model.calibration,
                model.reader,
                search=search_scales,
                rounded=made.pop(group.name, {}),
            )
        return stored, tuple(how.values())

    def _judge(self, captured: Captured, branches: Sequence[Branch], source: HiddenStates) -> None:
        """The mean KL(source || branch), nats per token, over the rows that no Moments have seen."""
        held_out = range(self.fitted, len(self.batches))
        totals = [0.0] * len(branches)
        tokens = 0
        for position in held_out:
            expected = self._logprobs(captured, position, source[position])
            tokens += len(expected)
            for number, branch in enumerate(branches):
                with self.quantized.applied(branch.outside):
                    measured = self._logprobs(captured, position, branch.hidden[position])
                totals[number] += float(kl_divergence(expected, measured).sum())
        for branch, total in zip(branches, totals, strict=True):
            branch.divergence = total / tokens if tokens else None

    def _logprobs(self, captured: Captured, position: int, states: torch.Tensor) -> torch.Tensor:
        logits = self._logits(captured, position, states)
        return torch.log_softmax(logits.to(torch.float32), dim=-1).flatten(0, -2)

    def _logits(self, captured: Captured, position: int, states: torch.Tensor) -> torch.Tensor:
        """What the model makes of the hidden states of a batch behind the last decoder layer."""
        ids = self.batches[position].ids.to(self.device)
        with replayed_layers(self.layers, states.to(self.device), captured.rest):
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits
