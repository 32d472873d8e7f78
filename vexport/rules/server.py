"""Rules of servers that answer prompts: addresses, keys, models and replies."""

from vexport.rules.book import Rule

_ADDRESS = "check the server and its address (http://HOST:PORT/v1)"
_MODEL = "choose a model with --model (--baseline-model for the baseline)"
_NO_SCORES = "remove --text, and tasks that score likelihoods (multiple choice, perplexity)"
_TOKENIZER = "set --tokenizer to a folder or ORG/NAME (evaluate: {{tokenizer: ...}} in a scenario)"

# The address and the key.
ADDRESS = Rule(
    "server/address", got="no host", need="the address of a server", do="use http://HOST:PORT/v1"
)
MORE_THAN_ADDRESS = Rule(
    "server/more-than-address",
    got="a password, a query or a fragment in the address",
    need="only the address",
    do="remove it, and set VEXPORT_API_KEY to the server's key if it needs one",
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
    got="no response: {reason}",
    do=f"{_ADDRESS}, and run the command again to resume: finished responses are kept",
)
SAME_FAILURE = Rule(
    "server/same-failure",
    got="no response to {request}, {times} times with the same error: {reason}",
    do=f"check the server's log; if it cannot score prompts, {_NO_SCORES}",
)
REDIRECT = Rule(
    "server/redirect",
    got="{reply}, in response to {request}",
    do="use the address that the server redirects to (vexport does not follow redirects, because "
    "the API key would be sent there)",
)
REFUSED = Rule(
    "server/refused",
    got="{reply}, in response to {request}",
    do="change the parameters that the server refuses (--gen-kwargs, the task's "
    "generation_kwargs), or check the address (http://HOST:PORT/v1)",
)
NO_COMPLETIONS = Rule(
    "server/no-completions",
    got="no completions ({reply})",
    need="/completions with prompts as token ids (with chat completions, the server's template "
    "would change the prompts)",
    do="use the address of vLLM itself behind the gateway; or evaluate both models with lm-eval's "
    "local-chat-completions and compare the results with `vexport verdict`",
)
NO_SCORES = Rule(
    "server/no-scores",
    got="no log-probabilities of prompts from the server ({reply})",
    need="completions with echo, logprobs and return_tokens_as_token_ids, as vLLM supports them",
    do=_NO_SCORES,
)
SHORT_CONTEXT = Rule(
    "server/short-context",
    got="sequences of at most {most:# token}",
    need="longer sequences for --text",
    do="start the server with a longer --max-model-len",
)

# The model.
MODEL = Rule("server/model", got="{found}", need="one of {known}", do=_MODEL)
NO_LIST = Rule(
    "server/no-list",
    got="no list of models ({reply})",
    need="/models, or the model's name",
    do=f"{_MODEL} and its tokenizer with --tokenizer, correct the address "
    "(http://HOST:PORT/v1), or set VEXPORT_API_KEY",
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
    need="a folder with tokenizer.json or other files of a tokenizer, or a model of the hub",
    do=_TOKENIZER,
)
UNCONFIRMED_TOKENIZER = Rule(
    "server/unconfirmed-tokenizer",
    got="{name}, a hub model that a server on another machine reports",
    need="your confirmation before the download",
    do="add --tokenizer {name} if you expect this model (evaluate: {{tokenizer: {name}}} in a "
    "scenario)",
)
UNTRUSTED_TOKENIZER = Rule(
    "server/untrusted-tokenizer",
    got="{reason}",
    do="pass the tokenizer with --tokenizer: --trust-remote-code does not apply to a tokenizer "
    "that the server reports",
)

# Counters of drafts.
NO_DRAFTS = Rule(
    "server/no-drafts",
    got="no draft counters at /metrics",
    need="a vLLM server started with --speculative-config",
    do="start the server with --speculative-config, or remove --speculative",
)
COUNTERS = Rule(
    "server/counters",
    got="{found}",
    need="vLLM's counters of one finished request",
    do="run the command again, without another client or a restart of the server, which must be "
    "vLLM's",
)
