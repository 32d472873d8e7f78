"""Rules of the documents and metrics of two results that are compared."""

from vexport.rules.book import Rule

_SAME = "evaluate both with the same lm-eval, task files, few-shot examples and chat template"

OTHER_DIRECTION = Rule(
    "pairs/other-direction",
    got="{metric} with another higher_is_better than in the baseline",
    do=_SAME,
)
OTHER_QUESTION = Rule(
    "pairs/other-question",
    got="{difference} (also different: {changed})",
    need="the same question",
    do=_SAME,
)
MISSING_DOCUMENTS = Rule(
    "pairs/missing-documents",
    got="no {document}, {count} missing in all{older}",
    do="evaluate the documents of {file}, with the same --limit, --samples and --seeds",
)
NO_SCORE = Rule(
    "pairs/no-score",
    got="{found}",
    need="one number a document",
    do="give a task with a metric of lm-eval, such as acc or exact_match, log its samples, and "
    "evaluate without --predict_only",
)
SCORE = Rule(
    "pairs/score",
    got="{metric} of {baseline} (baseline) and {candidate} (candidate)",
    need="finite numbers up to {most:g}, and shares from 0 to 1",
    do="look at both responses, evaluate again",
)
