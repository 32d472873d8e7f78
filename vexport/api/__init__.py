"""vexport from Python: the commands as functions, with the types that the command line uses.

    from vexport.api import check, quantize
    quantize("MODEL", "OUT", scheme="W4A16", group_size=64)
    assert check("OUT").ok

The functions raise the errors that the command line prints: InputError for wrong input,
EnvironmentFault if a part of the environment is missing or has died, and CheckpointFailed if a
checkpoint fails before there is a report on it. Arguments that contradict each other raise
ValueError. Engines run in other processes. The command `eval` is the function `evaluate`, and
`list` is `entries`, because `eval` and `list` are builtins. `evaluate_all` and `load_all` take
several checkpoints, as the commands do. `explain_all` is `explain` without a name, `plan_schemes`
is `plan` without a scheme, `startup_log` and `load_with_log` are `load --log`, `compare_variants`
is `compare --serve`, `compare_versions` is `compare --versions`, and `history` is `report` with
several results. Notes are Python warnings, unless `on_note` receives them.
Modules are imported when their functions are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vexport.api.checking import check
    from vexport.api.engine import Engine
    from vexport.api.engines import (
        compare,
        compare_variants,
        compare_versions,
        evaluate,
        evaluate_all,
        run,
    )
    from vexport.api.loading import load, load_all, load_with_log, startup_log
    from vexport.api.making import quantize
    from vexport.api.planning import plan, plan_schemes
    from vexport.api.reading import entries, explain, explain_all, history, report, verdict
    from vexport.api.repairing import repair
    from vexport.scenario import Calibration, Evaluate, Rule, Serve

__all__ = [
    "Calibration",
    "Engine",
    "Evaluate",
    "Rule",
    "Serve",
    "check",
    "compare",
    "compare_variants",
    "compare_versions",
    "entries",
    "evaluate",
    "evaluate_all",
    "explain",
    "explain_all",
    "history",
    "load",
    "load_all",
    "load_with_log",
    "plan",
    "plan_schemes",
    "quantize",
    "repair",
    "report",
    "run",
    "startup_log",
    "verdict",
]
# Public names by defining module.
_MODULES = {
    "vexport.api.planning": ("plan", "plan_schemes"),
    "vexport.api.making": ("quantize",),
    "vexport.api.repairing": ("repair",),
    "vexport.api.checking": ("check",),
    "vexport.api.reading": ("entries", "explain", "explain_all", "history", "report", "verdict"),
    "vexport.api.engine": ("Engine",),
    "vexport.api.loading": ("load", "load_all", "load_with_log", "startup_log"),
    "vexport.api.engines": (
        "compare",
        "compare_variants",
        "compare_versions",
        "evaluate",
        "evaluate_all",
        "run",
    ),
    "vexport.scenario": ("Calibration", "Evaluate", "Rule", "Serve"),
}
# Functions by command name, if the command is named like a builtin.
_COMMANDS = {"eval": "evaluate", "list": "entries"}


def __getattr__(name: str) -> object:
    wanted = _COMMANDS.get(name, name)
    for module, names in _MODULES.items():
        if wanted in names:
            return getattr(import_module(module), wanted)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_COMMANDS))
