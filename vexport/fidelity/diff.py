"""What differs between two checkpoints: config, files, tensors, values, sizes."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.checkpoint.dtypes import BITS, FLOATING, to_numpy
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.quantization import find_quantization
from vexport.checkpoint.reader import Reader, same_bytes
from vexport.checkpoint.smoothed import SMOOTHING, reader_of
from vexport.checks.vllm.layers import Layer, layers_of
from vexport.checks.vllm.view import CheckpointView
from vexport.errors.extras import attempt_all, is_installed
from vexport.fidelity.believed import proven_smoothing
from vexport.files import digest_file
from vexport.numerics.metrics import COMPARED, ErrorPower, array_error, quantization_error
from vexport.outputs.replaceable import RECIPE
from vexport.types import Json, Smoothing, TensorInfo

if TYPE_CHECKING:
    import torch

OnProgress = Callable[[int, int], None]
ABSENT = "absent"
SMALL_FLOATS = frozenset({"F8_E4M3", "F8_E5M2"})
WITHOUT_NUMBERS = frozenset({"F4", "C64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A place and what either side has there."""

    where: str
    a: str
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor of the same name, dtype and shape with other values.

    `changed` is the share of elements that differ, `snr_db` that of B against A, None for codes and where a
    value is not finite.
    """

    name: str
    changed: float
    snr_db: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDifference:
    """A linear layer whose weight differs once dequantized: B against A, as signal-to-noise in dB."""

    layer: str
    stored_a: str
    stored_b: str
    snr_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """What differs between the checkpoints `a` and `b`.

    `only_a` and `only_b` are tensors that one of them has, `forms` those of another dtype or shape, `values`
    those of other values, `weights` the linear layers whose dequantized weights differ, which were looked at
    where `dequantized`: that needs torch. `sizes` are bytes of all tensors. `smoothing` is the file by which
    the one that the other was made of is read smoothed.
    """

    a: str
    b: str
    same: bool
    sizes: tuple[int, int]
    config: tuple[Difference, ...]
    files: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    forms: tuple[Difference, ...]
    values: tuple[TensorDifference, ...]
    weights: tuple[WeightDifference, ...]
    dequantized: bool
    smoothing: str | None = None


def diff(a: Path, b: Path, *, on_progress: OnProgress = lambda done, total: None) -> DiffReport:
    """Compare two checkpoints of any kind; one may be the source of the other.

    A source is compared as smoothed as the checkpoint that was made of it. Memory holds one layer of each.
    Raises InputError for a folder or file that cannot be read, and for a smoothing that is not the source's.
    """
    one, two = attempt_all((str(root), partial(read_index, root)) for root in (a, b))
    smoothing_a, smoothing_b = _smoothing(one, two), _smoothing(two, one)
    with reader_of(smoothing_a) as reader_a, reader_of(smoothing_b) as reader_b:
        old, new = CheckpointView(one, reader_a), CheckpointView(two, reader_b)
        values = tuple(_values(old, new, on_progress))
        dequantized = is_installed("torch")
        weights = tuple(_weights(old, new, {value.name for value in values})) if dequantized else ()
    config = tuple(_config("", dict(one.config), dict(two.config)))
    files = tuple(_files(one, two))
    only_a = tuple(name for name in one.tensors if name not in two.tensors)
    only_b = tuple(name for name in two.tensors if name not in one.tensors)
    forms = tuple(_forms(one, two))
    return DiffReport(
        a=str(a),
        b=str(b),
        same=not any((config, files, only_a, only_b, forms, values)),
        sizes=(one.num_bytes, two.num_bytes),
        config=config,
        files=files,
        only_a=only_a,
        only_b=only_b,
        forms=forms,
        values=values,
        weights=weights,
        dequantized=dequantized,
        smoothing=str((b if smoothing_a else a) / SMOOTHING) if smoothing_a or smoothing_b else None,
    )


def _smoothing(index: SourceIndex, other: SourceIndex) -> Mapping[str, Smoothing]:
    """How a checkpoint was smoothed before the other one was made of it; nothing where it was not."""
    if find_quantization(index.root, index.config) or not find_quantization(other.root, other.config):
        return {}
    common = other.tensors.keys() & index.tensors.keys()
    if any(other.tensors[name].shape != index.tensors[name].shape for name in common):
        return {}
    return proven_smoothing(other.root, index)


def _config(place: str, a: Json, b: Json) -> Iterator[Difference]:
    """The keys of two configs that differ, lists as a whole."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            where = f"{place}.{key}" if place else key
            if key not in a or key not in b:
                yield Difference(where=where, a=_shown(a, key), b=_shown(b, key))
            else:
                yield from _config(where, a[key], b[key])
    elif a != b or type(a) is not type(b):
        yield Difference(where=place, a=repr(a), b=repr(b))


def _shown(config: Mapping[str, Json], key: str) -> str:
    return repr(config[key]) if key in config else ABSENT


def _files(a: SourceIndex, b: SourceIndex) -> Iterator[Difference]:
    """Side files (tokenizer, template, generation config) that only one has or that differ.

    What a checkpoint was made from is no part of it: recipes are not compared.
    """
    ours, theirs = ({path.name: path for path in index.side_files if path.name != RECIPE} for index in (a, b))
    for name in sorted(ours.keys() | theirs.keys()):
        one, two = ours.get(name), theirs.get(name)
        if one is None or two is None:
            yield Difference(where=name, a="present" if one else ABSENT, b="present" if two else ABSENT)
        elif digest_file(one) != digest_file(two):
            yield Difference(
                where=name, a=f"{one.stat().st_size} bytes", b=f"{two.stat().st_size} bytes, others"
            )


def _forms(a: SourceIndex, b: SourceIndex) -> Iterator[Difference]:
    for name in a.tensors.keys() & b.tensors.keys():
        one, two = a.tensors[name], b.tensors[name]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            yield Difference(where=name, a=_form(one), b=_form(two))


def _form(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _values(a: CheckpointView, b: CheckpointView, on_progress: OnProgress) -> Iterator[TensorDifference]:
    """Tensors of one form whose bytes differ."""
    shared = [name for name in a.index.tensors if name in b.index.tensors]
    for done, name in enumerate(shared, 1):
        one, two = a.index.tensors[name], b.index.tensors[name]
        if (one.dtype, one.shape) == (two.dtype, two.shape) and not same_bytes(a.reader, one, b.reader, two):
            yield _compared(a.reader, one, b.reader, two)
        a.reader.release([one])
        b.reader.release([two])
        on_progress(done, len(shared))


def _compared(old: Reader, a: TensorInfo, new: Reader, b: TensorInfo) -> TensorDifference:
    """Two tensors of one form, a part at a time; a dtype without numbers by its bytes."""
    dtype = a.dtype if a.dtype not in WITHOUT_NUMBERS else "U8"
    sums, step = ErrorPower(), COMPARED * BITS[dtype] // 8
    before, after = old.raw(a), new.raw(b)
    for start in range(0, len(before), step):
        part = slice(start, start + step)
        sums += array_error(to_numpy(before[part], dtype), to_numpy(after[part], dtype))
    is_number = a.dtype in FLOATING or a.dtype in SMALL_FLOATS
    noise = sums.sqnr_db if is_number and math.isfinite(sums.signal + sums.error) else None
    return TensorDifference(name=a.name, changed=sums.changed * BITS[dtype] / (8 * len(before)), snr_db=noise)


def _weights(a: CheckpointView, b: CheckpointView, changed: set[str]) -> Iterator[WeightDifference]:
    """Layers of both whose tensors or arguments differ, dequantized where they are quantized."""
    ours, theirs = layers_of(a), layers_of(b)
    for name in ours:
        if name in theirs and _may_differ(ours[name], theirs[name], changed):
            old, new = _weight(a, ours[name]), _weight(b, theirs[name])
            if old is not None and new is not None and old.shape == new.shape:
                sums = quantization_error(old, new)
                if sums.changed:
                    yield WeightDifference(
                        layer=name,
                        stored_a=_stored(ours[name]),
                        stored_b=_stored(theirs[name]),
                        snr_db=sums.sqnr_db,
                    )


def _may_differ(a: Layer, b: Layer, changed: set[str]) -> bool:
    forms = [{parameter: _form(tensor) for parameter, tensor in layer.parameters.items()} for layer in (a, b)]
    if forms[0] != forms[1] or any(tensor.name in changed for tensor in a.parameters.values()):
        return True
    arguments = [layer.group and (layer.group.weights, layer.group.format) for layer in (a, b)]
    return arguments[0] != arguments[1]


def _weight(view: CheckpointView, layer: Layer) -> "torch.Tensor | None":
    from vexport.checkpoint.tensors import read_tensor
    from vexport.fidelity.dequantize import dequantized

    if layer.is_quantized:
        return dequantized(view, layer.name)
    return read_tensor(view.reader, layer.parameters["weight"]) if "weight" in layer.parameters else None


def _stored(layer: Layer) -> str:
    if layer.is_quantized:
        return layer.group.format if layer.group else "quantized"
    return layer.parameters["weight"].dtype if "weight" in layer.parameters else ABSENT
