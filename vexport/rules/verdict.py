"""Rules of a verdict: why a model passes, fails or is not judged."""

from vexport.rules.book import Rule

_DO_MORE = "evaluate more documents, or accept a larger loss"
_DO_OTHER_TASK = (
    "choose tasks that the baseline can do, in the prompt format that it was trained with"
)
_DO_CHECK = "run `vexport check` on it, or export it again"
_DO_LONGER = "raise max_gen_toks until responses end by themselves, and evaluate again"
_DO_LESS = (
    "keep the layers that lose most (`vexport explain sensitivity`), choose a scheme with more "
    "bits, or leave the choice to `scheme: auto`"
)

WITHIN_MARGIN = Rule(
    "verdict/within-margin",
    "info",
    got="{task} {change} ({bound}), margin {limit}{more}",
)
ALL_WITHIN_MARGIN = Rule(
    "verdict/all-within-margin",
    "info",
    got="{tasks} {loss} (worst: {task} {change}, {bound}){more}",
)
LOSS = Rule(
    "verdict/loss",
    got="{task} loses {amount} (at least {least}), margin {limit}{more}",
    do=_DO_LESS,
)
LOSSES = Rule(
    "verdict/losses",
    got="{tasks} {loss} (worst: {task} loses {amount}, at least {least}){more}",
    do=_DO_LESS,
)
NOT_SETTLED = Rule(
    "verdict/not-settled",
    got="{task} is not settled after {documents:# document}: {change}, between {low} and {high}, "
    "margin {limit}; {remedy}{more}",
    do=_DO_MORE,
)
SEVERAL_NOT_SETTLED = Rule(
    "verdict/several-not-settled",
    got="{count} of {total} tasks are not settled: {tasks}{more}",
    do=_DO_MORE,
)
MISSING_TASKS = Rule(
    "verdict/missing-tasks",
    got="{missing} (evaluate the same tasks, or select some with --task); {reason}",
    do="evaluate the same tasks with both models, or select tasks with --task",
)
# Obstacles of a task: it cannot pass, whatever its interval.
NO_ROOM = Rule(
    "verdict/no-room",
    got="cannot show a loss: {score}, so that even the worst candidate loses only {loss}{ways}",
    do=_DO_OTHER_TASK,
)
FEW_DOCUMENTS = Rule(
    "verdict/few-documents",
    got="cannot show a loss: it has {documents:# document}, and needs at least {least}",
    do=_DO_OTHER_TASK,
)
LOST_SCORE = Rule(
    "verdict/lost-score",
    got="cannot show a loss: {score}; {lost}",
    do=_DO_LONGER,
)
LOST_RESPONSES = Rule(
    "verdict/lost-responses",
    got="too many responses that do not count: {lost}",
    do=_DO_LONGER,
)
REFUSED = Rule("verdict/refused", got="vLLM refused it: {message}")
# Held-out text.
FEW_ROWS = Rule(
    "verdict/few-rows",
    got="the text has {rows} rows, and a verdict needs at least {least}",
    do="give more text, or read more rows (--text-rows)",
)
TEXT_WITHIN_LIMITS = Rule("verdict/text-within-limits", "info", got="{measures}{place}")
TEXT_LOSS = Rule("verdict/text-loss", got="{measures}{place}{others}", do=_DO_LESS)
TEXT_NOT_SETTLED = Rule(
    "verdict/text-not-settled",
    got="{measures}{place} is not settled; {remedy}",
    do="read more rows of the text (--text-rows), or accept a larger loss",
)
NO_DRAFTS = Rule(
    "verdict/no-drafts",
    got="no draft in {prompts:# prompt}, so that no length can be compared",
    do="give other text, or more (--text-rows)",
)
TEXT_TOKENS = Rule(
    "verdict/text-tokens",
    got="different tokens in row {row} of the text",
    need="the baseline's tokenizer",
    do=_DO_CHECK,
)
TEXT_NUMBERS = Rule(
    "verdict/text-numbers",
    got="log-probabilities that are not finite",
    do=_DO_CHECK,
)
LATE_LOSS = Rule(
    "verdict/late-loss",
    "warning",
    got="the first tokens of each row pass, and later tokens fail",
    do="compare rope_theta, rope scaling and sliding window in config.json with the source's, and "
    "check the scales of the KV cache",
)
