"""Whether a checkpoint's smoothing is believed, by which `check` and `repair` read its source."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader, same_bytes
from vexport.checkpoint.smoothed import SMOOTHING, fits, smoothing_of
from vexport.checks import SOURCE
from vexport.checks.vllm.layers import layers_of
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.errors import CheckpointFailed, InputError, raise_all
from vexport.errors.extras import require_extra
from vexport.types import Finding, Smoothing

if TYPE_CHECKING:
    from vexport.fidelity.source import Source

EXPECTED = "exponents that leave what each layer computes"
FIX = "name the source that the checkpoint was made of, or export it again"


def judged_smoothing(
    checkpoint: Path, source: SourceIndex
) -> tuple[Mapping[str, Smoothing], tuple[Finding, ...]]:
    """How the source of a checkpoint was smoothed, and what speaks against it.

    An error where the exponents change what the source computes, or are for other tensors and so smooth
    nothing; a warning where it cannot run. InputError where they cannot be read.
    """
    smoothing, file = smoothing_of(checkpoint), checkpoint / SMOOTHING
    misfits = [
        name
        for name, one in smoothing.items()
        if name not in source.tensors or not fits(source.tensors[name], one)
    ]
    if misfits:
        tensor = source.tensors.get(misfits[0])
        size = f"one of {tensor.dtype} {list(tensor.shape)}" if tensor else "none"
        others = f" (and {len(misfits) - 1:,} more tensors)" if len(misfits) > 1 else ""
        got = f"exponents for another tensor than the source's, which is {size}"
        return {}, (error(SOURCE, f"{file}: {misfits[0]}{others}", expected=EXPECTED, got=got, fix=FIX),)
    return smoothing, tuple(_objections(file, source, smoothing)) if smoothing else ()


def proven_smoothing(checkpoint: Path, source: SourceIndex) -> Mapping[str, Smoothing]:
    """How the source of a checkpoint was smoothed; InputError where that cannot be shown."""
    smoothing, findings = judged_smoothing(checkpoint, source)
    raise_all([InputError(each.where, got=each.got, need=each.expected, fix=FIX) for each in findings])
    return smoothing


def disagreements(
    view: CheckpointView, source: "Source", reader: Reader, smoothing: Mapping[str, Smoothing]
) -> Iterator[Finding]:
    """An error for each tensor of a checkpoint that is not its source's as smoothed: `reader` smooths it.

    Exponents may leave what the source computes, and yet not be those of these weights.
    """
    from vexport.fidelity.source import SourceTensors
    from vexport.fidelity.weights import compare_weight

    origins, layers = SourceTensors(view, source, reader), layers_of(view)
    for name in smoothing:
        layer, own = layers.get(name.removesuffix(".weight")), view.index.tensors.get(name)
        got = ""
        if layer is not None and layer.is_quantized:
            comparison = compare_weight(view, layer, origins.weight(layer)) if layer.group else None
            got = "; ".join(comparison.faults) if comparison else ""
            origins.release()
        elif own is not None and not same_bytes(reader, source.index.tensors[name], view.reader, own):
            got = "other values"
        if got:
            where = f"{view.index.root / SMOOTHING}: {name}"
            yield error(SOURCE, where, expected="the exponents of these weights", got=got, fix=FIX)


def _objections(file: Path, source: SourceIndex, smoothing: Mapping[str, Smoothing]) -> Iterator[Finding]:
    require_extra("torch", str(file))
    from vexport.calibration.model import default_device
    from vexport.calibration.smoothing import changed_by

    try:
        changed = changed_by(source, smoothing, default_device())
    except (InputError, CheckpointFailed) as problem:
        fix = "nothing, if this checkpoint is your own"
        yield warning(
            SOURCE, str(file), expected=EXPECTED, got=f"a source that cannot run: {problem}", fix=fix
        )
        return
    for name in changed:
        got = "other answers with them than without"
        yield error(SOURCE, f"{file}: {name}", expected=EXPECTED, got=got, fix=FIX)
