"""Rules of start-up logs of `vllm serve`."""

from vexport.rules.book import Rule

NO_LOG = Rule(
    "serving/no-log",
    got="text without any line of vLLM",
    need="the start-up log of `vllm serve`",
    do="save the output of the server from its start (also stderr), and pass this file",
)
TOO_LARGE = Rule(
    "serving/too-large",
    got="more than {most} MB",
    need="the start-up log of `vllm serve`, at most {most} MB",
    do="pass the beginning of the log, such as `head -c 10M LOG | vexport load --log -`",
)
NO_MODEL = Rule(
    "serving/no-model",
    got="{found}",
    need="the address of one `vllm serve` (http://HOST:PORT/v1), with one base model",
    do="pass the address of the server behind a gateway, or its start-up log, and set "
    "VEXPORT_API_KEY if it needs a key",
)
NO_RESPONSE = Rule(
    "serving/no-response",
    got="{found}",
    do="check the server, its log and its address (http://HOST:PORT/v1), and run the command again",
)
INCOMPLETE = Rule(
    "serving/incomplete",
    got="nothing about {missing:and}",
    need="the log of a whole start of `vllm serve`",
    do="save the output of the server from its start until it serves requests",
)
NOT_COMPARED = Rule(
    "serving/not-compared",
    got="not compared: {what}: {why}",
    do="save the output of the server from its start until it serves requests, at level INFO",
)
OTHER_VERSION = Rule(
    "serving/other-version",
    got="vLLM {found}, and vLLM {installed} for the dry load",
    need="the same version",
    do="set --vllm-python to an interpreter with vLLM {found}",
)
NO_DRY_LOAD = Rule(
    "serving/no-dry-load",
    got="no dry load to compare with: {reason}",
    do="compare the kernels by hand, on a machine with the GPU",
)
OTHER_MODEL = Rule(
    "serving/other-model",
    got="another model: {name} {found}",
    need="{expected}, as in the checkpoint",
    do="pass the checkpoint that the server loads, or the log of the checkpoint's server",
)
DIFFERENCE = Rule(
    "serving/difference",
    got="{name}: {found}{reason}",
    need="{expected}, as in the dry load",
    do="start the server as it was tested, or state a tested argument with --engine-arg",
)
DISABLED = Rule("serving/disabled", "info", got="{message}")
NUMBERS = Rule(
    "serving/numbers",
    "warning",
    got="{message}",
    need="no change of stored values or scales by vLLM",
    do="evaluate the running server with `vexport eval URL`",
)
