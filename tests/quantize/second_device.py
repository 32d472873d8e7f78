"""A torch device written in Python, for tests without a GPU.

numpy cannot read its tensors, and operations refuse to mix them with CPU tensors. Its arithmetic is
the CPU's, so that a code path for GPUs gives the same codes.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.forked import command
from vexport.calibration import Samples
from vexport.calibration.walk import Layer, LayerWalk
from vexport.calibration.weights import ParameterValue, Weights
from vexport.checkpoint.index import read_index
from vexport.errors import InputError

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


class ParameterRecorder:
    """Watcher that keeps each layer's parameters in main memory, or interrupts the walk."""

    def __init__(self, *, interrupts: bool = False) -> None:
        self.of_layers: list[list[torch.Tensor]] = []
        self._interrupts = interrupts

    def enter(self, layer: Layer) -> None:
        if self._interrupts:
            raise KeyboardInterrupt
        self.of_layers.append([value.detach().cpu() for value in layer.module.parameters()])

    def row(self, index: int, hidden: torch.Tensor) -> None:
        pass

    def leave(self, layer: Layer) -> None:
        pass


def read_ahead(device: str, whole: Path, broken: Path) -> None:
    """Walk through two models on a device, and print JSON.

    For the whole model, it has the threads that read layers, whether the weights equal the file's,
    and the threads that remain after an interrupted walk. For the broken model, it has the error.
    """
    registered = register() if device == NAME else None
    threads, read = list[str](), Weights.read

    def read_noting_thread(*words: object) -> list[ParameterValue]:
        threads.append(threading.current_thread().name)
        into: Callable[..., list[ParameterValue]] = read
        return into(*words)

    setattr(Weights, "read", read_noting_thread)  # noqa: B010
    walk, plain = LayerWalk(read_index(whole), device=device), LayerWalk(read_index(whole))
    expected, made = ParameterRecorder(), ParameterRecorder()
    for layer_walk, watcher in ((plain, expected), (walk, made)):
        with layer_walk.start(TEXT) as hidden:
            layer_walk.forward(hidden, watcher)
    equal = [
        all(map(torch.equal, values, others))
        for values, others in zip(made.of_layers, expected.of_layers, strict=True)
    ]
    readers = sorted(threads)
    try:
        with walk.start(TEXT) as hidden:
            walk.forward(hidden, ParameterRecorder(interrupts=True))
    except KeyboardInterrupt:
        left = [
            thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")
        ]
    reached = ParameterRecorder()
    try:
        walk = LayerWalk(read_index(broken), device=device)
        with walk.start(TEXT) as hidden:
            walk.forward(hidden, reached)
    except InputError as error:
        message = str(error)
    del registered
    found = {
        "readers": readers,
        "equal": equal,
        "left": left,
        "reached": len(reached.of_layers),
        "error": message,
    }
    print(json.dumps(found))
