"""Which branch answers best: KL to the source over rows of text that no weights were rounded for."""

from collections.abc import Sequence

import torch

from vexport.calibration.capture import Rest, replayed_layers
from vexport.calibration.hidden import HiddenStates
from vexport.numerics.metrics import divergence_of_logits
from vexport.numerics.ranks import gather
from vexport.quantize.applied import QuantizedModel
from vexport.quantize.passage import Branch
from vexport.quantize.text_rows import TextRows


class Head:
    """The model behind its last decoder layer, for this rank's rows of token `ids`."""

    def __init__(
        self,
        model: torch.nn.Module,
        layers: torch.nn.ModuleList,
        rest: Rest,
        ids: Sequence[torch.Tensor],
        device: str,
    ) -> None:
        self._model, self._layers, self._rest = model, layers, rest
        self._ids, self._device = ids, device

    def logits(self, position: int, states: torch.Tensor) -> torch.Tensor:
        """(1, tokens, vocabulary) of a row by its position among this rank's, from its hidden states."""
        with replayed_layers(self._layers, states.to(self._device), self._rest):
            logits: torch.Tensor = self._model(input_ids=self._ids[position], use_cache=False).logits
        return logits


def judge(
    head: Head, model: QuantizedModel, rows: TextRows, branches: Sequence[Branch], source: HiddenStates
) -> None:
    """Give each branch its mean KL(source || branch), nats per token, over the rows held out."""
    own = [
        (rows.lengths[row], _divergences(head, model, position, branches, source[position]))
        for position, row in enumerate(rows.own)
        if row >= rows.fitted
    ]
    found = [one for each in gather(own) for one in each]
    tokens = sum(number for number, _ in found)
    for place, branch in enumerate(branches):
        branch.divergence = sum(each[place] for _, each in found) / tokens if tokens else None


def _divergences(
    head: Head, model: QuantizedModel, position: int, branches: Sequence[Branch], states: torch.Tensor
) -> list[float]:
    """The sums of KL of each branch over the tokens of a row; `states` are the source's."""
    found, expected = [], head.logits(position, states)
    for branch in branches:
        with model.applied(branch.outside):
            measured = head.logits(position, branch.hidden[position])
        found.append(divergence_of_logits(expected, measured))
    return found
