"""The rule book: each rule that vexport applies, with its id and its sentences.

`book.py` defines a rule. Each other module is the table of one family: a check (`config`), or the
inputs and the environment of one room (`calibration`, `environment`). Code passes facts to a rule,
and words are chosen here. `vexport explain ID` shows a rule.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from vexport.rules.book import Rule


@cache
def all_rules() -> Mapping[str, Rule]:
    """Return each rule by its id, in the order of families and tables."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    rules = (rule for module in modules for rule in vars(module).values() if isinstance(rule, Rule))
    return {rule.id: rule for rule in rules}
