"""Rules of accepted baselines, and of evaluations that are compared with one."""

from vexport.rules.book import Rule

_ACCEPT = "accept the baseline again"

OTHER_FILE = Rule(
    "baseline/other-file",
    got="something else",
    need="a new file or an accepted baseline",
    do="name another file, or remove it first",
)
ROWS = Rule(
    "baseline/rows",
    got="{found}",
    need="one response with a {metric} score for each of the first documents",
    do="evaluate all documents or the first (--limit), without --seeds; or use --baseline, or "
    "another metric with --gate",
)
OTHER_DOCUMENTS = Rule(
    "baseline/other-documents",
    got="{count:# document} with {metric}{older}",
    need="the {accepted:,} that were accepted",
    do=f"evaluate with the same --limit, or {_ACCEPT}",
)
OTHER_QUESTION = Rule(
    "baseline/other-question",
    got="another question than in the accepted baseline ({reason})",
    do=f"evaluate as before (the task's files, the chat template), or {_ACCEPT}",
)
OTHER_SETTING = Rule(
    "baseline/other-setting",
    got="{value}",
    need="{accepted}, as in {file}",
    do=f"leave it out, or {_ACCEPT} with this value",
)
