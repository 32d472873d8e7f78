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
