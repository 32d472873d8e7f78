"""Search for the scales of weights with observers, in torch and without a model.

Nothing here imports transformers: observers that need no text work without it.
"""

import base64
from collections.abc import Sequence
from dataclasses import replace

import torch

from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_weight
from vexport.formats.packing.base import Scales, not_finite
from vexport.formats.plan import FusionGroup
from vexport.numerics.arithmetic import Floats
from vexport.observers import Importance, QParamsDict, RangeObserver, load_observer
from vexport.observers.imatrix import IMatrixMSE
from vexport.observers.mse import fit_global_scale
from vexport.records import CalibrationRecord, LinearPlan
from vexport.records.observer_names import BY_IMPORTANCE, MIN_MAX, UNWEIGHTED


def search_scales(
    group: FusionGroup, index: SourceIndex, calibration: CalibrationRecord, reader: Reader
) -> Sequence[Scales]:
    """Return the scales of each member of a group, in order.

    Members share the scales that vLLM requires to be equal.

    Raises InputError if a weight is not finite.
    """
    observers = []
    # A group with GPTQ or a refit reaches this function only if no calibration text reached it.
    # Then it has no importance, either.
    if group.observer in BY_IMPORTANCE and group.rounding != "nearest":
        group = replace(group, observer=UNWEIGHTED, observer_kwargs={})
    for member in group.members:
        weight = read_weight(reader, index.tensors[member.weight], member.part)
        importance = decode_importance(calibration.importance.get(member.name))
        observers.append(observe_weight(member, weight, group, importance, stored=weight.dtype))
    reader.release(index.tensors[member.weight] for member in group.members)
    return fused_scales(observers)


def decode_importance(importance: str | None) -> torch.Tensor | None:
    """Decode the mean square of each input channel, float32 (in,), from a calibration record."""
    if importance is None:
        return None
    return torch.frombuffer(bytearray(base64.b64decode(importance)), dtype=torch.float32)


def observe_weight(
    member: LinearPlan,
    weight: torch.Tensor,
    group: FusionGroup,
    importance: torch.Tensor | None,
    *,
    stored: torch.dtype,
) -> RangeObserver:
    """Return an observer that has seen a layer's weight (out, in).

    `stored` is the weight's dtype in the source. `importance` (in,) is the mean square of each
    input channel, for observers that use it.
    """
    scheme = group.scheme
    args = scheme.args.weights
    parameters = scheme.format.parameters(scheme.args, (member.out_features, member.in_features))
    # Searches use scales rounded to their stored dtype. A min-max scale is not searched. Its zero
    # point is computed from the scale before rounding, as in compressed-tensors.
    if parameters["weight_scale"].in_model_dtype and group.observer not in MIN_MAX:
        args = replace(args, scale_dtype=str(stored))
    observer = load_observer(group.observer, "weight", args, group.observer_kwargs)
    if importance is not None and isinstance(observer, IMatrixMSE):
        observer.gathered = Importance(importance.to(weight.device), tokens=1)
    observer.observe(weight)
    if not all(bool(torch.isfinite(end)) for end in observer.extremes()):
        raise not_finite(member.weight)
    return observer


def fused_scales(observers: Sequence[RangeObserver]) -> list[Scales]:
    """Return the scales of a fusion group's weights, with the global scale that they share."""
    RangeObserver.fuse(observers)
    fit_global_scale(observers)
    return [scales_of(observer.qparams()) for observer in observers]


def scales_of(qparams: QParamsDict) -> Scales:
    """Return the quantization parameters of an observer as float32 arrays in main memory."""
    global_scale = qparams["global_scale"]
    return Scales(
        scale=_float32(qparams["scale"]),
        zero_point=_float32(qparams["zero_point"]),
        global_scale=None if global_scale is None else _float32(global_scale),
    )


def _float32(values: torch.Tensor) -> Floats:
    array: Floats = values.to("cpu", torch.float32).numpy()
    return array
