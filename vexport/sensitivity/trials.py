"""One layer group quantized while all else stays: what would be stored of it in one scheme."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vexport.quantize.applied import QuantizedLayer, QuantizedModel
from vexport.quantize.group_inputs import GroupInputs, Noted, Site
from vexport.quantize.round_sites import GroupWeights, round_sites, zero_moments
from vexport.quantize.stream import quantized_group
from vexport.quantize.weight_scales import search_scales
from vexport.rounding.settings import GPTQ, Recipe
from vexport.sensitivity.layer_groups import Option
from vexport.types import FusionGroup


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
        self.inputs = GroupInputs(model, groups)
        self._model, self._tokens = model, tokens
        self._sums = zero_moments(self.inputs.sites, _recipe_of, device)

    def add(self, noted: Noted) -> None:
        """Take in a batch that went through the layers."""
        for site in self.inputs.sites:
            self.inputs.add(site, self._sums[site.name], noted, noted, text=self._tokens)

    def rounded(self) -> Mapping[str, GroupWeights]:
        """The rounded weights by group."""
        return round_sites(self._model, self.inputs, self._sums, _recipe_of)[0]


def _recipe_of(group: FusionGroup, site: Site) -> Recipe:
    return GPTQ


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
    return model.parameter_of(trial.option.groups[0].members[0])
