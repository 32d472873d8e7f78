"""Rules of a model's continuations of fixed prompts."""

from vexport.rules.book import Rule

_COMPARE = (
    "compare the checkpoint with its source (`vexport check --source`), or quantize with a "
    "finer scheme"
)
_TEXT = "{symptom} ({tokens:# token}, finish reason {finish_reason}): {text!r}"
_NEED = "finite numbers, and text in the prompt's language without repetition"

DEGENERATE = Rule("canary/degenerate", claim="values", got=_TEXT, need=_NEED, do=_COMPARE)
DEGENERATE_AS_REFERENCE = Rule(
    "canary/degenerate-as-reference",
    "warning",
    "values",
    got=_TEXT,
    need=_NEED,
    do="ignore this if the evaluation passes: vLLM agrees with the reference",
)
