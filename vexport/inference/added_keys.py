"""Keys that vexport adds to lm-eval's result and sample files."""

SEED = "vexport_seed"
"""Key of a sample: its seed, if several responses were sampled for each document."""
FINISH_REASON = "finish_reason"
"""Key of a sample: the finish reasons of its responses, nested like `resps`."""
UNTEMPLATED = "untemplated_tasks"
"""Key of `config` in a results file: the tasks that ran without the chat template."""
