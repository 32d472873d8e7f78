"""Import the base classes of compressed-tensors' observers without its slow import of transformers.

`match_named_modules` of compressed-tensors skips instances of `InternalModule`, so observers must
use this base class and not a copy. Each class is loaded directly from its file, without the rest of
the package. The module keeps its real name, so that a later import of compressed-tensors finds the
same class.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    class InternalModule(torch.nn.Module):
        """Module that is not part of the model and that configs do not target."""

    class RegistryMixin:
        """Class whose subclasses are registered under names."""


PACKAGE = "compressed_tensors"


def _loaded_alone(name: str) -> ModuleType:
    """Return a module of compressed-tensors, loaded without the packages that contain it."""
    if name in sys.modules:
        return sys.modules[name]
    package = find_spec(PACKAGE)
    assert package is not None, "compressed-tensors is a requirement"
    assert package.origin is not None
    file = Path(package.origin).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


if not TYPE_CHECKING:
    InternalModule = _loaded_alone("compressed_tensors.utils.internal").InternalModule
    RegistryMixin = _loaded_alone("compressed_tensors.registry.registry").RegistryMixin
