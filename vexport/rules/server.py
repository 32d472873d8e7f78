"""Rules of servers that answer prompts: addresses, keys, models and replies."""

from vexport.rules.book import Rule

_MODEL = "choose a model with --model (--baseline-model for the baseline)"
_NO_SCORES = "remove --text, and tasks that score likelihoods (multiple choice, perplexity)"
_TOKENIZER = "set --tokenizer to a folder or ORG/NAME (evaluate: {{tokenizer: ...}} in a scenario)"

# The address and the key.
ADDRESS = Rule(
    "server/address",
    got="{found}",
    need="the address of a server (http://HOST:PORT/v1), without password, query and fragment",
    do="correct it, and set VEXPORT_API_KEY to the server's key if it needs one",
)
PROXY = Rule(
    "server/proxy",
    got="a proxy address that vexport cannot use",
    need="http://HOST:PORT",
    do="correct the environment variable, or exclude the server with NO_PROXY",
)
KEY_TEXT = Rule(
    "server/key-text",
    got="characters that an HTTP header cannot contain",
    do="set the variable to the key only",
)
KEY = Rule(
    "server/key",
    got="{reply}, in response to {request}",
    do="set VEXPORT_API_KEY to a key that the server accepts",
)
CERTIFICATE = Rule(
    "server/certificate",
    got="a certificate that cannot be verified ({reason})",
    do="set SSL_CERT_FILE to the file of its certificate authority",
)

# Replies.
NO_RESPONSE = Rule(
    "server/no-response",
    got="no response to {request}: {reason}",
    do="check the server, its log and its address (http://HOST:PORT/v1), and run the command again "
    f"to resume: finished responses are kept; if it cannot score prompts, {_NO_SCORES}",
)
REFUSED = Rule(
    "server/refused",
    got="{reply}, in response to {request}",
    do="change the parameters that the server refuses (--gen-kwargs, the task's "
    "generation_kwargs), or correct the address (http://HOST:PORT/v1; vexport does not follow "
    "redirects, because the API key would be sent there)",
)
NO_COMPLETIONS = Rule(
    "server/no-completions",
    got="no /completions with prompts as token ids ({reply}); with chat completions, the server's "
    "template would change the prompts",
    do=f"{_MODEL}, or use the address of vLLM itself behind the gateway; or evaluate both models "
    "with lm-eval's local-chat-completions and compare the results with `vexport verdict`",
)
NO_SCORES = Rule(
    "server/no-scores",
    got="no log-probabilities of prompts from the server ({reply})",
    do="use a server with echo, logprobs and return_tokens_as_token_ids, as vLLM's, or "
    f"{_NO_SCORES}",
)

# The model.
MODEL = Rule("server/model", got="{found}", need="one of {known}", do=_MODEL)
NO_LIST = Rule(
    "server/no-list",
    got="no list of models ({reply})",
    do=f"{_MODEL} and its tokenizer with --tokenizer, correct the address "
    "(http://HOST:PORT/v1, without redirects), or set VEXPORT_API_KEY",
)
OTHER_MODEL = Rule(
    "server/other-model",
    got="the served model has changed: {now} instead of {before}",
    do="check the server, and run the command again to resume: finished responses are kept",
)

# The tokenizer.
NO_TOKENIZER = Rule(
    "server/no-tokenizer",
    got="no tokenizer in {name}",
    do=_TOKENIZER,
)
UNCONFIRMED_TOKENIZER = Rule(
    "server/unconfirmed-tokenizer",
    got="{name}, a hub model that a server on another machine reports",
    need="your confirmation before the download",
    do="add --tokenizer {name} if you expect this model (evaluate: {{tokenizer: {name}}} in a "
    "scenario)",
)

# Counters of drafts.
NO_DRAFTS = Rule(
    "server/no-drafts",
    got="no draft counters at /metrics",
    do="start the server with --speculative-config, or remove --speculative",
)
COUNTERS = Rule(
    "server/counters",
    got="{found}",
    need="vLLM's counters of one finished request",
    do="run the command again, without another client or a restart of the server, which must be "
    "vLLM's",
)
