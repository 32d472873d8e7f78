"""Rules of the last line of a command: why it ends with another exit code than 0."""

from vexport.rules.book import Rule

FINDINGS = Rule("conclusion/findings", got="it fails with {counted} at {first}, shown above")
SEVERAL = Rule("conclusion/several", got="they fail: {names}", do="{remedy}")
NOT_JUDGED = Rule(
    "conclusion/not-judged",
    got="not judged, but --strict requires it: {what}: {why}",
    do="remove the cause, load it where vLLM runs (`vexport load`), or omit --strict",
)
REFUSALS = Rule(
    "conclusion/refusals",
    got="vLLM could not run the planned checkpoint: {count:# refusal}, shown above",
)
FAIL = Rule("conclusion/fail", got="FAIL{why}", do="{advice}")
INCONCLUSIVE = Rule("conclusion/inconclusive", got="INCONCLUSIVE{why}", do="{advice}")
REFUSED_BASELINE = Rule(
    "conclusion/refused-baseline",
    got="vLLM refuses the first variant, the baseline of all others: {name}{why}",
    do="begin with a --serve that vLLM accepts; nothing else was tried",
)
