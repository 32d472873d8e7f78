"""Rules of the command line and of the Python interface."""

from vexport.rules.book import Rule

UNKNOWN_RULE = Rule(
    "usage/unknown-rule",
    got="{id}, which is the ID of no rule{hint}",
    do="take the ID at the end of a finding, or see the list with `vexport explain rules`",
)
RULE_OF_NO_CHECK = Rule(
    "usage/rule-of-no-check",
    got="{id}, which is no rule on the files of a checkpoint, so it cannot be ignored",
    do="remove it: refusals by vLLM and faults of the environment always count",
)
