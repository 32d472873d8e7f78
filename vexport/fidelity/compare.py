"""Compare a quantized checkpoint with its source."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from vexport.architectures import with_stars
from vexport.checkpoint.index import find_quantization, read_index
from vexport.checkpoint.smoothed import reader_of
from vexport.checks import SourceComparison
from vexport.checks.vllm.groups import StoredLayer
from vexport.checks.vllm.stored_schemes import stored_scheme
from vexport.checks.vllm.view import CheckpointView
from vexport.errors import InputError
from vexport.fidelity.kept import file_findings, tensor_findings
from vexport.fidelity.own_rounding import is_rounded_by_vexport
from vexport.fidelity.smoothing import Factors, check_smoothing
from vexport.fidelity.source import SourceTensors
from vexport.fidelity.weights import WeightComparison, compare_weight
from vexport.numerics.metrics import decibels
from vexport.records import Finding
from vexport.rules import source as rules
from vexport.rules.book import Rule
from vexport.words import plural

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
        raise InputError.of(rules.QUANTIZED_SOURCE, str(root))

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
                scaled.append(
                    Finding.at(
                        rules.SCALED_COLUMNS,
                        layer.name,
                        columns="; ".join(comparison.scaled_columns),
                        scheme=_stored_as(layer),
                    )
                )
        origins.release()
        on_layer(number + 1, len(quantized))
    # Computing the digests of all weights takes time, so it is only done if there are faults.
    is_own = bool(faulty) and is_rounded_by_vexport(view, origins.index)
    for layer, comparison in faulty:
        faults, rounding = "; ".join(comparison.faults), comparison.rounding_db
        if is_own and comparison.is_same_weight:
            yield Finding.at(rules.ROUNDED_FAR, layer.name, faults=faults, rounding=rounding)
        else:
            yield Finding.at(
                rules.DIFFERENT_WEIGHT,
                layer.name,
                faults=faults,
                rounding=rounding,
                scheme=_stored_as(layer),
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
        return Finding.at(_severity(view, rules.NO_SOURCE_WEIGHT), layer.name)
    comparison = compare_weight(view, layer, pieces) if layer.group else None
    if comparison is None:
        sizes = [sum(len(piece) for piece in pieces), pieces[0].shape[1]]
        return Finding.at(_severity(view, rules.OTHER_SIZE), layer.name, shape=sizes)
    return comparison


def _compare_smoothed(
    view: CheckpointView, origins: SourceTensors, layer: StoredLayer, smoothing: Factors
) -> WeightComparison | None:
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
        yield Finding.at(rules.SMOOTHED, where)


def _summary(view: CheckpointView, ratios: Mapping[str, float]) -> Iterator[Finding]:
    kinds: dict[tuple[str, str], list[str]] = {}
    for name in ratios:
        kinds.setdefault((with_stars(name), _stored_as(view.layers.by_name[name])), []).append(name)
    for (kind, stored), names in kinds.items():
        names.sort(key=ratios.__getitem__)
        least, median, most = (ratios[names[position]] for position in (0, len(names) // 2, -1))
        yield Finding.at(
            rules.SIGNAL_TO_NOISE,
            f"{kind} ({len(names)} in {stored})",
            least=decibels(least),
            most=decibels(most, " dB"),
            median=decibels(median),
            layer=names[0],
        )


def _severity(view: CheckpointView, rule: Rule) -> Rule:
    """Return the rule for a layer that cannot be compared with the source.

    If the tensor layout of the model class is unknown, the finding is an error. If it is known, the
    finding is a warning: other checks report wrong tensors, and vLLM may not need such a layer.
    """
    return rule if view.model.layout is None else rule.as_warning


def _stored_as(layer: StoredLayer) -> str:
    assert layer.group is not None
    return stored_scheme(layer.group)
