"""vexport from Python: the commands as functions, with the types that the command line uses.

    from vexport.api import check, quantize
    quantize("MODEL", "OUT", scheme="W4A16", group_size=64)
    assert check("OUT").ok

Every function raises what the command line prints: InputError for what was given, EnvironmentFault
for what is missing or has died, CheckpointFailed where there is no report to return. Engines are
other processes. `eval` is `evaluate` and `list` is `entries`, whose names hide no builtin;
`plan_schemes` is `plan` without a scheme. What the command line notes is a Python warning. What is
not used is not imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vexport.api.checking import check
    from vexport.api.engines import Engine, compare, evaluate, load, run
    from vexport.api.making import quantize, repair
    from vexport.api.planning import plan, plan_schemes
    from vexport.api.reading import entries, explain, report, verdict
    from vexport.scenario import Calibration, Evaluate, Rule, Serve

__all__ = [
    "Calibration",
    "Engine",
    "Evaluate",
    "Rule",
    "Serve",
    "check",
    "compare",
    "entries",
    "evaluate",
    "explain",
    "load",
    "plan",
    "plan_schemes",
    "quantize",
    "repair",
    "report",
    "run",
    "verdict",
]
# Names by the module that has them, and what commands are called whose names are builtins.
_MODULES = {
    "vexport.api.planning": ("plan", "plan_schemes"),
    "vexport.api.making": ("quantize", "repair"),
    "vexport.api.checking": ("check",),
    "vexport.api.reading": ("entries", "explain", "report", "verdict"),
    "vexport.api.engines": ("Engine", "compare", "evaluate", "load", "run"),
    "vexport.scenario": ("Calibration", "Evaluate", "Rule", "Serve"),
}
_COMMANDS = {"eval": "evaluate", "list": "entries"}


def __getattr__(name: str) -> object:
    wanted = _COMMANDS.get(name, name)
    for module, names in _MODULES.items():
        if wanted in names:
            return getattr(import_module(module), wanted)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_COMMANDS))
