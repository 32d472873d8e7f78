"""Scale the input channels of linear layers, so that weights and inputs lose less when rounded.

This is SmoothQuant (arXiv 2211.10438). The weights that read an input are multiplied by the scales
of its channels. The layer that computes the input is divided by the same scales, so the model's
outputs do not change. This layer must be a norm, or a linear layer whose outputs are only
multiplied and added up afterwards. A pair of scaled layers is called a fold.

The scale of channel j is a_j^s / g_j^(1 - s): a_j is the root mean square of the channel, g_j the
root mean square of its gradient, and s the strength. The paper uses the largest magnitudes instead,
which left a larger KL. Scales are powers of two, so that the scaled layers compute the same bits.
Each fold is tried on a row of text and kept only if the bits are the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from vexport.architectures.config import text_config
from vexport.architectures.fusion import moe_layer
from vexport.calibration.data import Samples
from vexport.calibration.gradients import Gradients, GradientSquares, TokenWeigher
from vexport.calibration.inputs import Counted, counted_rows
from vexport.calibration.model import joined
from vexport.calibration.walk import Layer, LayerWalk, Watcher
from vexport.calibration.weights import Weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.smoothed import MAX_EXPONENT, encode, reader_of
from vexport.checkpoint.tensors import read_tensor
from vexport.formats.plan import FusionGroup
from vexport.numerics.ranks import on_first
from vexport.records import OnProgress, Smoothing, silent

# Minimum root mean square of a channel, as a share of the largest root mean square. It replaces
# smaller values, for example of unused channels.
LEAST_MAGNITUDE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fold:
    """Parameters whose rows are divided by the scales, and parameters whose columns are multiplied
    by them.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]


class Smoother:
    """Smooths the inputs of some groups, layer by layer.

    The scales are computed from the inputs of the counted tokens and their gradients. `counted_now`
    returns the counted tokens of the row that runs.
    """

    def __init__(
        self,
        groups: Sequence[FusionGroup],
        strength: float,
        weights: Weights,
        counted_now: Callable[[], Counted],
    ) -> None:
        # The exponents of the scales, by the name of the stored tensor.
        self.smoothing: dict[str, Smoothing] = {}
        self._weights = weights
        self._counted_now = counted_now
        self._strength = strength
        self._parameters = {
            parameter
            for group in groups
            for member in group.members
            for parameter in weights.parameters_of(member.weight)
        }

    def enter(self, layer: Layer) -> None:
        """Add up the squares of a layer's inputs and of their gradients, by channel.

        If several modules read an input, the input is added for each module, but its gradient only
        for the first module.
        """
        self._squares = dict[str, torch.Tensor]()
        self._gradients = dict[str, torch.Tensor]()
        # The last input, and its squares.
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        for name, module in self._smoothed_modules(layer).items():
            add_input = partial(self._add_input, name)
            layer.watching.callback(module.register_forward_pre_hook(add_input).remove)

    def row(self, index: int, hidden: torch.Tensor) -> None:
        """Do nothing: the hooks have already seen the row."""

    def _add_input(
        self, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        value = inputs[0]
        counted = self._counted_now()

        def squares(value: torch.Tensor) -> torch.Tensor:
            return _squared(counted_rows(value, counted, name))

        if self._last is None or self._last[0] is not value:
            self._last = value, squares(value.detach())
            if value.requires_grad:
                add_gradient = partial(_add, self._gradients, name)
                value.register_hook(lambda gradient: add_gradient(squares(gradient)))  # type: ignore[no-untyped-call]
        _add(self._squares, name, self._last[1])

    def leave(self, layer: Layer) -> None:
        """Try all folds of the layer that smooth a wanted input."""
        self._last = None
        rerun = partial(layer.run_again, 0)
        expected = rerun()
        for fold in self._folds(layer, rerun):
            if any(name.removesuffix(".weight") in self._squares for name in fold.columns):
                self._try_fold(layer, fold, lambda: torch.equal(rerun(), expected))

    def _smoothed_modules(self, layer: Layer) -> dict[str, torch.nn.Module]:
        """Return the modules whose inputs are smoothed, by their names in the layer."""
        return {
            name: module
            for name, module in layer.module.named_modules()
            if isinstance(module, torch.nn.Linear)
            and f"{joined(layer.name, name)}.weight" in self._parameters
            and moe_layer(joined(layer.name, name)) is None
        }

    def _folds(self, layer: Layer, rerun: Callable[[], torch.Tensor]) -> Iterator[_Fold]:
        """Yield the folds to try: first norms with the linear layers that read them, then pairs of
        linear layers in the same module.
        """
        wanted = self._smoothed_modules(layer)
        inputs, outputs = _trace_modules(layer.module, rerun)
        parameters = dict(layer.module.named_parameters())
        behind_norms = set[str]()
        for name, output in outputs.items():
            own = _parameters_of(parameters, name)
            readers = [
                reader
                for reader, value in inputs.items()
                if value.data_ptr() == output.data_ptr() and value.shape[-1] == output.shape[-1]
            ]
            read = [parameters[f"{reader}.weight"] for reader in readers]
            is_norm = all(parameters[parameter].dim() == 1 for parameter in own)
            fits = all(weight.dim() == 2 and weight.shape[1] == output.shape[-1] for weight in read)
            if is_norm and fits and not wanted.keys().isdisjoint(readers):
                behind_norms.update(readers)
                yield _Fold(rows=own, columns=tuple(f"{reader}.weight" for reader in readers))
        for name in wanted:
            if name in behind_norms:
                continue
            columns = parameters[f"{name}.weight"].shape[1]
            for other in _sibling_linears(layer.module, name):
                if parameters[f"{other}.weight"].shape[0] == columns:
                    yield _Fold(rows=_parameters_of(parameters, other), columns=(f"{name}.weight",))

    def _try_fold(self, layer: Layer, fold: _Fold, is_same: Callable[[], bool]) -> None:
        """Scale the parameters, and undo this if the layer's output changes."""
        parameters = {
            name: layer.module.get_parameter(name) for name in (*fold.rows, *fold.columns)
        }
        tensors = {
            name: self._weights.plain_tensor(joined(layer.name, name)) for name in parameters
        }
        if not all(tensors.values()) or any(
            name in self.smoothing
            and (
                self.smoothing[name].rows
                if name_in_layer in fold.rows
                else self.smoothing[name].columns
            )
            for name_in_layer, name in tensors.items()
            if name
        ):
            return
        exponents = self._exponents(parameters, fold)
        before = {name: parameter.data for name, parameter in parameters.items()}
        for name in fold.rows:
            shape = (-1,) if parameters[name].dim() == 1 else (-1, 1)
            parameters[name].data = _scaled(before[name], -exponents.view(shape))
        for name in fold.columns:
            parameters[name].data = _scaled(before[name], exponents)
        if (
            not exponents.any()
            or not all(map(_is_exact, before.values(), parameters.values()))
            or not is_same()
        ):
            for name, parameter in parameters.items():
                parameter.data = before[name]
            return
        up, down = (encode((sign * exponents).to(torch.int8).cpu().numpy()) for sign in (1, -1))
        readers = tuple(
            stored for name_in_layer in fold.columns if (stored := tensors[name_in_layer])
        )
        for name_in_layer, stored in tensors.items():
            assert stored is not None
            known = self.smoothing.get(stored, Smoothing())
            self.smoothing[stored] = (
                replace(known, rows=down, readers=readers)
                if name_in_layer in fold.rows
                else replace(known, columns=up)
            )

    def _exponents(self, parameters: Mapping[str, torch.Tensor], fold: _Fold) -> torch.Tensor:
        """Return the exponent of each channel's scale: whole numbers, float32 (channels,).

        Rows are divided by 2**exponent, and columns are multiplied by it.
        """
        inputs = _root_mean_squares(self._squares, fold.columns)
        gradients = _root_mean_squares(self._gradients, fold.columns)
        assert inputs is not None
        if gradients is None:  # the model could not be differentiated
            squares = [parameters[name].to(torch.float32).square().mean(0) for name in fold.columns]
            gradients = torch.stack(squares).amax(0).sqrt()
        scale = self._strength * _log2(inputs) - (1 - self._strength) * _log2(gradients)
        return (scale - scale.mean()).round().clamp(-MAX_EXPONENT, MAX_EXPONENT)


def _squared(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, values.shape[-1]).to(torch.float32).square().sum(0)


def _add(sums: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value


def _root_mean_squares(
    squares: Mapping[str, torch.Tensor], weights: Iterable[str]
) -> torch.Tensor | None:
    """Return the root mean square of each input channel, (channels,) float32, up to a factor.

    If the weights have different inputs, return the maximum over the inputs. Returns None if no
    input was observed.
    """
    names = (name.removesuffix(".weight") for name in weights)
    channels = [squares[name] for name in names if name in squares]
    return torch.stack(channels).amax(0).sqrt() if channels else None


def _trace_modules(
    layer: torch.nn.Module, run: Callable[[], torch.Tensor]
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Run a layer, and return the inputs and outputs of its modules with weights, by name."""
    inputs_of = dict[str, torch.Tensor]()
    outputs = dict[str, torch.Tensor]()

    def record(
        name: str, module: torch.nn.Module, inputs: tuple[object, ...], output: object
    ) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and isinstance(output, torch.Tensor):
            inputs_of[name], outputs[name] = inputs[0], output

    with ExitStack() as block:
        for name, module in layer.named_modules():
            if isinstance(module._parameters.get("weight"), torch.Tensor):
                block.callback(module.register_forward_hook(partial(record, name)).remove)
        run()
    return inputs_of, outputs


def _parameters_of(parameters: Mapping[str, torch.Tensor], module: str) -> tuple[str, ...]:
    """Return the parameters directly in a module, by their names in the layer."""
    return tuple(name for name in parameters if name.rpartition(".")[0] == module)


def _sibling_linears(layer: torch.nn.Module, name: str) -> list[str]:
    """Return the other linear layers of the same module, last first: values before keys."""
    parent = name.rpartition(".")[0]
    children = [joined(parent, child) for child, _ in layer.get_submodule(parent).named_children()]
    found = [
        child
        for child in children
        if child != name and isinstance(layer.get_submodule(child), torch.nn.Linear)
    ]
    return found[::-1]


def _log2(magnitudes: torch.Tensor) -> torch.Tensor:
    return magnitudes.clamp_min(max(LEAST_MAGNITUDE * float(magnitudes.max()), 1e-30)).log2()


def _scaled(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    return values * torch.exp2(exponents).to(values.dtype)


def _is_exact(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return True if scaling lost no digit. Small numbers in float16 can lose digits."""
    return torch.equal(torch.frexp(before.float()).mantissa, torch.frexp(after.float()).mantissa)


# Token weights are averages over many tokens, so one prediction in two is enough. With a large
# vocabulary, all predictions take as long as all layers. One prediction in four left a larger KL
# (Gemma 3 270M: by 0.003 nats of 0.064, at a standard error of 0.0014).
PREDICTION_STEP = 2


def find_smoothing(
    walk: LayerWalk,
    samples: Samples,
    *,
    smoothed: Sequence[FusionGroup],
    strength: float,
    weighs_tokens: bool,
    on_progress: OnProgress = silent,
) -> tuple[Mapping[str, Smoothing], GradientSquares]:
    """Return the smoothing of the inputs of the groups `smoothed`, and mean squares of gradients.

    The mean squares are the input of `token_weights_of`. They are empty unless `weighs_tokens`.
    Both results are computed from the same gradients of all `samples`, on the first rank. Raises
    the errors of `Gradients.run`.
    """

    def find() -> tuple[Mapping[str, Smoothing], GradientSquares]:
        smoother = Smoother(smoothed, strength, walk.weights, walk.counted_now)
        weigher = TokenWeigher([len(ids) for ids in samples.token_ids], walk.counted_now)
        watchers: list[Watcher] = []
        if weighs_tokens:
            watchers.append(weigher)
        if smoothed:
            watchers.append(smoother)
        step = 1 if smoothed else PREDICTION_STEP
        Gradients(walk, watchers, prediction_step=step).run(samples, on_progress)
        return smoother.smoothing, weigher.mean_squares()

    return on_first(find)


# If the powers of two cancel exactly for some tokens, they cancel for all tokens. So the check
# needs only a few tokens of the vocabulary.
CHECKED_TOKENS = 16


@torch.no_grad()
def layers_changed_by(
    index: SourceIndex, smoothing: Mapping[str, Smoothing], device: str
) -> list[str]:
    """Return the decoder layers whose output changes by smoothing.

    Smoothed tensors outside the decoder layers and in experts cannot be checked. Their names are
    returned, too.

    Raises InputError for a model that cannot run layer by layer and for a tensor that does not fit
    its exponents. Raises CheckpointFailed if a hidden state of the source is not finite.
    """
    size = text_config(index.config).get("vocab_size")
    vocabulary = size if isinstance(size, int) and size > 0 else 1
    ids = tuple(number * vocabulary // CHECKED_TOKENS for number in range(CHECKED_TOKENS))
    samples = Samples(token_ids=(ids,), rows=(1,))
    walk = LayerWalk(index, device=device)
    with reader_of(smoothing) as reader, walk.start(samples) as hidden:
        watcher = _OutputComparison(walk, smoothing, reader)
        walk.forward(hidden, watcher)
    return [*watcher.changed, *sorted(smoothing.keys() - watcher.applied)]


class _OutputComparison:
    """Compares the output of each layer with the output of the smoothed layer, for a single row.

    `changed` has the names of layers with different outputs, `applied` the smoothed tensors.
    """

    def __init__(self, walk: LayerWalk, smoothing: Mapping[str, Smoothing], reader: Reader) -> None:
        self.changed: list[str] = []
        self.applied: set[str] = set()
        self._walk = walk
        self._smoothing = smoothing
        self._reader = reader

    def enter(self, layer: Layer) -> None:
        """Keep the layer's input."""
        self._input = layer.input_of(0)

    def row(self, index: int, hidden: torch.Tensor) -> None:
        """Keep the layer's output."""
        self._expected = hidden

    def leave(self, layer: Layer) -> None:
        """Smooth the layer and compare."""
        smoothed = set(self._replace_parameters(layer))
        if smoothed and not torch.equal(layer.run(0, self._input), self._expected):
            self.changed.append(layer.name)
        self.applied |= smoothed

    def _replace_parameters(self, layer: Layer) -> Iterator[str]:
        """Replace the layer's parameters by the smoothed tensors, and yield the tensors' names."""
        tensors = self._walk.index.tensors
        for name, parameter in layer.module.named_parameters():
            full_name = joined(layer.name, name)
            stored = self._walk.weights.plain_tensor(full_name)
            if stored is None or stored not in self._smoothing or stored not in tensors:
                continue
            # The few tokens may not reach an expert, so smoothed experts cannot be checked.
            if moe_layer(full_name.rpartition(".")[0]) is None:
                value = read_tensor(self._reader, tensors[stored])
                parameter.data = value.to(parameter.device, parameter.dtype, copy=True)
                yield stored
