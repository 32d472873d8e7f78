"""Scales of weights whose observers search for them: by torch, for the packings that need none."""

import base64
from collections.abc import Sequence
from dataclasses import replace

import torch

from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_weight
from vexport.formats.packing.base import Scales, not_finite
from vexport.formats.schemes import get_scheme
from vexport.observers import IMatrixMSEObserver, Importance, Observer, load_observer
from vexport.types import Calibration, FusionGroup, LinearPlan
from vexport.types.observer_names import MIN_MAX


def search_scales(
    group: FusionGroup, index: SourceIndex, calibration: Calibration, reader: Reader
) -> Sequence[Scales]:
    """The scales of each member of a group, in its order, sharing what must be shared.

    Raises InputError where a weight is not finite.
    """
    observers = [
        observe_weight(
            member,
            read_weight(reader, index.tensors[member.weight], member.part),
            group,
            calibration.importance.get(member.name),
        )
        for member in group.members
    ]
    Observer.fuse(observers)
    scales = [scales_of(observer) for observer in observers]
    reader.release(index.tensors[member.weight] for member in group.members)
    return scales


def observe_weight(
    member: LinearPlan, weight: torch.Tensor, group: FusionGroup, importance: str | None
) -> Observer:
    """An observer that has seen a layer's weight.

    `importance` is what calibration gathered for this layer, where the observer asks for it.
    """
    scheme = get_scheme(group.scheme)
    args = scheme.args.weights
    stored = scheme.format.parameters(scheme.args, (member.out_features, member.in_features))
    # Searches see scales rounded as they are stored. A min-max scale has no such choice, and its zero point
    # is that of the scale before it is rounded, as in compressed-tensors.
    if stored["weight_scale"].in_model_dtype and group.observer not in MIN_MAX:
        args = replace(args, scale_dtype=str(weight.dtype))
    observer = load_observer(group.observer, "weight", args)
    if importance is not None and isinstance(observer, IMatrixMSEObserver):
        means = torch.frombuffer(bytearray(base64.b64decode(importance)), dtype=torch.float32)
        observer.gathered = Importance(means.to(weight.device), tokens=1)
    observer.forward(weight)
    if not all(bool(torch.isfinite(end)) for end in observer.extremes()):
        raise not_finite(member)
    return observer


def scales_of(observer: Observer) -> Scales:
    """What the observer found, as the packings take it."""
    qparams = observer.get_qparams()
    global_scale = qparams["global_scale"]
    return Scales(
        scale=qparams["scale"].to(torch.float32).numpy(),
        zero_point=qparams["zero_point"].to(torch.float32).numpy(),
        global_scale=None if global_scale is None else global_scale.to(torch.float32).numpy(),
    )
