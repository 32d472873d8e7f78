"""Rules about the rules of a scenario or recipe."""

from vexport.rules.book import Rule

HIDDEN = Rule(
    "rules/hidden",
    "warning",
    got="{count:# layer}, each matched by an earlier rule",
    need="a layer that no earlier rule matches",
    do="move the rule up, or remove it: the first match wins",
)
NO_LAYER_IGNORED = Rule(
    "rules/no-layer-ignored",
    "warning",
    got="no such layer in this model",
    do="correct the pattern, unless the model is supposed to have no such layer",
)
NO_LAYER = Rule(
    "rules/no-layer",
    got="no matching layer in this model",
    do="give the name of a linear layer, its last parts, re:REGEX or Linear, or remove the "
    "pattern{hint}",
)
TIED_HEAD = Rule(
    "rules/tied-head",
    got="a model without an output head of its own: vLLM and transformers use the embeddings",
    need="a stored output head to quantize",
    do="remove the rule, or store a copy of the embeddings as the head, with "
    "tie_word_embeddings: false in config.json (`vexport explain lm_head`)",
)
PATTERN = Rule("rules/pattern", got="{found}", need="{need}", do="correct the pattern")
SLOW_PATTERN = Rule(
    "rules/slow-pattern",
    got="{seconds:g} s or more to match names such as {name}",
    need="a regular expression that matches quickly, or vLLM would hang on it too",
    do="avoid repetitions inside repetitions",
)
UNTRUSTED_OBSERVER = Rule(
    "rules/untrusted-observer",
    got="{observer}, whose code vexport would run",
    need="permission to run code",
    do="use an observer of vexport, or add --trust-remote-code",
)
OBSERVER_CLASS = Rule(
    "rules/observer-class", got="{reason}", do="correct the class, or use vexport's observers"
)
OBSERVER_IMPORTANCE = Rule(
    "rules/observer-importance",
    got="{observer}, which needs importance",
    need="an observer that does not use importance: only imatrix_mse and nvfp4_expanded_imatrix "
    "receive it",
    do="use one of these",
)
OBSERVER_RANGE = Rule(
    "rules/observer-range",
    got="{observer}, which overrides get_qparams()",
    need="an observer that sets a range, because fused layers share one range of inputs",
    do="remove get_qparams(), and set min_vals and max_vals in update_statistics_from_observed()",
)
ENGINE_ARGUMENT = Rule(
    "rules/engine-argument",
    got="{value!r}",
    need="{need}",
    do="correct it, or allow any argument with --trust-remote-code",
)
INTERPRETER = Rule(
    "rules/interpreter",
    got="{python}, which vexport would run",
    need="permission to run a program that a file names",
    do="remove it and use --vllm-python, or add --trust-remote-code",
)
