"""How much a model's answers depend on what each layer makes of a token, by the token's place in the text.

Most attention rests on the first token of a text: an error of its key or value changes every answer, hundreds
of times as much as that of any later one; behind attention it counts for little. GPTQ takes all tokens for
equal. The Fisher information weighs each by the square of the gradient behind the layer (GuidedQuant, arXiv
2505.07004). Averaged over places in the text, a few rows show it; the root of the mean left less of the KL
divergence than the mean (docs/rounding.md).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from vexport.calibration.capture import LayerCall
from vexport.calibration.data import Samples
from vexport.calibration.experts.kinds import arithmetic_of
from vexport.calibration.fisher import UpAndBack
from vexport.calibration.forward import make_batches
from vexport.calibration.hidden import hidden_states
from vexport.calibration.layerwise import OnLayer
from vexport.calibration.model import joined
from vexport.calibration.watch import Watched
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.numerics.ranks import on_first

# A token counts at most so many octaves more or less than the mean.
MOST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """The mean square of the gradient behind each module, by octaves of the token's place in its row.

    The octaves are the tokens 0, 1, 2 and 3, 4 to 7 and so on. Empty where nothing was looked at, or the
    model could not be differentiated.
    """

    modules: Mapping[str, tuple[float, ...]]

    def of(self, modules: Sequence[str], tokens: int) -> torch.Tensor | None:
        """By how much each of a row's tokens counts for these modules together, (tokens,) float32.

        They go by the root mean square of the gradient, and their mean is about 1; powers of two, so that a
        16-bit input times its weight loses no digit. None where nothing is known of any.
        """
        known = [torch.tensor(self.modules[name]) for name in modules if name in self.modules]
        if not known:
            return None
        length = min(map(len, known))
        gradients = torch.stack([one[:length] for one in known]).sum(0).sqrt()
        weights = gradients[octaves(tokens).clamp_max(length - 1)]
        mean = weights.mean()
        return torch.exp2((weights / mean).log2().round().clamp(-MOST, MOST)) if mean > 0 else None


# All tokens count the same.
EQUAL = TokenWeights(modules={})


def octaves(tokens: int) -> torch.Tensor:
    """The octave of each place in a row of so many tokens, (tokens,)."""
    places = torch.arange(tokens, dtype=torch.float64)
    return torch.frexp(places).exponent.to(torch.int64)


def find_token_weights(
    index: SourceIndex,
    reader: Reader,
    samples: Samples,
    *,
    on_layer: OnLayer,
    trust_remote_code: bool,
    device: str,
) -> TokenWeights:
    """The weights for the linear layers and experts of a source, of a few rows.

    Torchrun's first rank finds them for all.

    Raises what `vexport.calibration.forward.watch` raises.
    """
    batches = make_batches(samples, 1)
    nothing = Watched(inputs={}, importance={}, layers={})

    def find() -> TokenWeights:
        with torch.no_grad(), hidden_states() as hidden:
            model = _Weighed(
                index, reader, batches, hidden, nothing, trust_remote_code=trust_remote_code, device=device
            )
            model.prepare()
            model.run_and_back(on_layer)
        return model.found()

    return on_first(find)


class _Weighed(UpAndBack):
    """Runs the source, and adds up the gradients behind its modules."""

    def prepare(self) -> None:
        """Nothing was seen yet: sums of squares and how many, (2, octaves), by module."""
        self._sums: dict[str, torch.Tensor] = {}
        self._lengths = {batch.ids.numel() for batch in self.batches}

    def visit(self, number: int, calls: Sequence[LayerCall], flow: Callable[[], None]) -> None:
        """Add up a layer's."""
        prefix = f"{self.name}.{number}"
        with ExitStack() as block:
            for name, module in self.layers[number].named_modules():
                if isinstance(module, torch.nn.Linear) or arithmetic_of(module) is not None:
                    handle = module.register_forward_hook(partial(self._see, joined(prefix, name)))
                    block.callback(handle.remove)
            flow()

    def found(self) -> TokenWeights:
        """The means of what was seen."""
        return TokenWeights(
            modules={
                name: tuple((squares / counts.clamp_min(1)).tolist())
                for name, (squares, counts) in self._sums.items()
                if bool(torch.isfinite(squares).all())
            }
        )

    def _see(self, name: str, module: torch.nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(partial(self._add, name))  # type: ignore[no-untyped-call]

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        squares = gradient.reshape(-1, gradient.shape[-1]).to("cpu", torch.float32).square().sum(-1)
        if len(squares) not in self._lengths:  # not one of each token
            return
        if name not in self._sums:
            self._sums[name] = torch.zeros(2, int(octaves(max(self._lengths))[-1]) + 1)
        both = torch.stack([squares, torch.ones(len(squares))])
        self._sums[name].index_add_(1, octaves(len(squares)), both)
