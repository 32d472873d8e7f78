"""Compare a quantized checkpoint with its source."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from vexport.architectures import with_stars
from vexport.checkpoint.index import find_quantization, read_index
from vexport.checkpoint.smoothed import reader_of
from vexport.checks import COMPARABLE, SOURCE, SourceComparison
from vexport.checks.vllm.findings import error, info, warning
from vexport.checks.vllm.groups import StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.errors import InputError
from vexport.fidelity.kept import file_findings, tensor_findings
from vexport.fidelity.own_rounding import is_rounded_by_vexport
from vexport.fidelity.smoothing import Factors, check_smoothing
from vexport.fidelity.source import SourceTensors
from vexport.fidelity.weights import WeightComparison, compare_weight
from vexport.formats.arguments import SchemeArgs, precision
from vexport.formats.schemes import named_scheme
from vexport.numerics.metrics import decibels
from vexport.records import Finding
from vexport.records.values import plural

OnLayer = Callable[[int, int], None]


def source_comparison(root: Path, *, on_layer: OnLayer) -> SourceComparison:
    """Return the comparison with the unquantized checkpoint `root`.

    Every quantized weight is dequantized with compressed-tensors, a few rows at a time. All other
    tensors must have the source's bytes, and the other files must have the same content. If the
    checkpoint was smoothed, the source is smoothed in the same way before the comparison. Raises
    InputError if `root` is not an unquantized checkpoint.
    """
    index = read_index(root)
    if find_quantization(index.root, index.config) is not None:
        need = "the unquantized model that the checkpoint was made from"
        fix = "pass the unquantized model with --source"
        raise InputError(str(root), got="a quantized checkpoint", need=need, fix=fix)

    def compare(view: CheckpointView) -> Iterator[Finding]:
        smoothing, objections = check_smoothing(view.index.root, index)
        yield from objections
        with reader_of(smoothing) as reader:
            yield from _compare_layers(view, SourceTensors(view, index, reader), on_layer)

    return SourceComparison(root=root, run=compare)


def _compare_layers(
    view: CheckpointView, origins: SourceTensors, on_layer: OnLayer
) -> Iterator[Finding]:
    quantized = [layer for layer in view.layers.by_name.values() if layer.is_quantized]
    ratios: dict[str, float] = {}
    smoothing = Factors(view, origins)
    faulty: list[tuple[StoredLayer, WeightComparison]] = []
    scaled: list[Finding] = []
    for number, layer in enumerate(quantized):
        comparison = _compare(view, origins, layer)
        if isinstance(comparison, WeightComparison) and comparison.is_doubtful:
            others = (comparison, _compare_smoothed(view, origins, layer, smoothing))
            comparison = max(filter(None, others), key=lambda each: (not each.faults, each.snr_db))
        if isinstance(comparison, Finding):
            yield comparison
        else:
            ratios[layer.name] = comparison.snr_db
            if comparison.faults:
                faulty.append((layer, comparison))
            elif comparison.scaled_columns:
                scaled.append(_scaled_columns(layer, comparison))
        origins.release()
        on_layer(number + 1, len(quantized))
    # Computing the digests of all weights takes time, so it is only done if there are faults.
    is_own = bool(faulty) and is_rounded_by_vexport(view, origins.index)
    for layer, comparison in faulty:
        is_rounding = is_own and comparison.is_same_weight
        yield (
            _rounded_far(layer, comparison) if is_rounding else _different_weight(layer, comparison)
        )
    yield from scaled
    yield from _factors(smoothing)
    names = {layer.name for layer in quantized}
    yield from tensor_findings(view, origins, names, smoothing.norms)
    yield from file_findings(view.index, origins.index)
    yield from _summary(view, ratios)


def _compare(
    view: CheckpointView, origins: SourceTensors, layer: StoredLayer
) -> WeightComparison | Finding:
    pieces = origins.pieces(layer)
    if not pieces:
        fix = "pass the model that the checkpoint was made from with --source"
        return _incomparable(view, layer, "no weight of this layer in the source", fix)
    comparison = compare_weight(view, layer, pieces) if layer.group else None
    if comparison is None:
        sizes = [sum(len(piece) for piece in pieces), pieces[0].shape[1]]
        got = f"tensors that do not fit the source's weight {sizes}"
        return _incomparable(view, layer, got, "export the checkpoint again")
    return comparison


def _compare_smoothed(
    view: CheckpointView, origins: SourceTensors, layer: StoredLayer, smoothing: Factors
) -> WeightComparison | None:
    """Return the comparison with the smoothed source's weight, or None without smoothing."""
    pieces = smoothing.expected(layer.name, origins.pieces(layer))
    comparison = compare_weight(view, layer, pieces) if pieces else None
    if comparison is not None and not comparison.faults:
        smoothing.accept(layer.name)
    return comparison


def _factors(smoothing: Factors) -> Iterator[Finding]:
    if smoothing.layers:
        where = smoothing.layers[0]
        if len(smoothing.layers) > 1:
            where += f" and {plural(len(smoothing.layers) - 1, 'more layer')}"
        got = "the weight with factors on its inputs or outputs, which a norm or layer compensates"
        fix = "ignore this: AWQ and SmoothQuant store such factors, and the comparison removed them"
        yield info(SOURCE, where, claim=None, expected="the source's weight", got=got, fix=fix)


def _different_weight(layer: StoredLayer, comparison: WeightComparison) -> Finding:
    """Report a weight that differs from the source's weight, with all its faults."""
    expected = (
        f"the source's weight, rounded to {_stored_as(layer)} (SQNR about "
        f"{comparison.rounding_db:.1f} dB)"
    )
    fix = (
        "export the layer again; if the weights were smoothed or rotated, pass the smoothed or "
        "rotated model with --source"
    )
    return error(
        SOURCE,
        layer.name,
        claim="values",
        expected=expected,
        got="; ".join(comparison.faults),
        fix=fix,
    )


def _rounded_far(layer: StoredLayer, comparison: WeightComparison) -> Finding:
    """Warn of a weight that vexport's rounding has changed more than rounding usually does."""
    got = (
        f"{'; '.join(comparison.faults)} (by vexport's rounding: the files match their "
        f"recorded digests)"
    )
    fix = (
        "evaluate the checkpoint; with more calibration text, rounding changes the weights less "
        "(--samples, --seq-len)"
    )
    expected = (
        f"an error as with rounding to nearest (an SQNR of about {comparison.rounding_db:.1f} dB)"
    )
    return warning(SOURCE, layer.name, claim="values", expected=expected, got=got, fix=fix)


def _scaled_columns(layer: StoredLayer, comparison: WeightComparison) -> Finding:
    """Warn of columns that have another size than in the source. A refit can scale columns."""
    expected = f"columns as in the source, with the error of rounding to {_stored_as(layer)}"
    fix = "evaluate the checkpoint; if no refit scaled these columns, export the layer again"
    got = "; ".join(comparison.scaled_columns)
    return warning(SOURCE, layer.name, claim="values", expected=expected, got=got, fix=fix)


def _summary(view: CheckpointView, ratios: Mapping[str, float]) -> Iterator[Finding]:
    """Report the signal-to-noise ratios, in one line per kind of layer."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name in ratios:
        kinds.setdefault((with_stars(name), _stored_as(view.layers.by_name[name])), []).append(name)
    for (kind, stored), names in kinds.items():
        names.sort(key=ratios.__getitem__)
        least, median, most = (ratios[names[position]] for position in (0, len(names) // 2, -1))
        got = (
            f"signal-to-noise {decibels(least)} to {decibels(most, ' dB')}, "
            f"median {decibels(median)}, lowest in {names[0]}"
        )
        yield info(
            SOURCE,
            f"{kind} ({len(names)} in {stored})",
            claim=None,
            expected="",
            got=got,
            fix="",
        )


def _incomparable(view: CheckpointView, layer: StoredLayer, got: str, fix: str) -> Finding:
    """Report a layer that cannot be compared with the source.

    If the tensor layout of the model class is unknown, the finding is an error. If it is known, the
    finding is a warning: other checks report wrong tensors, and vLLM may not need such a layer.
    """
    finding = error if view.model.layout is None else warning
    return finding(SOURCE, layer.name, claim=None, expected=COMPARABLE, got=got, fix=fix)


def _stored_as(layer: StoredLayer) -> str:
    """Return the name of the scheme that stores the layer, or its precision, such as W4A16."""
    assert layer.group is not None
    group = layer.group
    try:
        return named_scheme(
            SchemeArgs(weights=group.weights, input_activations=group.input_activations)
        ).name
    except InputError:
        return precision(group)
