"""A torch device written in Python, for tests without a GPU.

numpy cannot read its tensors, and operations refuse to mix them with CPU tensors. Its arithmetic is
the CPU's, so that a code path for GPUs gives the same codes.
"""

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.forked import command
from vexport.calibration import Samples

NAME = "second"
TEXT = Samples(token_ids=((1, 2, 3, 4),), rows=(1,))
COPIES = ("aten::copy_", "aten::_to_copy", "aten::_copy_from")


class Second(torch.Tensor):
    """Tensor on the device. `host` has its values."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Second":
        made: Second = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.host = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run(op, *args, **(kwargs or {}))

    def tolist(self) -> Any:
        return self.host.tolist()


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the values. Raise RuntimeError if it also has a CPU tensor."""
    name, here = op._schema.name, dict[int, Second]()
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Second):
            here[id(leaf.host)] = leaf
        elif isinstance(leaf, torch.Tensor) and leaf.dim() and name not in COPIES:
            raise RuntimeError(
                f"{name}: got tensors of {NAME} and of {leaf.device}, need one device"
            )
    own, keywords = pytree.tree_map(_down, (args, kwargs))
    if name in ("aten::copy_", "aten::_copy_from"):
        target, source = own[:2] if name == "aten::copy_" else own[1::-1]
        target.copy_(source)
        return args[0 if name == "aten::copy_" else 1]
    if name == "aten::histc":  # the CPU's operation does not support integers
        own = (own[0].float(), *own[1:])
    made = op(*own, **keywords)
    if keywords.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
        return made
    return pytree.tree_map(lambda value: _up(value, here), made)


def _up(value: object, here: dict[int, Second]) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return here[id(value)] if id(value) in here else Second(value)


def _down(value: object) -> object:
    if isinstance(value, Second):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) else value


def register() -> object:
    """Register the device in torch. It exists as long as the returned library."""
    _setup_privateuseone_for_python_backend(NAME)
    library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(run, "PrivateUse1")
    make = torch.tensor

    def tensor(*values: Any, device: str | None = None, **keywords: Any) -> torch.Tensor:
        made = make(*values, **keywords)  # torch.tensor cannot create tensors on this device
        return made if device is None else made.to(device)

    setattr(torch, "tensor", tensor)  # noqa: B010
    return library


def on_second_device(*words: object) -> None:
    """Run a vexport command that may use the device."""
    registered = register()
    command(*words)
    del registered
