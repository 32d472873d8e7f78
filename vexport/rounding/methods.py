"""The ways of rounding by name. Adding one is one new file and one entry here, or an entry point."""

from collections.abc import Mapping

from vexport.errors import EnvironmentFault
from vexport.plugins import ROUNDINGS, load_plugin
from vexport.rounding.base import Method
from vexport.rounding.gptq import Gptq
from vexport.rounding.nearest import Nearest
from vexport.rounding.refit import Refit
from vexport.types.rounding import Rounding

METHODS: Mapping[Rounding, Method] = {"nearest": Nearest(), "gptq": Gptq(), "refit": Refit()}


def method_of(name: Rounding) -> Method:
    """The method of a known name, of another package too. Raises EnvironmentFault for one that is none."""
    if name in METHODS:
        return METHODS[name]
    kind = load_plugin(ROUNDINGS, name)
    method = kind() if isinstance(kind, type) else kind
    if not isinstance(method, Method):
        raise EnvironmentFault(
            f"{ROUNDINGS} {name}",
            got=f"{kind!r}, which is no way of rounding",
            need="a class with recipes, target and round (vexport.rounding.base.Method)",
            fix="derive it from vexport.rounding.gptq.Gptq",
        )
    return method
