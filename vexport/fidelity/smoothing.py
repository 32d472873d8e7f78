"""Check vexport's smoothing exponents against the source, and find the factors of other tools.

vexport smooths with powers of two, and stores their exponents in the checkpoint.

AWQ and SmoothQuant multiply the columns of a weight by factors, and divide the preceding norm, or
the rows of the preceding layer, by the same factors. A norm is not quantized, so its factors can be
read from it. Between two layers (v and o, up and down), the factors are computed from both weights.
Both weights must imply the same factors. Otherwise another change of a weight could be mistaken for
smoothing.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import torch

from vexport.architectures import NUMBERED_LAYER
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.smoothed import SMOOTHING, fits, smoothing_of
from vexport.checkpoint.tensors import TORCH_DTYPES, read_tensor
from vexport.checks.vllm.view import CheckpointView
from vexport.errors import CheckpointFailed, InputError
from vexport.fidelity.dequantize import dequantized
from vexport.fidelity.source import Pieces, SourceTensors
from vexport.records import Finding, Smoothing
from vexport.rules import source as rules
from vexport.words import plural

# NORMS maps layers to the norms that compute their inputs. NEXT_LAYER maps a layer to the layer
# that reads its output channels, and PREVIOUS_LAYER is the inverse.
NORMS: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "input_layernorm.weight"),
    **dict.fromkeys(("gate_proj", "up_proj"), "post_attention_layernorm.weight"),
}
NEXT_LAYER: Mapping[str, str] = {"v_proj": "o_proj", "up_proj": "down_proj"}
PREVIOUS_LAYER: Mapping[str, str] = {after: before for before, after in NEXT_LAYER.items()}
# Largest difference between the factors that the two weights imply. Rounding to 4 bits changes the
# gain of a row or column with several hundred weights by 1 or 2 %.
MAX_DISAGREEMENT = 0.1


def check_smoothing(
    checkpoint: Path, source: SourceIndex
) -> tuple[Mapping[str, Smoothing], tuple[Finding, ...]]:
    """Return the smoothing exponents of a checkpoint, and findings on their faults.

    Exponents are an error if they change the outputs of the source's layers. If exponents do not
    fit the source's tensors, this is an error, and no exponents are returned. A source that cannot
    run is a warning. Raises InputError if the exponents cannot be read.
    """
    smoothing, file = smoothing_of(checkpoint), checkpoint / SMOOTHING
    misfits = [
        name
        for name, exponents in smoothing.items()
        if name not in source.tensors or not fits(source.tensors[name], exponents)
    ]
    if misfits:
        tensor = source.tensors.get(misfits[0])
        others = f" (and {plural(len(misfits) - 1, 'more tensor')})" if len(misfits) > 1 else ""
        return {}, (
            Finding.at(
                rules.EXPONENTS_OF_OTHER_SOURCE,
                f"{file}: {misfits[0]}{others}",
                tensor=f"{tensor.dtype} {list(tensor.shape)}" if tensor else "missing",
            ),
        )
    return smoothing, tuple(_objections(file, source, smoothing)) if smoothing else ()


def _objections(
    file: Path, source: SourceIndex, smoothing: Mapping[str, Smoothing]
) -> Iterator[Finding]:
    from vexport.calibration.model import default_device
    from vexport.calibration.smoothing import layers_changed_by

    try:
        changed = layers_changed_by(source, smoothing, default_device())
    except (InputError, CheckpointFailed) as problem:
        yield Finding.at(rules.UNVERIFIED_EXPONENTS, str(file), reason=str(problem))
        return
    for name in changed:
        yield Finding.at(rules.EXPONENTS, f"{file}: {name}")


class Factors:
    """Smoothing factors of a checkpoint relative to its source.

    `norms` are the names of norms that differ from the source only because of these factors.
    """

    def __init__(self, view: CheckpointView, origins: SourceTensors) -> None:
        self._view, self._origins = view, origins
        self.norms: set[str] = set()
        self.layers: list[str] = []

    def expected(self, name: str, pieces: Pieces) -> Pieces | None:
        """Return the source's weight of a layer times its factors, or None without factors."""
        weight = torch.cat(tuple(pieces)).float()
        prefix, _, projection = name.rpartition(".")
        columns = self._of_norm(name)
        if columns is not None and columns.shape == weight.shape[1:]:
            weight = weight * columns
        first = (
            name if projection in NEXT_LAYER else f"{prefix}.{PREVIOUS_LAYER.get(projection, '')}"
        )
        between = (
            self._factors_between(first)
            if projection in NEXT_LAYER or projection in PREVIOUS_LAYER
            else None
        )
        if between is not None:
            weight = weight / between[:, None] if projection in NEXT_LAYER else weight * between
        return None if columns is None and between is None else (weight,)

    def accept(self, name: str) -> None:
        """Record that a layer's weight matches the source with these factors."""
        self.layers.append(name)
        if norm := self._norm_of(name):
            self.norms.add(norm)

    def _norm_of(self, name: str) -> str:
        stack, norm = NUMBERED_LAYER.search(name), NORMS.get(name.rpartition(".")[2])
        return f"{name[: stack.end()]}{norm}" if stack and norm else ""

    def _of_norm(self, name: str) -> torch.Tensor | None:
        """Return the factors (in,) by which the norm before a layer was divided, or None."""
        norm = self._norm_of(name)
        norm_info, origin = (
            self._view.index.tensors.get(norm),
            self._origins.tensor(norm) if norm else None,
        )
        if norm_info is None or origin is None or norm_info.shape != origin.shape:
            return None
        if norm_info.dtype not in TORCH_DTYPES:
            return None
        before = read_tensor(self._origins.reader, origin).float()
        after = read_tensor(self._view.reader, norm_info).float()
        factors = before / after
        usable = bool(torch.isfinite(factors).all()) and bool((factors > 0).all())
        return None if not usable or torch.equal(before, after) else factors

    @cache  # noqa: B019 - lives as long as a comparison
    def _factors_between(self, first: str) -> torch.Tensor | None:
        prefix, _, projection = first.rpartition(".")
        second = f"{prefix}.{NEXT_LAYER[projection]}"
        rows, columns = self._gains(first, 1), self._gains(second, 0)
        if rows is None or columns is None or rows.shape != columns.shape:
            return None
        agree = bool(((rows * columns - 1).abs() < MAX_DISAGREEMENT).all())
        return (columns / rows).sqrt() if agree and bool((rows > 0).all()) else None

    def _gains(self, name: str, axis: int) -> torch.Tensor | None:
        """Return the gain of each row (axis 1) or column (axis 0), relative to the source."""
        layer = self._view.layers.by_name.get(name)
        weight = dequantized(self._view, name) if layer is not None and layer.is_quantized else None
        pieces = self._origins.pieces(layer) if layer is not None else ()
        if weight is None or not pieces:
            return None
        source, factors = torch.cat(tuple(pieces)).float(), self._of_norm(name)
        source = source if factors is None else source * factors
        if weight.shape != source.shape:
            return None
        return (weight.float() * source).sum(axis) / source.square().sum(axis)
