"""Which watched layers each expert of a module feeds, and the forward that shows their inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vexport.calibration.capture import Forward
from vexport.calibration.experts.run import Saw
from vexport.types import LinearPlan

See = Callable[[str, torch.Tensor], None]


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
