"""The keys that vexport adds to lm-eval's result and sample files."""

SEED = "vexport_seed"
"""Of a sample: its seed, if several answers were sampled for each document."""
FINISH_REASON = "finish_reason"
"""Of a sample: the finish reasons of its answers, nested as `resps`."""
UNTEMPLATED = "untemplated_tasks"
"""Of `config` in a results file: the tasks that were asked without the chat template."""
