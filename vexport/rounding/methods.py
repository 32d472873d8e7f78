"""The ways of rounding by name. Adding one is one new file and one entry here."""

from collections.abc import Mapping

from vexport.rounding.base import Method
from vexport.rounding.gptq import Gptq
from vexport.rounding.nearest import Nearest
from vexport.rounding.refit import Refit
from vexport.types.rounding import Rounding

METHODS: Mapping[Rounding, Method] = {"nearest": Nearest(), "gptq": Gptq(), "refit": Refit()}
