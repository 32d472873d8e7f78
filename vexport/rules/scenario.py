"""Rules of scenarios, and of recipes that llm-compressor wrote."""

from vexport.rules.book import Rule

UNKNOWN_KEY = Rule(
    "scenario/unknown-key", got="the unknown key {key!r}", need="one of {known}", do="{remedy}"
)
MORE_PROBLEMS = Rule(
    "scenario/more-problems",
    got="{count:# more problem}, not shown here",
    do="correct the problems above first",
)
NO_SCENARIO = Rule(
    "scenario/no-scenario",
    got="not a scenario (a YAML file with source and rules)",
    do="give a scenario such as demo-nvfp4.yaml, which `vexport demo` writes",
)
REPORT = Rule(
    "scenario/report",
    got="values that do not fit together ({reason})",
    need="a report as vexport wrote it",
    do="restore the file, or call `vexport run` again",
)
NO_MODIFIER = Rule(
    "scenario/no-modifier",
    got="no modifier in it, as in a recipe of llm-compressor in YAML: {names:or}",
    do="use the recipe.yaml that llm-compressor saves with each checkpoint",
)
MODIFIER = Rule(
    "scenario/modifier",
    got="a modifier that vexport does not support",
    need="{names:or}",
    do="remove it, or quantize with llm-compressor and check the result with `vexport check`",
)
MODIFIER_KEY = Rule("scenario/modifier-key", got="{found}", need="{need}", do="{remedy}")
