"""Options of the command line as data.

The models of `vexport.scenario` declare the settings, and mark the settings that are options.
`scripts/generate_settings.py` writes the options into `vexport/cli/generated/settings.json` as
these records, so that `--help` needs neither the models nor pydantic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Headings of the options in help, in their order.
Heading = Literal[
    "Scheme",
    "Comparison",
    "Calibration",
    "Tasks",
    "Prompts",
    "Verdict",
    "vLLM",
    "Servers",
    "Options",
    "Output",
]
# Type of a single value. "other" needs special syntax on the command line.
ValueType = Literal["integer", "number", "boolean", "text", "path", "choice", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRecord:
    """A command-line option for a setting.

    `key` is the setting's name in a scenario and in Python. `names` are the names of the option.
    The last of them may have no dashes: it is then the parameter of the command's function, instead
    of the key. `default` is the default as help shows it, empty if there is nothing to show.
    `metavar` is the value in help; None means click's default.

    `choices` are the values of the type "choice". `low` and `high` are the bounds of a number. A
    number must not equal a bound that is open. A `repeatable` option may be given several times.
    """

    key: str
    names: Sequence[str]
    heading: Heading
    help: str
    default: str = ""
    metavar: str | None = None
    type: ValueType
    choices: Sequence[str] = ()
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False
    repeatable: bool = False
