"""The inputs of experts that a model holds as three-dimensional parameters.

All experts run in a few grouped products, so that no hook sees what enters one of them. While a module of
experts is watched another forward stands in for its own: it makes the same products and tells what went in.
Adding a kind of experts is one new file and one line in `KINDS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vexport.calibration.capture import Forward
from vexport.calibration.experts import grouped, llama4
from vexport.calibration.experts.run import Run, Saw
from vexport.errors import InputError
from vexport.types import LinearPlan

See = Callable[[str, torch.Tensor], None]

# Whether a module is of the kind, and its forward that tells.
KINDS: Sequence[tuple[Callable[[torch.nn.Module], bool], Run]] = (
    (grouped.serves, grouped.run),
    (llama4.serves, llama4.run),
)


def runner_of(module: torch.nn.Module, name: str) -> Run:
    """The forward for a module with stacked weights; InputError where its arithmetic is not known."""
    for serves, run in KINDS:
        if serves(module):
            return run
    raise InputError(
        name,
        got=f"experts of the class {type(module).__name__}",
        need="experts that run by transformers' experts interface, or Llama 4's",
        fix="use a weight-only or dynamic scheme for the experts",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """The watched layers of a module of experts: for each expert those fed by the token (gate and up), and
    those fed by the activation between (down)."""

    name: str
    first: Sequence[Sequence[str]]
    second: Sequence[Sequence[str]]

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        stored: Mapping[str, Sequence[Sequence[str]]],
        layers: Mapping[str, Sequence[LinearPlan]],
    ) -> "ExpertLayers":
        """`stored` has the tensors of each stacked parameter: one for all experts, or one for each."""
        count = module.get_parameter("down_proj").shape[0]
        fed: dict[bool, list[list[str]]] = {
            True: [[] for _ in range(count)],
            False: [[] for _ in range(count)],
        }
        prefix = ""
        for parameter, parts in stored.items():
            for names in parts:
                for position, name in enumerate(names):
                    for layer in layers.get(name, ()):
                        expert = layer.part.expert if layer.part else position
                        fed[parameter == "down_proj"][expert].append(layer.name)
                        prefix = layer.name.rpartition(f".{expert}.")[0]
        return cls(name=prefix, first=fed[False], second=fed[True])

    def forward(
        self,
        run: Callable[[Sequence[object], Mapping[str, object], Saw], tuple[object, torch.Tensor]],
        see: See,
        routed: dict[str, torch.Tensor],
    ) -> Forward:
        """The forward that runs the module by `run` and shows `see` the inputs of the watched layers.

        The number of tokens routed to each expert is added to `routed`.
        """

        def saw(expert: int, tokens: torch.Tensor, between: torch.Tensor) -> None:
            for layer in self.first[expert]:
                see(layer, tokens)
            for layer in self.second[expert]:
                see(layer, between)

        def forward(*args: object, **kwargs: object) -> object:
            output, counts = run(args, kwargs, saw)
            routed[self.name] = routed.get(self.name, 0) + counts.cpu()
            return output

        return forward
