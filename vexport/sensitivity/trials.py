"""One layer group quantized while all else stays: what would be stored of it in one scheme."""

from collections.abc import Sequence
from dataclasses import dataclass

from vexport.quantize.applied import QuantizedLayer, QuantizedModel
from vexport.quantize.stream import quantized_group
from vexport.quantize.weight_scales import search_scales
from vexport.sensitivity.layer_groups import Option


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """A layer group in one scheme."""

    unit: str
    option: Option


def layers_of(model: QuantizedModel, trial: Trial) -> Sequence[QuantizedLayer]:
    """The trial's layers as compressed-tensors dequantizes what would be stored.

    Raises InputError where a weight is not finite.
    """
    layers = list[QuantizedLayer]()
    for group in trial.option.groups:
        stored = quantized_group(group, model.index, model.calibration, model.reader, search=search_scales)
        layers.extend(model.layers_of(group, stored))
    return layers


def parameter_of(model: QuantizedModel, trial: Trial) -> str:
    """The name of a parameter that the trial changes; empty where the model has none of them."""
    return model.parameter_of(trial.option.groups[0].members[0])
