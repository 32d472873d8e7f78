"""Silence rules: their findings are listed apart and do not fail a checkpoint.

Only rules that judge the files of a checkpoint can be silenced. A refusal by vLLM's loaders, a
fault of the environment and a file that cannot be read are never silenced: vLLM would still not
load the checkpoint.
"""

from collections.abc import Collection
from dataclasses import replace

from vexport.checks import CHECKS, SOURCE, is_ok
from vexport.errors import InputError, nearest_hint
from vexport.records import CheckReport
from vexport.rules import all_rules, usage


def require_ignorable(ids: Collection[str], place: str) -> None:
    """Raise InputError for an id that no rule has, or whose rule cannot be silenced."""
    rules = all_rules()
    families = (*CHECKS, SOURCE)
    known = [each for each, rule in rules.items() if rule.family in families]
    for each in ids:
        if each in rules and each not in known:
            raise InputError.of(usage.RULE_OF_NO_CHECK, place, id=each)
        if each not in known:
            hint = nearest_hint(each, known)
            raise InputError.of(usage.UNKNOWN_RULE, place, id=each, hint=hint)


def without_ignored(report: CheckReport, ids: Collection[str]) -> CheckReport:
    """Return the report with the findings of these rules moved to `ignored`."""
    kept = tuple(finding for finding in report.findings if finding.rule not in ids)
    ignored = tuple(finding for finding in report.findings if finding.rule in ids)
    return replace(report, ok=is_ok(kept), findings=kept, ignored=(*report.ignored, *ignored))
