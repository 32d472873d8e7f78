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

# Options that do not go together.
REQUIRED = Rule("usage/required", need="{needed}", do="see --help")
NEEDS_OPTION = Rule(
    "usage/needs-option", got="used without {other}", do="add {other}, or remove it"
)
SECOND_CHECKPOINT = Rule(
    "usage/second-checkpoint",
    got="a second model ({second})",
    need="one model, with --schemes, --serve or --versions",
    do="run `vexport eval {second} --baseline {first}` to compare two checkpoints",
)
EXCLUDED = Rule("usage/excluded", got="cannot be used with {other}", do="{remedy}")
FORMAT = Rule("usage/format", got="{format}", need="{formats}", do="choose another --format")
TEXT_OF_RESULTS = Rule(
    "usage/text-of-results",
    got="lm-eval's results",
    need="a checkpoint or an address: both models read the text",
    do="give a checkpoint or an address instead of the results, or use --task",
)

# Names.
NO_USER = Rule("usage/no-user", got="no such user on this machine", do="write the full path")
UNKNOWN_NAME = Rule(
    "usage/unknown-name",
    got="an unknown name",
    need="a scheme, observer, rounding, check, rule, page or section",
    do="run `vexport explain` to list them{hint}",
)

# Versions of vLLM.
OTHER_VERSION = Rule(
    "usage/other-version",
    got="vLLM {version}",
    need="one of the --versions {known:or}",
    do="remove it, or add its version to --versions",
)
SAME_VERSION = Rule(
    "usage/same-version",
    got="a second interpreter with vLLM {version}, besides {other}",
    do="give one interpreter for each version",
)
