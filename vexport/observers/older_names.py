"""Methods of observers by the names that llm-compressor 0.8 to 0.10 had, where they mean what exists."""

from collections.abc import Iterable

import torch

from vexport.observers.args import ObserverArgs, strategy_of


class OlderNames(torch.nn.Module):
    """Each observes a value, as it did; ValueError where what it meant has another name now."""

    args: ObserverArgs

    def global_scale(self) -> torch.Tensor | None:
        """The global scale of what was observed."""
        raise NotImplementedError

    def calculate_qparams(self, observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point of a whole tensor."""
        self._require("calculate_qparams", "tensor")
        scale, zero_point = self(observed)
        return scale, zero_point

    def get_qparams_along_dim(
        self, observed: torch.Tensor, dim: int | Iterable[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point of each row of a weight."""
        dims = [dim] if isinstance(dim, int) else list(dim)
        if dims != [0]:
            raise ValueError(f"get_qparams_along_dim: got dim {dim}, need 0, the rows of a weight")
        self._require("get_qparams_along_dim", "channel")
        scale, zero_point = self(observed)
        return scale, zero_point

    def calculate_gparam(self, observed: torch.Tensor) -> torch.Tensor | None:
        """The global scale of a tensor, float32 (1,)."""
        self._require("calculate_gparam", "tensor_group")
        return self.get_global_scale(observed)

    def get_gparam(self, observed: torch.Tensor) -> torch.Tensor | None:
        """The same."""
        return self.calculate_gparam(observed)

    def get_global_scale(self, observed: torch.Tensor | None = None) -> torch.Tensor | None:
        """`global_scale`, of a value that is observed first where there is one."""
        if observed is not None:
            self(observed)
        return self.global_scale()

    def _require(self, method: str, strategy: str) -> None:
        if strategy_of(self.args) != strategy:
            raise ValueError(
                f"{method}: got strategy {strategy_of(self.args)}, need {strategy}; "
                "use `scale, zero_point = observer(value)`, or get_qparams() after observer(value)"
            )
