"""Rules of the command line and of the Python interface."""

from vexport.rules.book import Rule

UNKNOWN_RULE = Rule(
    "usage/unknown-rule",
    got="{id}, which is the ID of no rule{hint}",
    do="take the ID at the end of a finding, or see the list with `vexport explain rulebook`",
)
RULE_OF_NO_CHECK = Rule(
    "usage/rule-of-no-check",
    got="{id}, which is no rule on the files of a checkpoint, so it cannot be ignored",
    do="remove it: refusals by vLLM and faults of the environment always count",
)

# The file of defaults.
UNKNOWN_TABLE = Rule(
    "usage/unknown-table", got="an unknown table", need="a command", do="name a command{hint}"
)
FORBIDDEN_DEFAULT = Rule(
    "usage/forbidden-default",
    got="an option that may run code, change files or silence a rule is only valid on the command "
    "line",
    do="remove it from the file",
)
UNKNOWN_OPTION = Rule(
    "usage/unknown-option", got="an unknown option", need="an option of vexport", do="{remedy}"
)
TABLE = Rule("usage/table", got="{value!r}", need="a table", do="write [tool.vexport]")
SWITCH = Rule("usage/switch", got="{value!r}", need="true or false", do="correct the value")
DEFAULT = Rule(
    "usage/default",
    got="{value!r}",
    need="a text, a number, or a list of them",
    do="correct the value",
)

# Arguments of functions.
ARGUMENT = Rule("usage/argument", got="{reason}")
NAME = Rule(
    "usage/name",
    got="{value!r}",
    need="a name or a path, as text or a Path",
    do="correct the value",
)
ONE_GPU = Rule(
    "usage/one-gpu",
    got="{count:# compute capability/compute capabilities}",
    need="one GPU",
    do="name one GPU",
)
