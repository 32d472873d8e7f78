"""The observer: it sees tensors, keeps a range and answers with quantization parameters."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import TypedDict

import torch

from vexport.observers.args import ObserverArgs
from vexport.observers.flatten import flatten_for_calibration
from vexport.observers.qparams import global_scale_of, scale_and_zero_point

Range = tuple[torch.Tensor, torch.Tensor]


class QParamsDict(TypedDict):
    """Scale (float32, per group), zero point (int32, same shape), global scale (float32 (1,) or None)."""

    scale: torch.Tensor
    zero_point: torch.Tensor
    global_scale: torch.Tensor | None


class Observer(torch.nn.Module):
    """Base of all observers.

    `base_name` says what is observed ("weight", "input", "output", "q", "k", "v"); `args` are the
    quantization arguments. A subclass says how a new range is combined with what was seen before.
    """

    def __init__(self, base_name: str, args: ObserverArgs) -> None:
        super().__init__()
        self.base_name = base_name
        self.args = args
        self.low: torch.Tensor | None = None
        self.high: torch.Tensor | None = None
        self.shared_global_scale: torch.Tensor | None = None
        self.tokens = 0

    @property
    def has_statistics(self) -> bool:
        """Whether anything was observed yet."""
        return self.low is not None

    @property
    def strategy(self) -> str:
        """Which elements share a scale, by compressed-tensors' name."""
        return str(getattr(self.args.strategy, "value", self.args.strategy))

    def forward(self, observed: torch.Tensor) -> "Observer":
        """Observe a tensor; an empty one changes nothing."""
        if observed.numel():
            self.record_observed_tokens(observed)
            self.update_statistics_from_observed(flatten_for_calibration(observed, self.base_name, self.args))
        return self

    def record_observed_tokens(self, observed: torch.Tensor) -> None:
        """Count the tokens of an activation (..., hidden); a weight has none."""
        if self.base_name != "weight":
            self.tokens += observed.numel() // observed.shape[-1]

    def update_statistics_from_observed(self, observations: torch.Tensor) -> None:
        """Take in observations of shape (num_observations, *qparam_shape, group_size)."""
        low, high = torch.aminmax(observations, dim=-1)
        self.low, self.high = self.combine(low.amin(0).to(torch.float32), high.amax(0).to(torch.float32))

    @abstractmethod
    def combine(self, low: torch.Tensor, high: torch.Tensor) -> Range:
        """The range after a new observation of the range [low, high]."""

    def range(self) -> Range:
        """What was seen: (low, high), float32, shape qparam_shape. Raises ValueError when nothing was."""
        if self.low is None or self.high is None:
            raise ValueError(
                f"{self.base_name} observer: got no observation, need one before its range is asked"
            )
        return self.low, self.high

    def global_scale(self) -> torch.Tensor | None:
        """The shared global scale, else this tensor's own; None for strategies without one."""
        if self.strategy != "tensor_group":
            return None
        return (
            self.shared_global_scale
            if self.shared_global_scale is not None
            else global_scale_of(*self.range())
        )

    def get_qparams(self) -> QParamsDict:
        """Scale, zero point and global scale of what was observed."""
        low, high = self.range()
        global_scale = self.global_scale()
        scale, zero_point = scale_and_zero_point(low, high, self.args, global_scale)
        return QParamsDict(scale=scale, zero_point=zero_point, global_scale=global_scale)

    def reset(self) -> None:
        """Forget everything seen, the token count and any shared global scale."""
        self.low = self.high = self.shared_global_scale = None
        self.tokens = 0

    @staticmethod
    def fuse(observers: "Iterable[Observer]") -> None:
        """Let layers that run as one parameter share what that parameter has once.

        Strategy tensor_group shares the global scale of the largest value seen, strategy tensor the
        union of the ranges; other strategies share nothing.
        """
        members = list(observers)
        _share_global_scale([observer for observer in members if observer.strategy == "tensor_group"])
        _share_range([observer for observer in members if observer.strategy == "tensor"])


def _share_global_scale(observers: list[Observer]) -> None:
    if observers:
        shared = torch.stack([global_scale_of(*observer.range()) for observer in observers]).amin(0)
        for observer in observers:
            observer.shared_global_scale = shared


def _share_range(observers: list[Observer]) -> None:
    if observers:
        low = torch.stack([observer.range()[0] for observer in observers]).amin(0)
        high = torch.stack([observer.range()[1] for observer in observers]).amax(0)
        for observer in observers:
            observer.low, observer.high = low, high
