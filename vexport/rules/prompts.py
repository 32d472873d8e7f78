"""Rules of the prompts that both models get: tokenizers, chat templates and lengths."""

from vexport.rules.book import Rule

_WITHOUT = (
    "do not apply a template (--no-apply-chat-template, or apply_chat_template: false in a "
    "scenario)"
)

TOKENIZER = Rule(
    "prompts/tokenizer",
    got="transformers cannot read the tokenizer ({reason})",
    do="copy tokenizer.json, or other files of the tokenizer, from the source to the checkpoint",
)
NO_TEMPLATE = Rule(
    "prompts/no-template",
    got="the model has none",
    do=f"copy chat_template.jinja from a model that has one, or {_WITHOUT}",
)
NO_SUCH_TEMPLATE = Rule(
    "prompts/no-such-template",
    got="no template named {name}: the model has {names:and}",
    do="choose one (--chat-template NAME, or apply_chat_template: NAME in a scenario)",
)
MULTITURN = Rule(
    "prompts/multiturn",
    got="fewshot_as_multiturn without a chat template",
    do="remove fewshot_as_multiturn, or add a chat template",
)
OTHER_TEMPLATE = Rule(
    "prompts/other-template",
    got="{difference}",
    need="the same prompts as the {other}",
    do=f"copy chat_template.jinja from the {{other}}, or {_WITHOUT}",
)
TEMPLATE = Rule(
    "prompts/template",
    got="{reason}",
    need="a template that renders the conversations of the tasks",
    do=f"correct it, remove the system instruction, or {_WITHOUT}",
)
TOO_LONG = Rule(
    "prompts/too-long",
    got="a prompt of {prompt:# token} and {new} to generate ({reason})",
    do="raise max_model_len (--max-model-len of a server), or lower --max-gen-toks (256 by "
    "default), --num-fewshot or (with --text) --text-tokens",
)
SHORT_CONTEXT = Rule(
    "prompts/short-context",
    got="a maximum sequence length of {limit}",
    need="a longer one for rows of text",
    do="raise max_model_len (--max-model-len of a server)",
)
