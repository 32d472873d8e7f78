"""Calibration text in two streams: through the source's layers, and through those rounded so far.

One decoder layer is in memory at a time. Its linear layers see what the rounded layers before them make of
the text; their weights are rounded for that, and the quantized layer, its inputs rounded as its scheme says,
makes the next layer's input. Where several recipes are tried, each has its own stream.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from vexport.calibration.capture import LayerCall, capture_layer_calls
from vexport.calibration.data import Samples
from vexport.calibration.forward import make_batches
from vexport.calibration.hidden import HiddenStates
from vexport.calibration.layerwise import OnLayer
from vexport.calibration.model import build_on_meta, decoder_layers, tie_head, unload
from vexport.calibration.products import fast_products
from vexport.calibration.token_weights import EQUAL, TokenWeights
from vexport.calibration.weights import Weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.numerics.ranks import on_first, rank_and_size
from vexport.quantize.applied import QuantizedModel
from vexport.quantize.group_inputs import GroupInputs, Value
from vexport.quantize.judge import Head, judge
from vexport.quantize.layer_sums import LayerSums
from vexport.quantize.passage import Branch, Passage
from vexport.quantize.round_in_order import round_in_order
from vexport.quantize.rounded_layers import Stored
from vexport.quantize.text_rows import TextRows
from vexport.quantize.waiting_rows import WaitingRows
from vexport.rounding.settings import COMPARED_ROWS, most_waiting, waiting_bytes
from vexport.types import Calibration, FusionGroup, Plan
from vexport.types.rounding import GroupRounding, LayerRounding, is_refit

Rounded = tuple[Stored, tuple[GroupRounding, ...]]
# Rounds a layer in the branch of this number, whose stream goes through it.
RoundLayer = Callable[[int, Passage], Rounded]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Groups of one layer, their inputs, and by number the branches in which they are not rounded yet.

    `follow` runs a row, by its position among this rank's, in the source's stream, `run` in a branch's.
    """

    groups: Sequence[FusionGroup]
    inputs: GroupInputs
    branches: Mapping[int, Branch]
    follow: Callable[[int], None]
    run: Callable[[int, torch.Tensor], None]


class RoundingStream:
    """Rounds the groups of a plan, decoder layer by decoder layer; its texts have at most so many tokens."""

    def __init__(
        self,
        index: SourceIndex,
        plan: Plan,
        calibration: Calibration,
        reader: Reader,
        *,
        tokens: int,
        trust_remote_code: bool,
        device: str,
    ) -> None:
        self.model = build_on_meta(index.root, trust_remote_code=trust_remote_code, device=device)
        self.name, self.layers = decoder_layers(self.model)
        self.weights = Weights(index, reader, self.model, device)
        self.quantized = QuantizedModel(index, calibration, reader, self.model, self.weights, device=device)
        self.groups = plan.groups
        self.tokens = tokens
        self.most_waiting = on_first(most_waiting)
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
        token_weights: TokenWeights = EQUAL,
    ) -> None:
        """Round layer after layer in every branch; each ends with its KL over the rows held out.

        Those are the last rows, which no Moments see; at least one row is left to these.
        """
        self.batches, self.token_weights = make_batches(samples, 1), token_weights
        refits = any(branch.recipe.strength for branch in branches)
        self.rows = TextRows(
            lengths=[batch.ids.numel() for batch in self.batches],
            fitted=max(1, len(self.batches) - held_out),
            compared=len(self.batches) if refits or held_out else min(COMPARED_ROWS, len(self.batches)),
        )
        self.weights.load_around(self.name)
        tie_head(self.model)
        self._load(0)
        ids = [self.batches[row].ids.to(self.device) for row in self.rows.own]
        captured = capture_layer_calls(self.model, self.name, self.layers, ids, source)
        for branch in branches:
            for position in range(len(source)):
                branch.hidden.append(source[position])
        # compressed-tensors compiles its FP4 rounding, which would ask for a C++ compiler.
        with torch.compiler.set_stance("force_eager"), fast_products(self.layers, self.device):
            for number, layer in enumerate(self.layers):
                if number:
                    self._load(number)
                self._layer(number, captured.calls[number], branches, source)
                unload(layer)
                on_layer(number + 1, len(self.layers))
            head = Head(self.model, self.layers, captured.rest, ids, self.device)
            self._outside(head, branches, source)
            judge(head, self.quantized, self.rows, branches, source)

    def _load(self, number: int) -> None:
        self.weights.load(self.layers[number], f"{self.name}.{number}")

    def _layer(
        self, number: int, calls: Sequence[LayerCall], branches: Sequence[Branch], source: HiddenStates
    ) -> None:
        layer, groups = self.layers[number], self._groups_of(number)
        inputs = self._inputs(groups)
        found = on_first(lambda: [branch.done.get(number) for branch in branches])

        def follow(position: int) -> None:
            source[position] = calls[position].run(layer, source[position].to(self.device))

        def run(position: int, states: torch.Tensor) -> None:
            calls[position].run(layer, states.to(self.device))

        begun = {place: branches[place] for place, done in enumerate(found) if done is None}
        pending = Pending(groups=groups, inputs=inputs, branches=begun, follow=follow, run=run)
        round_layer = self._in_order(pending) if self._fits(inputs) else self._at_once(pending)
        for place, (branch, done) in enumerate(zip(branches, found, strict=True)):
            passage = self._passage(number, calls, branch, source)
            if done is not None:
                self._pass(groups, done, passage)
                continue
            stored, how = round_layer(place, passage)
            error, ranges = passage.outcome()
            self._put(branch, number, stored, LayerRounding(groups=how, state_error=error, cached=ranges))

    def _in_order(self, pending: Pending) -> RoundLayer:
        """Each row runs once, and waits in front of what is not rounded yet."""
        exact = self._follow(pending)

        def round_layer(place: int, passage: Passage) -> Rounded:
            # The last branch lets go of what it has used.
            is_last = place == max(pending.branches)
            used = exact if is_last else [dict(row) for row in exact]
            rows = WaitingRows([partial(passage.run, position) for position in range(len(self.rows.own))])
            sums_of = partial(self._sums, branch=pending.branches[place])
            with self._watched(passage):
                return round_in_order(self.quantized, pending.groups, pending.inputs, rows, used, sums_of)

        return round_layer

    def _at_once(self, pending: Pending) -> RoundLayer:
        """Each row runs before and after all of the layer is rounded."""
        sums = self._sums_of(pending)
        self._take_in(pending, sums)
        for position, row in enumerate(self.rows.own):
            if self.rows.fitted <= row < self.rows.compared:
                pending.follow(position)

        def round_layer(place: int, passage: Passage) -> Rounded:
            stored, how = sums[place].round(self.quantized, pending.groups)
            self._pass(pending.groups, stored, passage)
            return stored, how

        return round_layer

    def _fits(self, inputs: GroupInputs) -> bool:
        """Whether all rows of the text, those of all ranks, can wait in a layer at once."""
        columns = [site.columns for site in inputs.sites if site.expert is None]
        refits = any(is_refit(group.rounding) for group in self.groups)
        return waiting_bytes(columns, self.tokens, refits=refits) <= self.most_waiting

    def _follow(self, pending: Pending) -> list[dict[str, Value]]:
        """Run this rank's rows in the source's stream: what entered of those fitted, for a refit."""
        refits = any(branch.recipe.strength for branch in pending.branches.values())
        noted = []
        for position, row in enumerate(self.rows.own):
            with pending.inputs.noted() as exact:
                if row < self.rows.compared:
                    pending.follow(position)
            noted.append(exact if refits and row < self.rows.fitted else {})
        return noted[: len(self.rows.own_fitted)]

    def _take_in(self, pending: Pending, sums: Mapping[int, LayerSums]) -> None:
        """Add up what enters layers before any of them is rounded, in each branch."""
        for position in self.rows.own_fitted:
            with pending.inputs.noted() as exact:
                if self.rows.own[position] < self.rows.compared:
                    pending.follow(position)
            for place, branch in pending.branches.items():
                with self.quantized.rounding_inputs(pending.groups), pending.inputs.noted(only=True) as seen:
                    pending.run(position, branch.hidden[position])
                sums[place].add(seen, exact)

    def _pass(self, groups: Sequence[FusionGroup], stored: Stored, passage: Passage) -> None:
        """Run a branch's stream through a layer that is rounded."""
        quantized = [one for group in groups for one in self.quantized.layers_of(group, stored)]
        with self.quantized.applied(quantized), self._watched(passage):
            for position in range(len(self.rows.own)):
                passage.run(position)

    def _passage(
        self, number: int, calls: Sequence[LayerCall], branch: Branch, source: HiddenStates
    ) -> Passage:
        return Passage(
            layer=self.layers[number],
            name=f"{self.name}.{number}",
            weights=self.weights,
            calls=calls,
            hidden=branch.hidden,
            source=source,
            rows=self.rows,
            device=self.device,
        )

    def _watched(self, passage: Passage) -> AbstractContextManager[None]:
        return passage.watching_cache() if self.watches_cache else nullcontext()

    def _put(self, branch: Branch, number: int, stored: Stored, how: LayerRounding) -> None:
        """Keep a finished layer: on the first rank, which alone has the folder."""
        if rank_and_size()[0] == 0:
            branch.done.put(number, stored, how)

    def _groups_of(self, number: int) -> list[FusionGroup]:
        """The groups of a decoder layer."""
        inside = f"{self.name}.{number}."
        return [
            group for group in self.groups if self.quantized.parameter_of(group.members[0]).startswith(inside)
        ]

    def _outside(self, head: Head, branches: Sequence[Branch], source: HiddenStates) -> None:
        """Round what is not in a decoder layer, an output head say, in every branch."""
        number, inside = len(self.layers), {group.name for group in self._inside()}
        groups = [group for group in self.groups if group.name not in inside]
        inputs = self._inputs(groups)
        found = on_first(lambda: [branch.done.get(number) for branch in branches])

        def follow(position: int) -> None:
            head.logits(position, source[position])

        def run(position: int, states: torch.Tensor) -> None:
            head.logits(position, states)

        begun = {place: branches[place] for place, done in enumerate(found) if done is None}
        pending = Pending(groups=groups, inputs=inputs, branches=begun, follow=follow, run=run)
        sums = self._sums_of(pending)
        if inputs.sites:
            self._take_in(pending, sums)
        for place, (branch, stored) in enumerate(zip(branches, found, strict=True) if groups else ()):
            if stored is None:
                stored, how = sums[place].round(self.quantized, groups)
                self._put(branch, number, stored, LayerRounding(groups=how, state_error=0.0))
            branch.outside = [
                one
                for group in groups
                if all(self.quantized.linear(member) is not None for member in group.members)
                for one in self.quantized.layers_of(group, stored)
            ]

    def _inputs(self, groups: Sequence[FusionGroup]) -> GroupInputs:
        """What enters those of the groups that are rounded by text."""
        rounded = [group for group in groups if group.rounding != "nearest"]
        return GroupInputs(self.quantized, rounded, self.token_weights)

    def _inside(self) -> list[FusionGroup]:
        return [group for number in range(len(self.layers)) for group in self._groups_of(number)]

    def _sums_of(self, pending: Pending) -> Mapping[int, LayerSums]:
        return {place: self._sums(pending.inputs, branch) for place, branch in pending.branches.items()}

    def _sums(self, inputs: GroupInputs, branch: Branch) -> LayerSums:
        return LayerSums(inputs, branch.recipe, text=self.rows.tokens, device=self.device)
