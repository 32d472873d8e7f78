"""Where calibration runs."""

import torch

from vexport.errors import InputError
from vexport.errors.escaping import first_line


def default_device() -> str:
    """A GPU where torch has one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_device(name: str) -> None:
    """InputError where torch does not know the device or cannot put a tensor on it."""
    try:
        torch.empty(1, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"device {name!r}",
            got=f"no use of it ({first_line(error)})",
            need="a device that this torch can use, as cpu or cuda:0",
            fix="name another, or install the torch for it",
        ) from None
