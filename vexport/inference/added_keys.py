"""Keys that vexport adds to lm-eval's result and sample files."""

SEED = "vexport_seed"
"""Key of a sample with a further response to a document: 1 for the second seed, 2 for the third.

Samples of the first seed do not have the key.
"""
FINISH_REASON = "finish_reason"
"""Key of a sample: the finish reasons of its responses, nested like `resps`."""
UNTEMPLATED = "untemplated_tasks"
"""Key of `config` in a results file: the tasks that ran without the chat template."""
