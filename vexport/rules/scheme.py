"""Rules of the names and arguments of schemes."""

from vexport.rules.book import Rule

UNKNOWN = Rule("scheme/unknown", got="unknown name{hint}", do="see `vexport list schemes`")
ARGUMENTS = Rule(
    "scheme/arguments",
    got="{reason}",
    need="arguments that vLLM runs and vexport writes",
    do="change the arguments, or use a scheme from `vexport list schemes`",
)
GROUP_SIZE_TWICE = Rule(
    "scheme/group-size-twice",
    got="{size}",
    need="{named}, as in the scheme's name",
    do="give the group size only once",
)
GROUP_SIZE = Rule(
    "scheme/group-size",
    got="{size}",
    need="{only}",
    do="remove the group size, or use an integer scheme such as W4A16",
)
