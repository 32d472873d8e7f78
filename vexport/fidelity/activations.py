"""Static scales of inputs and of the KV cache against what the source computes on given text.

A scale stands for a range: what lies beyond it is cut off, and what is small next to it is rounded away. Both
ends are judged with room, since the checkpoint was calibrated on other text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from vexport.calibration.data import Samples
from vexport.calibration.device import default_device
from vexport.calibration.forward import watch
from vexport.calibration.watch import DEFAULT_INPUT_OBSERVER, Watched
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checks import ACTIVATIONS
from vexport.checks.devices import INDEX
from vexport.checks.kv_cache import cache_scales
from vexport.checks.tensors.inputs import static_range
from vexport.checks.vllm.layers import layers_of
from vexport.checks.vllm.view import CheckpointView, error
from vexport.fidelity.source import Source
from vexport.formats.schemes import get_scheme
from vexport.numerics.constants import E4M3_MAX
from vexport.observers import Importance, load_observer
from vexport.plan.linears import Names, names_of
from vexport.types import Finding, LinearPlan, Smoothing

# A scheme whose inputs have one static range a layer.
STATIC = "FP8"
# How much smaller or larger than the largest value seen a range may be. Of e4m3, and of FP4 whose blocks have
# e4m3 scales, six bits of exponent are left for the values below; integers lose a bit with each doubling.
LEAST, MOST_FLOAT, MOST_INTEGER = 1 / 4, 64.0, 8.0
# Inputs of a layer with which its answers are compared, and how many of them one row of text gives.
INPUTS, INPUTS_OF_ROW = 64, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The largest magnitudes on some text, by vLLM's name: of layers' inputs, of (keys, values) by head.

    `samples` has some of the inputs themselves, (tokens, in), by the layer's name in the source.
    """

    inputs: Mapping[str, float]
    cached: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    samples: Mapping[str, torch.Tensor]


class KeptInputs(Importance):
    """Keeps some tokens of what enters a layer, where importance sums up all."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(0))
        self.kept: list[torch.Tensor] = []

    def add(self, inputs: torch.Tensor) -> None:
        """Keep tokens of inputs (..., channels) that lie far from each other; not the first, which is unlike
        all others."""
        tokens = inputs.detach().reshape(-1, inputs.shape[-1])
        room = min(INPUTS_OF_ROW, INPUTS - self.tokens)
        chosen = tokens[1 :: max(1, len(tokens) // INPUTS_OF_ROW)][:room]
        if len(chosen):
            self.kept.append(chosen.to("cpu", copy=True))
            self.tokens += len(chosen)


def observe(
    index: SourceIndex,
    samples: Samples,
    smoothing: Mapping[str, Smoothing] | None = None,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> Observed:
    """Run samples through an unquantized checkpoint, as smoothed; experts see what is routed to them.

    Raises what `vexport.calibration.forward.watch` raises.
    """
    with Reader() as reader:
        source = Source(index.root, reader)
        names = names_of(index, CheckpointView(index, reader).architecture)
    inputs = get_scheme(STATIC).args.input_activations
    assert inputs is not None
    layers: dict[str, tuple[LinearPlan, ...]] = {}
    for linear in source.linears.values():
        layers[linear.weight] = (*layers.get(linear.weight, ()), linear)
    watched = Watched(
        inputs={name: load_observer(DEFAULT_INPUT_OBSERVER, "input", inputs) for name in source.linears},
        importance={name: KeptInputs() for name in source.linears},
        layers=layers,
        all_experts=False,
        cached={},
    )
    watch(index, watched, samples, on_layer=on_layer, device=default_device(), smoothing=smoothing)
    return _observed(watched, names)


def _observed(watched: Watched, names: Names) -> Observed:
    return Observed(
        inputs={
            names.vllm_name(name): max(-float(low.min()), float(high.max()))
            for name, observer in watched.inputs.items()
            if observer.tokens
            for low, high in [observer.range()]
        },
        cached={
            names.vllm_name(name): (states.key.abs().amax(0).tolist(), states.value.abs().amax(0).tolist())
            for name, states in (watched.cached or {}).items()
        },
        samples={
            name: torch.cat(seen.kept)
            for name, seen in watched.importance.items()
            if isinstance(seen, KeptInputs) and seen.tokens >= INPUTS_OF_ROW
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One static scale: how large its range is against the largest value seen, and how large it may be."""

    where: str
    range_: float
    seen: float
    most: float

    @property
    def ratio(self) -> float:
        """The range as a multiple of what was seen; infinite where that was nothing but zeros."""
        return self.range_ / self.seen if self.seen else float("inf")


def mismatches(view: CheckpointView, observed: Observed) -> Iterator[Finding]:
    """Findings on static ranges that are far from what was observed, and how near the others are."""
    kinds: dict[str, list[Compared]] = {}
    comparisons = (*_of_inputs(view, observed), *_of_cache(view, observed))
    if not comparisons:
        yield _nothing_static()
    for compared in comparisons:
        if LEAST <= compared.ratio <= compared.most or not compared.seen:
            kinds.setdefault(INDEX.sub("*", compared.where), []).append(compared)
        else:
            yield _out_of_range(compared)
    yield from (_in_range(kind, scales) for kind, scales in kinds.items())


def _of_inputs(view: CheckpointView, observed: Observed) -> Iterator[Compared]:
    names = names_of(view.index, view.architecture)
    for name, layer in layers_of(view).items():
        seen = observed.inputs.get(names.vllm_name(name))
        static = static_range(view, layer.group, layer.parameters) if layer.group else None
        if seen is not None and static is not None and layer.group is not None:
            most = MOST_FLOAT if layer.group.weights.is_float else MOST_INTEGER
            yield Compared(where=static.name, range_=static.largest, seen=seen, most=most)


def _of_cache(view: CheckpointView, observed: Observed) -> Iterator[Compared]:
    names = names_of(view.index, view.architecture)
    for module, parameter, tensor in cache_scales(view):
        states = observed.cached.get(names.vllm_name(module))
        if states is None or tensor is None:
            continue
        ranges = view.reader.floats(tensor).reshape(-1) * E4M3_MAX
        by_head = states[0] if parameter.startswith("k") else states[1]
        largest = by_head if len(ranges) == len(by_head) else [max(by_head)] * len(ranges)
        for range_, seen in zip(ranges.tolist(), largest, strict=True):
            yield Compared(where=tensor.name, range_=range_, seen=seen, most=MOST_FLOAT)


def _out_of_range(compared: Compared) -> Finding:
    effect = "what is larger is cut off" if compared.ratio < LEAST else "small values are rounded away"
    return error(
        ACTIVATIONS,
        compared.where,
        expected=f"a range of about {compared.seen:.3g}, the largest value on the text that was given",
        got=f"one of {compared.range_:.3g}: {effect}",
        fix="calibrate again, on text like that which is to be served",
    )


def _nothing_static() -> Finding:
    return Finding(
        check=ACTIVATIONS,
        severity="info",
        where="checkpoint",
        expected="static scales of inputs or of the KV cache to compare with the text",
        got="none: the text tells what layers answer, and nothing of ranges",
        fix="nothing",
    )


def _in_range(kind: str, scales: Sequence[Compared]) -> Finding:
    ratios = sorted(compared.ratio for compared in scales)
    least, median, most = ratios[0], ratios[len(ratios) // 2], ratios[-1]
    return Finding(
        check=ACTIVATIONS,
        severity="info",
        where=f"{kind} ({len(scales)})",
        expected="a range of about the largest value seen",
        got=f"{least:.2f} to {most:.2f} times that, median {median:.2f}",
        fix="nothing",
    )
