"""Which channels of a model can be scaled without changing what it computes, and by how much.

An input that is rounded loses what is small next to the largest values of its block or token. Where a norm,
or a linear layer with nothing but products behind it, makes that input, its channels can be scaled there and
back in the weights that read it, as SmoothQuant does (arXiv 2211.10438): by a_j^s / g_j^(1 - s), with the
root mean squares of channel j and of its gradient, and the strength s. (The paper takes the largest
magnitudes of inputs and of weights, which leaves more of the KL divergence: docs/rounding.md.) With s = 1/2
the errors of a block that has one step for all its channels weigh least.

Scales are powers of two, so that a folded layer computes the same bits; each fold is tried on a row of text
and kept where it does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from vexport.architectures.fusion import moe_layer
from vexport.calibration.capture import LayerCall
from vexport.calibration.channel_sizes import ChannelSizes
from vexport.calibration.data import Samples
from vexport.calibration.device import require_device
from vexport.calibration.fisher import UpAndBack
from vexport.calibration.forward import make_batches
from vexport.calibration.hidden import hidden_states
from vexport.calibration.layerwise import OnLayer
from vexport.calibration.model import joined
from vexport.calibration.watch import Watched
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.smoothed import MOST, encode
from vexport.numerics.ranks import on_first, process_group
from vexport.types import FusionGroup, Smoothing

# Rows of text that are looked at, spread over all.
ROWS = 16
# A channel that is never used counts as this share of the largest.
LEAST = 1e-5


def find_smoothing(
    index: SourceIndex,
    groups: Sequence[FusionGroup],
    strength: float,
    samples: Samples,
    *,
    on_layer: OnLayer,
    trust_remote_code: bool,
    device: str,
) -> Mapping[str, Smoothing]:
    """The exponents by stored tensor, for the inputs of these groups; the first rank finds them for all.

    Raises what `vexport.calibration.forward.watch` raises.
    """
    require_device(device)
    batches = make_batches(samples.spread(ROWS), 1)
    nothing = Watched(inputs={}, importance={}, layers={})

    def find() -> Mapping[str, Smoothing]:
        with torch.no_grad(), Reader() as reader, hidden_states() as hidden:
            model = _Smoothed(
                index, reader, batches, hidden, nothing, trust_remote_code=trust_remote_code, device=device
            )
            model.prepare(groups, strength)
            model.run_and_back(on_layer)
        return model.found

    with process_group():
        return on_first(find)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fold:
    """Parameters whose rows are divided, and those whose columns are multiplied."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Trace:
    """What went through a layer's modules for one row of text, by their names in the layer."""

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]

    def readers(self, made: torch.Tensor) -> list[str]:
        """The modules that read a tensor that another one made."""
        return [
            name
            for name, seen in self.inputs.items()
            if seen.data_ptr() == made.data_ptr() and seen.shape[-1] == made.shape[-1]
        ]


class _Smoothed(UpAndBack):
    """Runs the source; every layer is folded when its inputs and their gradients have been seen."""

    def prepare(self, groups: Sequence[FusionGroup], strength: float) -> None:
        """Which layers' inputs matter, by the parameters of their weights."""
        self.found: dict[str, Smoothing] = {}
        self.wanted = {
            parameter
            for group in groups
            for member in group.members
            for parameter in self.weights.parameters_of(member.weight)
        }
        self.strength = strength

    def visit(self, number: int, calls: Sequence[LayerCall], flow: Callable[[], None]) -> None:
        """Fold what can be folded, one pair after another."""
        layer, name = self.layers[number], f"{self.name}.{number}"
        sizes = ChannelSizes()
        with sizes.watching(self._wanted(layer, name)):
            flow()

        def run() -> torch.Tensor:
            return calls[0].run(layer, self.before(number, 0))

        expected = run()
        for fold in self._folds(layer, name, run):
            if sizes.knows(fold.columns):
                self._try(layer, name, fold, sizes, lambda: torch.equal(run(), expected))

    def _wanted(self, layer: torch.nn.Module, prefix: str) -> dict[str, torch.nn.Module]:
        """The modules whose inputs matter, by their names in the layer."""
        return {
            name: module
            for name, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear)
            and f"{joined(prefix, name)}.weight" in self.wanted
            and moe_layer(joined(prefix, name)) is None
        }

    def _folds(self, layer: torch.nn.Module, prefix: str, run: Callable[[], torch.Tensor]) -> Iterator[_Fold]:
        """Every pair that may be scaled against each other: norms first, then layers of the same module."""
        wanted, trace = self._wanted(layer, prefix), _traced(layer, run)
        parameters = dict(layer.named_parameters())
        behind_norms = set[str]()
        for name, made in trace.outputs.items():
            own = _own(parameters, name)
            readers = trace.readers(made)
            read = [parameters[f"{reader}.weight"] for reader in readers]
            is_norm = all(parameters[one].dim() == 1 for one in own)
            fits = all(weight.dim() == 2 and weight.shape[1] == made.shape[-1] for weight in read)
            if is_norm and fits and not wanted.keys().isdisjoint(readers):
                behind_norms.update(readers)
                yield _Fold(rows=own, columns=tuple(f"{reader}.weight" for reader in readers))
        for name in wanted:
            if name in behind_norms:
                continue
            columns = parameters[f"{name}.weight"].shape[1]
            for other in _before(layer, name):
                if parameters[f"{other}.weight"].shape[0] == columns:
                    yield _Fold(rows=_own(parameters, other), columns=(f"{name}.weight",))

    def _try(
        self,
        layer: torch.nn.Module,
        prefix: str,
        fold: _Fold,
        sizes: ChannelSizes,
        is_same: Callable[[], bool],
    ) -> None:
        """Scale the parameters, and keep it where the layer computes the same."""
        parameters = {name: layer.get_parameter(name) for name in (*fold.rows, *fold.columns)}
        tensors = {name: self.weights.plain_tensor(joined(prefix, name)) for name in parameters}
        if not all(tensors.values()) or any(
            name in self.found and (self.found[name].rows if own in fold.rows else self.found[name].columns)
            for own, name in tensors.items()
            if name
        ):
            return
        exponents = self._exponents(parameters, fold, sizes)
        before = {name: parameter.data for name, parameter in parameters.items()}
        for name in fold.rows:
            shape = (-1,) if parameters[name].dim() == 1 else (-1, 1)
            parameters[name].data = _times(before[name], -exponents.view(shape))
        for name in fold.columns:
            parameters[name].data = _times(before[name], exponents)
        if (
            not exponents.any()
            or not all(map(_is_exact, before.values(), parameters.values()))
            or not is_same()
        ):
            for name, parameter in parameters.items():
                parameter.data = before[name]
            return
        up, down = (encode((sign * exponents).to(torch.int8).cpu().numpy()) for sign in (1, -1))
        readers = tuple(stored for own in fold.columns if (stored := tensors[own]))
        for own, stored in tensors.items():
            assert stored is not None
            known = self.found.get(stored, Smoothing())
            self.found[stored] = (
                replace(known, rows=down, readers=readers) if own in fold.rows else replace(known, columns=up)
            )

    def _exponents(
        self,
        parameters: Mapping[str, torch.Tensor],
        fold: _Fold,
        sizes: ChannelSizes,
    ) -> torch.Tensor:
        """By which rows are divided and columns multiplied, as whole numbers in float32."""
        inputs, gradients = sizes.of(fold.columns), sizes.of_gradients(fold.columns)
        if gradients is None:
            squares = [parameters[name].to(torch.float32).square().mean(0) for name in fold.columns]
            gradients = torch.stack(squares).amax(0).sqrt()
        scale = self.strength * _log2(inputs) - (1 - self.strength) * _log2(gradients)
        return (scale - scale.mean()).round().clamp(-MOST, MOST)


def _traced(layer: torch.nn.Module, run: Callable[[], torch.Tensor]) -> _Trace:
    """Run a layer, and what its modules with weights of their own read and made."""
    trace = _Trace(inputs={}, outputs={})

    def see(name: str, module: torch.nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and isinstance(output, torch.Tensor):
            trace.inputs[name], trace.outputs[name] = inputs[0], output

    with ExitStack() as block:
        for name, module in layer.named_modules():
            if isinstance(module._parameters.get("weight"), torch.Tensor):
                block.callback(module.register_forward_hook(partial(see, name)).remove)
        run()
    return trace


def _own(parameters: Mapping[str, torch.Tensor], module: str) -> tuple[str, ...]:
    """A module's own parameters, by their names in the layer."""
    return tuple(name for name in parameters if name.rpartition(".")[0] == module)


def _before(layer: torch.nn.Module, name: str) -> list[str]:
    """The linear layers of the same module, the last one first: values before keys, up before gate."""
    parent = name.rpartition(".")[0]
    children = [joined(parent, child) for child, _ in layer.get_submodule(parent).named_children()]
    found = [
        child
        for child in children
        if child != name and isinstance(layer.get_submodule(child), torch.nn.Linear)
    ]
    return found[::-1]


def _log2(magnitudes: torch.Tensor) -> torch.Tensor:
    return magnitudes.clamp_min(max(LEAST * float(magnitudes.max()), 1e-30)).log2()


def _times(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    return values * torch.exp2(exponents).to(values.dtype)


def _is_exact(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether no digit was lost: of small numbers in float16, say."""
    mantissas = torch.frexp(before.float()).mantissa, torch.frexp(after.float()).mantissa
    return torch.equal(*mantissas)
