"""Rules of the tokenizer, the processor and the chat template."""

from vexport.rules.book import Rule

_COPY = "copy the source's tokenizer"

LOST_TOKENIZER = Rule(
    "tokenizer/lost-tokenizer",
    claim="refused",
    got="no such file, although {settings} has the settings of a tokenizer",
    do=_COPY,
    loader_faults=(),
)
NO_TOKENIZER = Rule(
    "tokenizer/no-tokenizer",
    "warning",
    got="no tokenizer: `vllm serve` needs the option --tokenizer",
    do=_COPY,
)
NO_PROCESSOR = Rule(
    "tokenizer/no-processor",
    claim="refused",
    got="neither {files:or}, which {model} needs for images, sound or video: vLLM only starts "
    "with --language-model-only",
    do="copy the source's files",
    loader_faults=(),
)
NO_CHAT_TEMPLATE = Rule(
    "tokenizer/no-chat-template",
    "info",
    got="no chat template: vLLM can complete text, but refuses chat requests",
    do="copy the source's chat template, or serve the model with --chat-template",
)
NO_ADDED_TOKENS = Rule(
    "tokenizer/no-added-tokens",
    claim="refused",
    got="no list of added tokens",
    do=_COPY,
    loader_faults=(),
)
UNREADABLE = Rule(
    "tokenizer/unreadable",
    claim="refused",
    got="a file that the tokenizers library cannot open: {reason}",
    need="a valid tokenizer",
    do="copy the source's file",
)
