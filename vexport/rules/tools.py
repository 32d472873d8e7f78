"""Rules of tools that models call: definitions, chat templates and parsers of calls."""

from vexport.rules.book import Rule

FORM = Rule("tools/form", got="{found}", need="{need}", do="correct the file (--tools)")
SCHEMA = Rule(
    "tools/schema",
    got="{reason}",
    need="a JSON schema (2020-12, unless `$schema` states another version)",
    do="correct the file (--tools)",
)
TWICE = Rule(
    "tools/twice",
    got="a second tool {name} (the first is {first})",
    need="each name only once",
    do="remove or rename one of them",
)
NO_ARGUMENTS = Rule(
    "tools/no-arguments",
    got="a schema for which vexport finds no arguments ({reason})",
    do="add `examples` to the parameters in the file (--tools), or correct the schema",
)
NO_TEMPLATE = Rule(
    "tools/no-template",
    got="a chat template that leaves tools out",
    need="a template that lists the tools of a conversation",
    do="copy chat_template.jinja from a model that calls tools, choose another template "
    "(--chat-template), or remove the task",
)
NO_PARSER = Rule(
    "tools/no-parser",
    got="no parser of tool calls",
    do="give the parser that `vllm serve` needs for this model, such as --tool-call-parser hermes",
)
UNKNOWN_PARSER = Rule(
    "tools/unknown-parser",
    got="the unknown parser {name}{hint}",
    need="one of the parsers of vLLM {vllm}",
    do="choose one: {known}",
)
UNFIT_PARSER = Rule(
    "tools/unfit-parser",
    got="the parser {name} does not fit the model ({reason})",
    do="give the parser that `vllm serve` needs for this model",
)
TOO_LONG = Rule(
    "tools/too-long",
    got="a conversation of {prompt:# token} and {new} to generate ({reason})",
    do="raise max_model_len (--max-model-len of a server), or choose parts with fewer tools "
    "(--task tool-calls-1,tool-calls-10)",
)
REFUSED = Rule(
    "tools/refused",
    got="{reply}, in response to {request}",
    need="a server that accepts tools in chat completions",
    do="start vLLM with --enable-auto-tool-choice --tool-call-parser NAME, or remove the task",
)
